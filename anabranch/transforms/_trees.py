"""Trees of arrays in one place: the state of an optax optimiser in a Variable, or in an attribute.

Such a tree is a value. It is never written, a step puts another one in its place, of the same
structure. JAX takes trees apart in C, and compares structures there, so a plan reads the place and
asks JAX, rather than looking at each tuple on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kind import Kind
from anabranch.graph._leaf_info import LeafInfos
from anabranch.transforms._spine import are_arrays

_NONE = _static.encode(None)
TREE_KINDS = frozenset({_kinds.TUPLE, _kinds.PYTREE})


class TreePlace(NamedTuple):
    """A place with a tree of arrays."""

    holder: Any  # the attributes of a Module; or a Variable, if the key is None
    key: str | None
    treedef: Any

    def get(self) -> Any:
        """Return the tree.

        Raises:
            KeyError: somebody has deleted it.
        """
        return self.holder._value if self.key is None else self.holder[self.key]

    def put(self, tree: Any) -> None:
        """Put another one in its place."""
        if self.key is None:
            write_variable(self.holder, tree)
        else:
            self.holder[self.key] = tree

    def read(self) -> list[Any] | None:
        """Return the arrays, or None if the structure has changed."""
        leaves, treedef = jax.tree.flatten(self.get())
        return leaves if treedef == self.treedef and are_arrays(leaves) else None


write_variable: Any = _kinds.VARIABLE.cell.write if _kinds.VARIABLE.cell else None


def tree_of(x: Any, leaf_types: Collection[type]) -> Any:
    """Return the structure of a value that holds arrays and nothing else; None if it is no such.

    Arguments:
        x: a value.
        leaf_types: the types of arrays.
    """
    pending = [x]
    while pending:
        value = pending.pop()
        kind = _classify.RULES.get(type(value))
        if isinstance(kind, Kind):
            extra, _, children = kind.open(value)
            if kind not in TREE_KINDS or not _is_exact(kind, extra):
                return None
            pending += children
        elif value is not None and type(value) not in leaf_types:
            return None
    treedef = jax.tree.structure(x)
    return treedef if treedef.num_leaves else None


Entries = Callable[[int], Entry]
"""From the number of an entry to the entry."""


def tree_entries(entries: Entries, edge: Edge) -> list[int] | None:
    """Return the entries of a tree that holds arrays and nothing else; None if it is no such tree.

    Arguments:
        entries: see `Entries`.
        edge: to the root of the tree.
    """
    if type(edge) is not int or edge < 0:
        return None
    pending, found = [edge], list[int]()
    has_arrays = False
    while pending:
        index = pending.pop()
        entry = entries(index)
        if entry.kind not in TREE_KINDS or not _is_exact(entry.kind, entry.extra):
            return None
        found.append(index)
        for child in entry.edges:
            if type(child) is not int:
                if not is_structure(static_at(entries, child)):
                    return None
            elif child < 0:
                has_arrays = True
            else:
                pending.append(child)
    return found if has_arrays else None


def _is_exact(kind: Kind, extra: Any) -> bool:
    """Tell whether JAX, which compares static parts with `==`, tells all of them apart."""
    if kind is _kinds.TUPLE:
        return True
    _, exact = extra
    return exact is None or exact == _NONE or exact[1] is LeafInfos


def is_structure(edge: Any) -> bool:
    """Tell whether a static value is a part of structures to JAX: None, empty tuples."""
    plain = edge[0] in (_static.HASHED, _static.TUPLE)
    return plain and not jax.tree.leaves(_static.decode(edge))


def static_at(entries: Entries, edge: Edge) -> Edge:
    """Return a static edge, the one that is meant if it names a place."""
    while type(edge) is tuple and edge[0] is _static.LOCATED:
        edge = entries(edge[1]).edges[edge[2]]
    return edge


def leaves_below(entries: Entries, edge: int) -> list[int]:
    """Return the numbers of the leaves of a tree, in its order."""
    leaves: list[int] = []
    pending = [edge]
    while pending:
        at = pending.pop()
        if at < 0:
            leaves.append(~at)
        else:
            pending += [e for e in reversed(entries(at).edges) if type(e) is int]
    return leaves
