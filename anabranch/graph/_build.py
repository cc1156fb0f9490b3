"""Build objects from entries: nodes are made empty, values from their children, then nodes filled.

Making all nodes first is what lets cycles and shared objects come back; values come in reverse
order, since the children of a value have higher indices than the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch.graph import _static
from anabranch.graph._graphdef import Edge, Entry

_NONE: Mapping[int, Any] = {}


class Built:
    """Objects by index, and what each of them was made of."""

    __slots__ = ("contents", "objects", "resolve")

    def __init__(
        self,
        objects: list[Any],
        contents: list[Sequence[Any]],
        resolve: Callable[[Edge], Any],
    ) -> None:
        self.objects = objects  # known objects first
        self.contents = contents  # of the built ones: their children
        self.resolve = resolve  # from an edge to the object, leaf or static value


def build(
    entries: Sequence[Entry],
    leaf: Callable[[int], Any],
    known: Sequence[Any] = (),
    existing: Mapping[int, Any] = _NONE,
    at: Callable[[int, int], Any] | None = None,
) -> Built:
    """Build the objects of a table.

    Arguments:
        entries: their indices start at `len(known)`.
        leaf: from the number of a leaf to its value.
        known: the objects that lower indices refer to.
        existing: nodes, by position in the table, that exist already: they are referred to, and
            left as they are.
        at: from the place of a static value in the caller's objects to the value.
    """
    base = len(known)
    objects: list[Any] = list(known)
    contents: list[Sequence[Any]] = [()] * len(entries)
    nodes: list[int] = []  # that are still to be filled
    others: list[int] = []
    shared: dict[int, Any] = {}
    for i, (kind, cls, extra, keys, edges) in enumerate(entries):
        if i in existing:
            objects.append(existing[i])
            nodes.append(i)
        elif kind.is_variable and type(edges[0]) is int and edges[0] < 0:
            contents[i] = values = (leaf(~edges[0]),)  # an array: no cycle can pass through it
            objects.append(kind.build(cls, extra, keys, values))
        elif kind.identity:
            made = kind.create_among(cls, extra, shared) if kind.shares else kind.create(cls, extra)
            objects.append(made)
            nodes.append(i)
        else:
            objects.append(None)
            others.append(i)

    def resolve(edge: Any) -> Any:
        if type(edge) is int:
            return objects[edge] if edge >= 0 else leaf(~edge)
        if edge[0] is _static.LOCATED and at is not None:
            return at(edge[1], edge[2])
        return _static.decode(edge)

    for i in reversed(others):
        kind, cls, extra, keys, edges = entries[i]
        contents[i] = values = [resolve(edge) for edge in edges]
        objects[base + i] = kind.build(cls, extra, keys, values)
    for i in nodes:
        kind, _, extra, keys, edges = entries[i]
        contents[i] = values = [
            objects[edge] if type(edge) is int and edge >= 0 else resolve(edge) for edge in edges
        ]
        if i not in existing:
            kind.complete(objects[base + i], extra, keys, values)
    return Built(objects, contents, resolve)
