"""Graph-aware versions of JAX's transforms."""

from anabranch.transforms._associative_scan import associative_scan
from anabranch.transforms._autodiff import jvp, linearize, vjp
from anabranch.transforms._capture import capture
from anabranch.transforms._carry import Carry
from anabranch.transforms._checkify import checkify
from anabranch.transforms._cond import cond, switch
from anabranch.transforms._custom_jvp import CustomJVP, custom_jvp
from anabranch.transforms._custom_vjp import CustomVJP, custom_vjp
from anabranch.transforms._eval_shape import eval_shape
from anabranch.transforms._export import Exported, export
from anabranch.transforms._fori_loop import fori_loop
from anabranch.transforms._grad import grad, value_and_grad
from anabranch.transforms._jacobians import hessian, jacfwd, jacrev
from anabranch.transforms._jit import JitFunction, jit
from anabranch.transforms._lift import lift
from anabranch.transforms._make_jaxpr import make_jaxpr
from anabranch.transforms._map import map
from anabranch.transforms._pmap import pmap
from anabranch.transforms._remat import checkpoint, remat
from anabranch.transforms._scan import scan
from anabranch.transforms._shard_map import shard_map
from anabranch.transforms._specs import DiffState, StateAxes, StateSharding
from anabranch.transforms._split_rngs import SplitStreams, fork_rngs, split_rngs
from anabranch.transforms._vmap import vmap
from anabranch.transforms._while_loop import while_loop

__all__ = [
    "Carry",
    "CustomJVP",
    "CustomVJP",
    "DiffState",
    "Exported",
    "JitFunction",
    "SplitStreams",
    "StateAxes",
    "StateSharding",
    "associative_scan",
    "capture",
    "checkify",
    "checkpoint",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "eval_shape",
    "export",
    "fori_loop",
    "fork_rngs",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "lift",
    "linearize",
    "make_jaxpr",
    "map",
    "pmap",
    "remat",
    "scan",
    "shard_map",
    "split_rngs",
    "switch",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
