"""Trees of arrays in one place: the state of an optax optimiser in a Variable, or in an attribute.

Such a tree is a value. It is never written, a step puts another one in its place, of the same
structure. JAX takes trees apart in C, and compares structures there, so a plan reads the place and
asks JAX, rather than looking at each tuple on the way. JAX compares static parts with `==`, to
which 1 and True are the same: where that matters they are compared by type, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax

from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kind import Kind
from anabranch.graph._leaf_info import LeafInfos
from anabranch.graph._pytrees import PytreeKind, static_part

CONTAINERS = {list: _kinds.LIST, dict: _kinds.DICT}
"""Those that JAX takes apart, too; they have identity."""

_LARGE = 24  # tuples and what they hold


def is_tree(kind: Kind) -> bool:
    """Tell whether something is a value, and JAX takes it apart and puts it together."""
    return kind is _kinds.TUPLE or isinstance(kind, PytreeKind)


class Tree(NamedTuple):
    """A value that holds arrays and nothing else."""

    treedef: Any
    statics: tuple[Any, ...]  # see `statics_of`
    numbers: bool  # whether Python numbers are leaves everywhere in it


def tree_of(x: Any, leaf_types: Collection[type]) -> Tree | None:
    """Return what a value that holds arrays is besides; None if it is no such, or holds none.

    Arguments:
        x: a value.
        leaf_types: the types of arrays.
    """
    pending, numbers = [x], True
    while pending:
        value = pending.pop()
        kind = _classify.RULES.get(type(value))
        if isinstance(kind, Kind):
            if not is_tree(kind):
                return None
            numbers = numbers and kind.numbers is not False
            pending += kind.open(value)[2]
        elif value is not None and type(value) not in leaf_types:
            return None
    treedef = jax.tree.structure(x)
    return Tree(treedef, statics_of(treedef), numbers) if treedef.num_leaves else None


def statics_of(treedef: Any) -> tuple[Any, ...]:
    """Return those static parts of a structure that may equal others, which are not the same.

    Two trees have the same structure if their treedefs are equal and these parts are, too.
    """
    pending, found = [treedef], list[Any]()
    while pending:
        node = pending.pop()
        data = node.node_data()
        if data is not None and data[0] is not dict and data[1] is not None:
            encoded = static_part(data[1], node)
            if not _is_exact(encoded):
                found.append(encoded)
        pending += node.children()
    return tuple(found)


def _is_exact(encoded: Any) -> bool:
    """Tell whether `==` holds for nothing but the same."""
    tag, cls, *rest = encoded
    if tag is _static.TUPLE:
        return all(map(_is_exact, rest[0]))
    if tag is not _static.HASHED:
        return False
    return cls is LeafInfos or cls.__eq__ is object.__eq__


Entries = Callable[[int], Entry]
"""From the number of an entry to the entry."""


def tree_entries(
    entries: Entries, edge: Edge, contains: Callable[[int], bool] = lambda index: False
) -> list[int] | None:
    """Return the entries of a tree that holds arrays, if anything; None if it is no such tree.

    Arguments:
        entries: see `Entries`.
        edge: to the root of the tree.
        contains: whether the list or dictionary with some index may be a part of it.
    """
    if type(edge) is not int:
        return [] if is_structure(static_at(entries, edge)) else None
    if edge < 0:
        return None
    pending, found = [edge], dict[int, None]()
    while pending:
        index = pending.pop()
        entry = entries(index)
        if not is_tree(entry.kind) and (
            not (is_container(entry) and contains(index)) or index in found
        ):
            return None  # one that contains itself, or is in two places, is no tree
        found[index] = None
        for child in entry.edges:
            if type(child) is not int:
                if not is_structure(static_at(entries, child)):
                    return None
            elif child >= 0:
                pending.append(child)
    return [*found]


def is_container(entry: Entry) -> bool:
    """Tell whether an entry is a list, or a dictionary with keys that JAX tells apart."""
    return entry.kind is CONTAINERS.get(entry.cls) and (
        entry.cls is list or all([type(key) is str for key in entry.keys])  # noqa: C419
    )


def is_structure(edge: Any) -> bool:
    """Tell whether a static value is a part of structures to JAX: None, empty tuples."""
    plain = edge[0] in (_static.HASHED, _static.TUPLE)
    return plain and not jax.tree.leaves(_static.decode(edge))


def static_at(entries: Entries, edge: Edge) -> Edge:
    """Return a static edge, the one that is meant if it names a place."""
    while type(edge) is tuple and edge[0] is _static.LOCATED:
        edge = entries(edge[1]).edges[edge[2]]
    return edge


def are_equal(before: Entries, old: Edge, after: Entries, new: Edge) -> bool:
    """Tell whether two values hold no arrays, and the same besides; then they are one value."""
    pending = [(old, new)]
    while pending:
        one, other = pending.pop()
        a, b = _opened(before, one), _opened(after, other)
        if a is None or b is None:
            if one != static_at(after, other) or (type(one) is int and one < 0):
                return False
        elif a[0] != b[0]:
            return False
        else:
            pending += zip(a[1], b[1], strict=True)
    return True


def _opened(entries: Entries, edge: Edge) -> tuple[Any, Sequence[Edge]] | None:
    """Return what a value is besides what it holds, and that; None if it holds nothing."""
    if type(edge) is int and edge >= 0:
        entry = entries(edge)
        if entry.kind.identity:
            return None
        plain = entry.cls is tuple
        return (tuple, len(entry.edges)) if plain else entry[:4], entry.edges
    if type(edge) is tuple and edge[0] is _static.TUPLE:
        return (tuple, len(edge[2])), edge[2]
    return None


def leaves_below(entries: Entries, edge: Edge) -> list[int]:
    """Return the numbers of the leaves of a tree, in its order."""
    leaves: list[int] = []
    pending = [edge] if type(edge) is int else []
    while pending:
        at = pending.pop()
        if at < 0:
            leaves.append(~at)
        else:
            pending += [e for e in reversed(entries(at).edges) if type(e) is int]
    return leaves


def is_large(x: Any) -> bool:
    """Tell whether JAX takes a tree apart faster than lines of Python."""
    pending, seen = [x], 0
    while pending and seen < _LARGE:
        seen += 1
        value = pending.pop()
        if isinstance(value, tuple):
            pending += cast("Iterable[Any]", value)
    return seen >= _LARGE
