"""Separate what a step of a loop stacks from what it carries.

A container that is carried and also stacked, `return carry, carry` say, is one object inside the
step, but two outside: its last state, and all of its states along an axis. The same holds for a
container of the arguments that is returned to be stacked. So what is stacked refers to copies.
Modules and Variables of the arguments stay themselves, wherever they are returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.graph import _static
from anabranch.graph._delta import Delta, Diff
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.transforms._steady import CONTAINERS


class Out(NamedTuple):
    """A part of what a function returned, and its place."""

    edge: Edge
    parent: int  # the entry that holds it, -1 if it is the whole
    position: int


class _Where(NamedTuple):
    """How an edge was reached."""

    in_result: bool  # if it leads to a leaf, that is a slot
    inside: bool  # through containers only
    copying: bool  # from a copy


class Separation:
    """An editable copy of what was found after a step.

    Arguments:
        graphdef: of the call before the step.
        found: what the step did.
        leaves: the leaves of the step.
        objects: what stands in the place of each carried object after the step.
    """

    def __init__(
        self,
        graphdef: GraphDef,
        found: Diff,
        leaves: Sequence[Any],
        objects: Mapping[int, int],
    ) -> None:
        self._graphdef, self._found, self._leaves = graphdef, found, leaves
        self._known = len(graphdef.entries)
        self._changed = dict(found.delta.changed)
        self._entries: list[Any] = list(found.delta.new)
        self._root = found.delta.root
        self._slots = list(found.slots)
        self._passing = {i for pair in objects.items() if pair[0] != pair[1] for i in pair}
        self._copies: dict[int, int] = {}
        self._done: set[int] = set()
        self._pending: list[tuple[int, Entry, _Where]] = []

    def stack(self, out: Out) -> None:
        """Let a part of the result refer to no container that is carried or an argument."""
        if out.parent < self._known and out.parent >= 0:
            return  # the result is a container of the arguments itself
        self.put(out, self._edge(out.edge, _Where(True, True, False)))
        self._run()

    def own(self, index: int) -> None:
        """Do the same for an object that is sliced: each slice has its own."""
        entry = self._changed[index]
        edges = [self._edge(e, _Where(True, False, False)) for e in entry.edges]
        self._changed[index] = entry._replace(edges=tuple(edges))
        self._run()

    def leaf(self, number: int) -> int:
        """Return an edge to a new slot that holds a leaf."""
        return self._slot(self._leaves[number])

    def _slot(self, value: Any) -> int:
        self._slots.append(value)
        return ~(len(self._slots) - 1)

    def put(self, out: Out, edge: Edge) -> None:
        """Put an edge in the place of a part of the result."""
        if out.parent < 0:
            self._root = edge
            return
        entry = self._entries[out.parent - self._known]
        edges = list(entry.edges)
        edges[out.position] = edge
        self._entries[out.parent - self._known] = entry._replace(edges=tuple(edges))

    def diff(self, *, written: bool = True) -> Diff:
        """Return what was found, edited; without any writes if there were no steps."""
        changed = tuple(self._changed.items()) if written else ()
        new = [*self._found.new, *[None] * (len(self._entries) - len(self._found.new))]
        delta = Delta(changed, tuple(self._entries), self._root, len(self._slots))
        return Diff(delta, self._slots, new)

    def _edge(self, edge: Edge, where: _Where) -> Edge:
        """Return an edge to what is stacked."""
        if type(edge) is not int:
            return edge
        if edge < 0:
            if not where.in_result:
                return self.leaf(~edge)
            return self._slot(self._slots[~edge]) if where.copying else edge
        entry, of_slots = self._at(edge)
        is_value = not entry.kind.identity
        inside = where.inside and (entry.kind in CONTAINERS or is_value)
        passing = edge in self._passing or (where.copying and is_value)
        if edge >= self._known and not passing:
            if edge not in self._done:
                self._done.add(edge)
                self._pending.append((edge, entry, _Where(True, inside, False)))
            return edge
        if not (passing or inside):
            return edge
        copy = None if is_value else self._copies.get(edge)
        if copy is None:
            copy = self._known + len(self._entries)
            if not is_value:
                self._copies[edge] = copy
            self._entries.append(entry)
            if edge < self._known and not of_slots:
                entry = entry._replace(edges=tuple(_located(edge, entry.edges)))
            self._pending.append((copy, entry, _Where(of_slots, inside, True)))
        return copy

    def _at(self, index: int) -> tuple[Entry, bool]:
        if index >= self._known:
            return self._entries[index - self._known], True
        if index in self._changed:
            return self._changed[index], True
        return self._graphdef.entries[index], False

    def _run(self) -> None:
        while self._pending:
            index, entry, where = self._pending.pop()
            edges = [self._edge(e, where) for e in entry.edges]
            self._entries[index - self._known] = entry._replace(edges=tuple(edges))


def _located(index: int, edges: Sequence[Edge]) -> list[Edge]:
    """Refer to the static values of the caller's object, not to equal ones."""
    return [
        edge if type(edge) is int else (_static.LOCATED, index, position)
        for position, edge in enumerate(edges)
    ]
