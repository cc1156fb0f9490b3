"""Unite what several functions did to one set of objects into one report.

Branches write different things; what a `cond` brings back is the union. Every object that any of
them changed has contents on every side: the new ones, or those that it came in with. All sides are
walked together from there and from the results: nodes, names and statics must agree, and so does
the number of arrays, which come from whichever side was run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph import _kinds, _static
from anabranch.graph._delta import Delta
from anabranch.graph._flatten import namer
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.transforms._box import Report

Source: TypeAlias = "int | tuple[Any, ...]"
"""Where one side has a value: `i >= 0` is leaf `i`, `~i` its output `i`, a tuple a number."""


class Slot(NamedTuple):
    """An array of the united report."""

    sources: tuple[Source, ...]  # one for each side
    path: str


class United(NamedTuple):
    """The union of what all sides did."""

    delta: Delta
    slots: tuple[Slot, ...]


class _Array:
    """An edge to an array, of a side or of the arguments."""

    __slots__ = ("source",)

    def __init__(self, source: int) -> None:
        self.source = source


_NUMBERS = frozenset({bool, int, float, complex})
_SHOWN = 100


class _Place(NamedTuple):
    """What is known of an edge besides where it leads."""

    path: str
    numbers: bool  # Python numbers that differ become arrays


def unite(
    graphdef: GraphDef, reports: Sequence[Report], names: Sequence[str], *, results: bool = False
) -> United:
    """Return the union of reports on one call.

    Arguments:
        graphdef: of the call.
        reports: what each function did.
        names: how messages call each function.
        results: whether every array that the result reaches has a slot, in known objects too.

    Raises:
        StructureError: they leave different structures or statics.
    """
    union = _Union(graphdef, reports, names, results=results)
    union.run()
    if union.differences:
        raise StructureError(
            bounded(
                f"{' and '.join(names[:3])} must leave the same structure, but they differ:\n"
                f"{first_few(union.differences)}\n"
                "set the same attributes and return the same structure in each of them; what "
                "depends on the branch must be an array"
            )
        )
    return union.united()


class _Union:
    def __init__(
        self,
        graphdef: GraphDef,
        reports: Sequence[Report],
        names: Sequence[str],
        *,
        results: bool,
    ) -> None:
        self._results = results
        self._graphdef, self._reports, self._names = graphdef, reports, names
        self._known = len(graphdef.entries)
        self._changed = [dict(report.delta.changed) for report in reports]
        self._name = namer(graphdef)
        self._paired: dict[tuple[Any, ...], int] = {}  # new nodes, one of each side
        self._partner: list[dict[int, int]] = [{} for _ in reports]
        self._new: list[tuple[Entry, list[Edge]]] = []
        self._entries: dict[int, tuple[Entry, list[Edge]]] = {}
        self._slots: list[Slot] = []
        self._pending: list[tuple[list[Edge], list[Any], list[_Place]]] = []
        self._root: list[Edge] = []
        self.differences: list[str] = []

    def run(self) -> None:
        """Walk all sides together."""
        for index in sorted(set().union(*self._changed)):
            self._match_known(index)
        roots = [self._array(side, r.delta.root) for side, r in enumerate(self._reports)]
        self._pending.append((self._root, [roots], [_Place("the return value", True)]))
        self._finish()
        if self._results and not self.differences:
            self._match_results()

    def _match_known(self, index: int) -> None:
        """Compare what all sides leave in a known object, and give its arrays slots."""
        sides = [self._known_entry(side, index) for side in range(len(self._reports))]
        edges = self._match(sides, _Place(self._name(index), self._has_numbers(index)))
        if edges is not None:
            self._entries[index] = (sides[0], edges)
        self._finish()

    def _match_results(self) -> None:
        """Give slots to the arrays of known objects that the result reaches."""
        pending, seen = list(self._root), set[Any]()
        while pending:
            index = pending.pop()
            if type(index) is not int or index < 0 or index in seen:
                continue
            seen.add(index)
            if index < self._known and index not in self._entries:
                self._match_known(index)
            pending += (
                self._new[index - self._known] if index >= self._known else self._entries[index]
            )[1]

    def united(self) -> United:
        """Return the result."""
        changed = [
            (index, entry._replace(edges=tuple(edges)))
            for index, (entry, edges) in sorted(self._entries.items(), key=operator.itemgetter(0))
        ]
        new = [entry._replace(edges=tuple(edges)) for entry, edges in self._new]
        delta = Delta(tuple(changed), tuple(new), self._root[0], len(self._slots))
        return United(delta, tuple(self._slots))

    def _finish(self) -> None:
        while self._pending:
            into, rows, places = self._pending[-1]
            if len(into) == len(rows) or len(self.differences) > _SHOWN:
                self._pending.pop()
            else:
                into.append(self._unite(rows[len(into)], places[len(into)]))

    # -- what the sides hold -------------------------------------------------------------------

    def _array(self, side: int, edge: Edge) -> Any:
        if type(edge) is int and edge < 0:
            return _Array(self._reports[side].sources[~edge])
        return edge

    def _known_entry(self, side: int, index: int) -> Entry:
        """Return what a known object holds at the end of one side."""
        entry = self._changed[side].get(index)
        if entry is not None:
            return entry._replace(edges=tuple([self._array(side, e) for e in entry.edges]))
        entry = self._graphdef.entries[index]
        return entry._replace(edges=tuple(self._original(index, entry)))

    def _original(self, index: int, entry: Entry) -> Iterator[Any]:
        for position, edge in enumerate(entry.edges):
            if type(edge) is not int:
                yield (_static.LOCATED, index, position)
            else:
                yield _Array(~edge) if edge < 0 else edge

    def _entry(self, side: int, edge: Any) -> Entry:
        if type(edge) is not int:  # a tuple of statics
            parts = self._static(edge)[2]
            return Entry(_kinds.TUPLE, tuple, None, range(len(parts)), parts)
        if edge < self._known:
            return self._known_entry(side, edge)
        entry = self._reports[side].delta.new[edge - self._known]
        return entry._replace(edges=tuple([self._array(side, e) for e in entry.edges]))

    def _static(self, edge: Any) -> Any:
        while edge[0] is _static.LOCATED:
            edge = self._graphdef.entries[edge[1]].edges[edge[2]]
        return edge

    def _has_numbers(self, index: int) -> bool:
        """Tell whether a known object is no attribute of an object, where numbers are static."""
        entries = self._graphdef.entries
        if entries[index].kind.is_variable:
            return True
        return any(type(edge) is int and edge < 0 for edge in entries[index].edges)

    # -- walking them together -----------------------------------------------------------------

    def _unite(self, edges: list[Any], place: _Place) -> Edge:
        nodes = [type(edge) is int for edge in edges]
        if all(nodes):
            return self._node(edges, place)
        if not any(type(edge) is _Array for edge in edges):
            statics = [
                None if node else self._static(e) for e, node in zip(edges, nodes, strict=True)
            ]
            if all(s is not None and s == statics[0] for s in statics):
                located = [e for e in edges if e[0] is _static.LOCATED]
                return (located or edges)[0]
            if all(s is None or s[0] is _static.TUPLE for s in statics):
                return self._node(edges, place)
            if not place.numbers:
                return self._differ(edges, place)
        sources = [self._source(edge) for edge in edges]
        if any(source is None for source in sources):
            return self._differ(edges, place)
        self._slots.append(Slot(tuple(sources), place.path))
        return ~(len(self._slots) - 1)

    def _source(self, edge: Any) -> Any:
        if type(edge) is _Array:
            return edge.source
        if type(edge) is int:
            return None
        static = self._static(edge)
        is_number = static[1] in _NUMBERS or static[0] is _static.SCALAR
        return static if is_number else None

    def _node(self, edges: list[Any], place: _Place) -> Edge:
        first = edges[0]
        if type(first) is int and first < self._known and all(edge == first for edge in edges):
            is_value = not self._graphdef.entries[first].kind.identity
            if not (self._results and is_value):
                return first
        entries = [self._entry(side, edge) for side, edge in enumerate(edges)]
        if not all(
            entry.kind is entries[0].kind and (not entry.kind.identity or edge >= self._known)
            for edge, entry in zip(edges, entries, strict=True)
        ):
            return self._differ(edges, place)
        if entries[0].kind.identity:
            key = tuple(edges)
            if key in self._paired:
                return self._paired[key]
            if any(e in p for e, p in zip(edges, self._partner, strict=True)):
                self._note(place.path, ["has other aliases"] * len(edges))
                return first
            self._paired[key] = index = self._known + len(self._new)
            for edge, partner in zip(edges, self._partner, strict=True):
                partner[edge] = index
        index = self._known + len(self._new)
        into: list[Edge] = []
        self._new.append((entries[0], into))
        self._match(entries, place, into)
        return index

    def _match(
        self, entries: list[Entry], place: _Place, into: list[Edge] | None = None
    ) -> list[Edge] | None:
        """Compare entries and walk what is below; return where their united edges will be."""
        first = entries[0]
        if any(e.cls is not first.cls for e in entries):
            self._note(place.path, [f"is a {e.cls.__name__}" for e in entries])
        elif any(tuple(e.keys) != tuple(first.keys) for e in entries):
            self._note(place.path, _key_texts(entries))
        elif any(e.extra != first.extra for e in entries):
            self._note(place.path, [f"has {_extra_text(e)}" for e in entries])
        else:
            into = [] if into is None else into
            numbers = place.numbers if first.kind.numbers is None else first.kind.numbers
            if first.kind.is_variable:
                numbers = True
            places = [_Place(first.kind.show_below(place.path, k), numbers) for k in first.keys]
            rows = [list(row) for row in zip(*[e.edges for e in entries], strict=True)]
            self._pending.append((into, rows, places))
            return into
        return None

    def _differ(self, edges: list[Any], place: _Place) -> Edge:
        self._note(place.path, [self._text(side, edge) for side, edge in enumerate(edges)])
        return _static.encode(None)

    def _text(self, side: int, edge: Any) -> str:
        if type(edge) is _Array:
            return "is an array"
        if type(edge) is not int:
            return f"is {_static.decode(self._static(edge))!r}"[:150]
        name = self._entry(side, edge).cls.__name__
        if edge >= self._known:
            return f"is a new {name}"
        return f"is the {name} that came in as {self._name(edge)}"

    def _note(self, path: str, texts: list[str]) -> None:
        other = next((i for i, text in enumerate(texts) if text != texts[0]), len(texts) - 1)
        self.differences.append(
            f"{path or 'the call'}: {texts[0]} after {self._names[0]}, and "
            f"{texts[other]} after {self._names[other]}"
        )


def _key_texts(entries: list[Entry]) -> list[str]:
    """Say which names only one side has."""
    sets = [{e.kind.show_key(k) for k in e.keys} for e in entries]
    common = set.intersection(*sets)
    texts: list[str] = []
    for entry, names in zip(entries, sets, strict=True):
        own = sorted(names - common)
        if own:
            texts.append(f"has also {', '.join(own[:4])}" + (" ..." if len(own) > 4 else ""))
        elif all(names == s for s in sets):
            order = [entry.kind.show_key(k) for k in entry.keys]
            texts.append(f"has the order {', '.join(order[:6])}")
        else:
            texts.append(f"has only {len(names)} entries")
    return texts


def _extra_text(entry: Entry) -> str:
    if entry.kind.is_variable:
        return f"the metadata { {k: _static.decode(v) for k, v in entry.extra or ()} }"[:150]
    return f"other static content ({entry.extra!r})"[:150]


class Outputs(NamedTuple):
    """Which values come out of a united call, by group, and what stands for each slot."""

    groups: tuple[tuple[Slot, ...], ...]
    sources: tuple[int, ...]

    def report(self, united: United) -> Report:
        """Return the report for step 4."""
        return Report(united.delta, self.sources)

    def values(self, side: int, leaves: Sequence[Any], own: Sequence[Any]) -> list[list[Any]]:
        """Return the values of one side, by group.

        Arguments:
            side: the number of the side.
            leaves: of the call.
            own: the outputs of that side.
        """
        return [
            [_value(slot.sources[side], leaves, own) for slot in slots] for slots in self.groups
        ]

    def check_types(
        self, leaves: Sequence[Any], own: Sequence[Sequence[Any]], names: Sequence[str]
    ) -> None:
        """Raise `StructureError` unless all sides leave arrays of the same shapes and dtypes.

        Arguments:
            leaves: of the call.
            own: for each side its outputs, or their shapes and dtypes.
            names: how messages call each side.
        """
        rows: list[str] = []
        for slot in (slot for slots in self.groups for slot in slots):
            types = [
                _type_text(_value(s, leaves, o)) for s, o in zip(slot.sources, own, strict=True)
            ]
            other = next((i for i, found in enumerate(types) if found != types[0]), None)
            if other is not None:
                rows.append(
                    f"{slot.path}: {types[0]} after {names[0]}, and "
                    f"{types[other]} after {names[other]}"
                )
        if rows:
            raise StructureError(
                bounded(
                    f"{' and '.join(names[:3])} must leave arrays of the same shapes and dtypes, "
                    f"but they differ:\n{first_few(rows)}\nconvert one of them with `astype`, or "
                    "reshape it"
                )
            )


def _value(source: Source, leaves: Sequence[Any], own: Sequence[Any]) -> Any:
    if isinstance(source, int):
        return leaves[source] if source >= 0 else own[~source]
    return jnp.asarray(_static.decode(source))


def _type_text(value: Any) -> str:
    if not hasattr(value, "dtype"):  # a Python number; with jit, they are arrays here
        value = jnp.asarray(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def outputs_of(
    united: United,
    group: Callable[[int], int] = lambda slot: 0,
    count: int = 1,
    share: Callable[[int], bool] = lambda group: True,
) -> Outputs:
    """Choose the values that have to come out.

    Arguments:
        united: the union.
        group: from the number of a slot to its group.
        count: the number of groups.
        share: whether, in a group, one output can serve several slots, and a leaf that no side
            changed none.
    """
    groups: list[list[Slot]] = [[] for _ in range(count)]
    position: dict[Any, tuple[int, int]] = {}
    places: list[Any] = []
    for number, slot in enumerate(united.slots):
        at = group(number)
        first = slot.sources[0]
        same = all(source == first for source in slot.sources)
        if same and type(first) is int and first >= 0 and share(at):
            places.append(first)
            continue
        key = slot.sources if share(at) else number
        place = position.setdefault((key, at), (at, len(groups[at])))
        if place[1] == len(groups[at]):
            groups[at].append(slot)
        places.append(place)
    starts = [sum(map(len, groups[:at])) for at in range(count)]
    sources = tuple([p if type(p) is int else ~(starts[p[0]] + p[1]) for p in places])
    return Outputs(tuple([tuple(slots) for slots in groups]), sources)
