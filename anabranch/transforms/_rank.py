"""Metadata that name the axes of an array, and follow its rank.

The metadata `sharding` of a Variable (`out_sharding` in flax) names its axes, as a tuple or a
`PartitionSpec`. Where a
transform takes an axis away, the twin has one name less; what comes out with an axis more has one
name more. The caller's own objects keep what they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from anabranch.graph import _static
from anabranch.graph._delta import Delta
from anabranch.graph._graphdef import Entry, GraphDef

_KEYS = frozenset({"sharding", "out_sharding"})


def _edit(extra: Any, change: Callable[[list[Any]], None]) -> Any:
    """Return encoded metadata with other names."""
    edited: list[tuple[str, Any]] = []
    for key, encoded in extra or ():
        names = _static.decode(encoded) if key in _KEYS else None
        if isinstance(names, (tuple, PartitionSpec)):
            new = list(names)
            change(new)
            made = PartitionSpec(*new) if isinstance(names, PartitionSpec) else tuple(new)
            encoded = _static.encode(made)
        edited.append((key, encoded))
    return tuple(edited) if extra else extra


def without_axis(extra: Any, axis: int) -> Any:
    """Return metadata for an array that has lost an axis."""
    return _edit(extra, lambda names: names.__delitem__(slice(axis, axis + 1)))


def with_axis(extra: Any, axis: int, name: str | None) -> Any:
    """Return metadata for an array that has a new axis of some name."""

    def change(names: list[Any]) -> None:
        names += [None] * (axis - len(names))
        names.insert(axis, name)

    return _edit(extra, change)


def _names_axes(entry: Entry) -> bool:
    return entry.kind.is_variable and any(key in _KEYS for key, _ in entry.extra or ())


def inner_graphdef(graphdef: GraphDef, axes: Sequence[int | None]) -> GraphDef:
    """Return the graphdef for twins whose arrays lack the axis of each leaf."""
    entries = graphdef.entries
    if not any(map(_names_axes, entries)):
        return graphdef
    made: list[Entry] = []
    for entry in entries:
        if _names_axes(entry):
            leaf = _first_leaf(entry, entries.__getitem__)
            axis = None if leaf is None else axes[leaf]
            if axis is not None:
                entry = entry._replace(extra=without_axis(entry.extra, axis))
        made.append(entry)
    return GraphDef(tuple(made), graphdef.root, graphdef.num_leaves, graphdef.origin)


def outer_delta(
    outer: GraphDef,
    inner: GraphDef,
    delta: Delta,
    axis_of: Callable[[int], int | None],
    name: str | None,
) -> Delta:
    """Return a delta of twins as it is for the caller's objects.

    Arguments:
        outer: the graphdef of the caller's objects.
        inner: that of the twins.
        delta: what happened to the twins.
        axis_of: from a slot to the axis that it comes out along.
        name: of the new axis.
    """
    known = len(outer.entries)
    if not any(map(_names_axes, (*delta.new, *[entry for _, entry in delta.changed]))):
        return delta

    def outside(entry: Entry) -> Entry:
        slot = _first_leaf(entry, lambda i: delta.new[i - known]) if _names_axes(entry) else None
        axis = None if slot is None else axis_of(slot)
        return entry if axis is None else entry._replace(extra=with_axis(entry.extra, axis, name))

    changed: list[tuple[int, Entry]] = []
    for index, entry in delta.changed:
        if entry.extra == inner.entries[index].extra:  # the caller's names stay as they are
            changed.append((index, entry._replace(extra=outer.entries[index].extra)))
        else:
            changed.append((index, outside(entry)))
    return delta._replace(changed=tuple(changed), new=tuple(map(outside, delta.new)))


def _first_leaf(entry: Entry, at: Callable[[int], Entry]) -> int | None:
    """Return the first leaf (or slot) that a Variable holds."""
    pending = [*reversed(entry.edges)]
    while pending:
        edge = pending.pop()
        if type(edge) is int:
            if edge < 0:
                return ~edge
            pending += reversed(at(edge).edges)
    return None
