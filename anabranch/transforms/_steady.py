"""Check that a step of a loop leaves the structure that it started from.

What takes part in every step, the carry above all, is walked twice at once: as it was before the
step and as it is after it. Arrays may differ; that is what a loop is for. Everything else must be
the same: the same objects, names and static values. Only containers may be new ones each time, the
way plain JAX code makes them, if they hold the same. What is only added is kept apart: it may be
something that can be done before the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph import _kinds, _static
from anabranch.graph._delta import Delta
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._recording import Records
from anabranch.transforms._prologue import Addition, Additions
from anabranch.transforms._specs import Step, show


class Place(NamedTuple):
    """Something that takes part in every step."""

    before: Edge
    after: Edge
    in_result: bool
    """Whether `after` is an edge of the delta, not of the graphdef."""
    name: str
    step: Step | None


class Written(NamedTuple):
    """An array that a step leaves in the place of a leaf."""

    slot: int  # or `~i` if it is leaf `i`
    name: str
    step: Step | None

    def __str__(self) -> str:
        return f"{show(self.name, self.step)}"


class Steady(NamedTuple):
    """What changes from step to step."""

    written: dict[int, Written]  # by leaf
    objects: dict[int, int]  # by index: what stands in the place of an object after the step
    added: list[Addition]
    text: str
    """What to say if nothing can be added."""

    def additions(self, slots: Sequence[Any], leaves: Sequence[Any]) -> Additions | None:
        """Return what is added, with what is written."""
        if not self.added:
            return None
        places = self.written.items()
        written = [leaf for leaf, at in places if slots[at.slot] is not leaves[leaf]]
        return Additions(self.added, frozenset(written), self.text)


CONTAINERS = frozenset({_kinds.LIST, _kinds.DICT, _kinds.DEQUE, _kinds.SET})
_REPLACEABLE = CONTAINERS | {_kinds.OBJECT}
_SHOWN = 100


def steady(
    graphdef: GraphDef, delta: Delta, places: Sequence[Place], loop: str, *, anew: bool = False
) -> Steady:
    """Return which arrays a step writes, given that it changes nothing else.

    Arguments:
        graphdef: of the call before the step.
        delta: what the step did.
        places: what takes part in every step.
        loop: what the loop is called in messages.
        anew: any objects may be new ones, or others of the arguments.

    Raises:
        StructureError: the step leaves another structure or other static values.
    """
    match = _Match(graphdef, delta, anew=anew)
    match.run(places)
    differences = first_few([*match.differences, *match.added])
    if anew:
        text = (
            f"{loop}: the function must return the structure that it was given, but\n{differences}"
        )
    else:
        text = (
            f"{loop}: a step must leave the structure that it started from, but\n{differences}\n"
            "write arrays into the objects that are there; hold what changes from step to step as "
            "an array; make new objects before the loop, or return them to be stacked. What a step "
            "makes once may be added if it depends on no step: see `hoist`"
        )
    if match.differences or (match.added and not match.adds):
        raise StructureError(bounded(text))
    return Steady(match.written, match.objects, match.additions, bounded(text))


class _Match:
    def __init__(self, graphdef: GraphDef, delta: Delta, *, anew: bool) -> None:
        self._graphdef, self._delta, self._anew = graphdef, delta, anew
        self._changed = dict(delta.changed)
        self._known = len(graphdef.entries)
        self._words = ("in", "out") if anew else ("before the step", "after it")
        self._taken: set[int] = set()
        self._pending: list[Place] = []
        self.written: dict[int, Written] = {}
        self.objects: dict[int, int] = {}
        self.differences: list[str] = []
        self.additions: list[Addition] = []
        self.added: list[str] = []  # the same in words
        self._extended: set[int] = set()
        self.adds = False  # not only static values

    def run(self, places: Sequence[Place]) -> None:
        self._pending = [*reversed(places)]
        while self._pending and len(self.differences) < _SHOWN:
            place = self._pending.pop()
            before, after = place.before, place.after
            if type(before) is int and before >= 0 and type(after) is int and after >= 0:
                self._entry(place, before, after)
            elif type(before) is int and before < 0 and type(after) is int and after < 0:
                if place.in_result or self._anew:
                    slot = ~after if place.in_result else after
                    self.written[~before] = Written(slot, place.name, place.step)
            elif self._static(before) != self._static(after):
                self._differ(place)
        for before, after in self.objects.items():
            if before != after and before in self._changed:
                cls = self._graphdef.entries[before].cls.__name__
                self.differences.append(
                    f"a {cls} is written in place and also replaced by a new one: do one or the "
                    "other"
                )

    def _entry(self, place: Place, before: int, after: int) -> None:
        old = self._graphdef.entries[before]
        new, in_result = self._after(after)
        if old.kind.identity:
            known = self.objects.get(before)
            if known is not None:
                if known != after:
                    self._note(place, "is one object with another place before the step", "is not")
                return
            if before != after:
                if not self._anew and (after < self._known or old.kind not in _REPLACEABLE):
                    self._differ(place)
                    return
                if after in self._taken:
                    self._note(place, "has a place of its own", "shares it with another place")
                    return
            self.objects[before] = after
            self._taken.add(after)
            if issubclass(old.cls, Records):
                return  # each step records anew
        fixed = before == after and old.kind.identity and not self._anew
        edges = self._compare(place, old, new, fixed=fixed, index=before)
        if edges is not None:
            below: list[Place] = []
            for position, (b, a) in enumerate(zip(old.edges, edges, strict=True)):
                inner = Place(b, a, in_result, place.name, Step(place.step, old, position))
                if not fixed or type(b) is int:
                    below.append(inner)
                elif self._static(b) != self._static(a):
                    self._replace(before, old.keys[position], inner)
            self._pending += reversed(below)

    def _replace(self, index: int, key: Any, place: Place) -> None:
        """Note that there is something in the place of a static value of an object."""
        name = f"{show(place.name, place.step)}"
        self.additions.append(Addition(index, key, place.after, name))
        if index not in self._extended:  # one line for an object is enough
            self.added.append(self._difference(place))
        self.adds = self.adds or type(place.after) is int

    def _extend(self, index: int, place: Place, old: Entry, new: Entry) -> Sequence[Edge]:
        """Note that an object has more than it had, and return what is in the old places."""
        before = set(old.keys)
        kept: list[Edge] = []
        for position, (key, edge) in enumerate(zip(new.keys, new.edges, strict=True)):
            if key in before:
                kept.append(edge)
            else:
                name = f"{show(place.name, Step(place.step, new, position))}"
                self.additions.append(Addition(index, key, edge, name))
                self.adds = self.adds or type(edge) is int
        self._extended.add(index)
        self.added.append(self._said(place, *_key_texts(old, new)))
        return kept

    def _after(self, index: int) -> tuple[Entry, bool]:
        if index >= self._known:
            return self._delta.new[index - self._known], True
        if index in self._changed:
            return self._changed[index], True
        return self._graphdef.entries[index], False

    def _compare(
        self, place: Place, old: Entry, new: Entry, *, fixed: bool, index: int
    ) -> Sequence[Edge] | None:
        if old.kind is not new.kind or old.cls is not new.cls:
            self._note(place, f"is a {old.cls.__name__}", f"a {new.cls.__name__}")
        elif tuple(old.keys) != tuple(new.keys):
            before = set(old.keys)
            kept = [key for key in new.keys if key in before]
            if fixed and kept == [*old.keys] and old.extra == new.extra:
                return self._extend(index, place, old, new)
            same = before == set(new.keys)
            if same and not fixed and old.kind is _kinds.DICT:  # the order means nothing to JAX
                by_key = dict(zip(new.keys, new.edges, strict=True))
                return [by_key[key] for key in old.keys]
            self._note(place, *_key_texts(old, new))
        elif old.extra != new.extra:
            what = "metadata" if old.kind.is_variable else "static content"
            self._note(place, f"has the {what} {_extra_text(old)}", _extra_text(new))
        else:
            return new.edges
        return None

    def _static(self, edge: Any) -> Any:
        while type(edge) is not int and edge[0] is _static.LOCATED:
            edge = self._graphdef.entries[edge[1]].edges[edge[2]]
        return edge

    def _differ(self, place: Place) -> None:
        self.differences.append(self._difference(place))

    def _difference(self, place: Place) -> str:
        before, after = place.before, place.after
        new = self._text(after)
        if type(before) is int and type(after) is int and before >= 0 and 0 <= after < self._known:
            new = f"another {self._graphdef.entries[after].cls.__name__} of the arguments"
        return self._said(place, f"is {self._text(before)}", new)

    def _text(self, edge: Edge) -> str:
        if type(edge) is not int:
            return f"{_static.decode(self._static(edge))!r}"[:150]
        if edge < 0:
            return "an array"
        if edge < self._known:
            return f"a {self._graphdef.entries[edge].cls.__name__}"
        return f"a new {self._delta.new[edge - self._known].cls.__name__}"

    def _note(self, place: Place, before: str, after: str) -> None:
        self.differences.append(self._said(place, before, after))

    def _said(self, place: Place, before: str, after: str) -> str:
        where = f"{show(place.name, place.step)}"
        return f"{where} {before} {self._words[0]}, and {after} {self._words[1]}"


def _key_texts(old: Entry, new: Entry) -> tuple[str, str]:
    """Say which names only one side has."""
    show_key = old.kind.show_key
    before = [show_key(key) for key in old.keys]
    after = [show_key(key) for key in new.keys]
    gone = [name for name in before if name not in set(after)]
    come = [name for name in after if name not in set(before)]
    if not gone and not come:
        return f"has the order {', '.join(before[:6])}", ", ".join(after[:6])
    texts = [_names(gone), _names(come)]
    return f"has {texts[0] or 'no ' + _names(come)}", texts[1] or f"no {texts[0]}"


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _extra_text(entry: Entry) -> str:
    if entry.kind.is_variable:
        return f"{ {key: _static.decode(value) for key, value in entry.extra or ()} }"[:150]
    return f"{entry.extra!r}"[:150]
