"""Objects to (graphdef, state) and back: knows nothing of JAX transforms."""

from anabranch.graph._classify import node, register_node
from anabranch.graph._compare import Difference, diff, equal
from anabranch.graph._context import (
    IndexMap,
    MergeContext,
    RefMap,
    SplitContext,
    merge_context,
    split_context,
    update_context,
)
from anabranch.graph._filters import (
    All,
    Any,
    Everything,
    Filter,
    Not,
    Nothing,
    OfType,
    PathContains,
    WithTag,
    to_predicate,
)
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._iterate import find_aliases, iter_children, iter_nodes
from anabranch.graph._leaf_info import LeafInfo
from anabranch.graph._map import map_leaves, recursive_map
from anabranch.graph._merge import clone, merge
from anabranch.graph._module import Module
from anabranch.graph._pop import pop
from anabranch.graph._recording import perturb, sow
from anabranch.graph._rngs import Rngs, RngStream
from anabranch.graph._split import graphdef, split, state
from anabranch.graph._state import State
from anabranch.graph._update import update
from anabranch.graph._variable import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    RngCount,
    RngKey,
    Variable,
)

__all__ = [
    "All",
    "Any",
    "BatchStat",
    "Cache",
    "Difference",
    "Everything",
    "Filter",
    "GraphDef",
    "IndexMap",
    "Intermediate",
    "LeafInfo",
    "MergeContext",
    "Module",
    "Not",
    "Nothing",
    "OfType",
    "Param",
    "PathContains",
    "Perturbation",
    "RefMap",
    "RngCount",
    "RngKey",
    "RngStream",
    "Rngs",
    "SplitContext",
    "State",
    "Variable",
    "WithTag",
    "clone",
    "diff",
    "equal",
    "find_aliases",
    "graphdef",
    "iter_children",
    "iter_nodes",
    "map_leaves",
    "merge",
    "merge_context",
    "node",
    "perturb",
    "pop",
    "recursive_map",
    "register_node",
    "sow",
    "split",
    "split_context",
    "state",
    "to_predicate",
    "update",
    "update_context",
]
