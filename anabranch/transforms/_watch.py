"""Whether functions still capture what they captured: values compared by identity, in a moment.

To tell where a function reaches objects, all that it captures has to be followed, helper functions
and containers included, which takes many times as long as a call. So what was found on the way is
remembered, and as long as every place holds the same, the answer is the same.

Nothing here keeps alive what a function has captured once: objects and functions are remembered
weakly, and so are the containers that lead to them, of which only the contents are compared. As
these are in one place each, it does not matter which list it is.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from anabranch._source import Source
from anabranch.graph import _classify
from anabranch.graph._function import global_names, is_filled, is_library, is_settled
from anabranch.transforms._captures import (
    CapturedContainer,
    CapturedFunction,
    are_comparable,
    children_of,
    is_container,
    is_live,
    is_weak,
    leads,
)

_MOST = 512  # places; functions that reach more are followed anew on every call


class Unplannable(Exception):
    """A call cannot be planned."""


_Place = tuple[int, int, int] | None
"""In what is given, in a function, or in a container: which one of them, and where in it."""
_GIVEN, _FUNCTION, _CONTAINER = range(3)
_IMMUTABLE = frozenset({types.MethodType, *_classify.LOOK})


class Watch:
    """What functions capture.

    Arguments:
        functions: functions, methods, partials, callable objects; the caller keeps them alive.

    Raises:
        Unplannable: they capture too much, or something that can be changed in place beside an
            object in a container.
    """

    __slots__ = ("_containers", "_functions", "_given", "_ids", "_kept", "_live", "_refs", "_same")

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions: list[CapturedFunction] = []
        self._containers: list[CapturedContainer] = []
        self._live: list[Iterable[Any]] = []
        self._given: list[Any] = []  # containers in methods and partials, which cannot change
        self._follow(functions)
        now = self.read(compared=False)
        if now is None or len(now) > _MOST:
            raise Unplannable
        opened = {*[container.at for container in self._containers], *[at for at, _ in self._same]}
        self._ids = [0 if i in opened else id(x) for i, x in enumerate(now)]
        compared = [x for i, x in enumerate(now) if i not in opened]
        self._refs = [weakref.ref(x) for x in compared if is_weak(x)]
        self._kept = [x for x in compared if not is_weak(x)]  # so that ids stay valid

    def __bool__(self) -> bool:
        """Tell whether anything has to be watched."""
        return bool(self._functions or self._containers)

    def is_same(self) -> bool:
        """Tell whether every place holds what it held."""
        return not self or self.read() is not None

    def read(self, *, compared: bool = True) -> list[Any] | None:
        """Return what is in all places, None if that is not what was there.

        Arguments:
            compared: whether identities are looked at.
        """
        now: list[Any] = [*self._given]
        for function in self._functions:
            found = function.read()
            if found is None:
                return None
            now += found
        for container in self._containers:
            held = container.read(now[container.at])
            if held is None:
                return None
            now += held
        now += chain.from_iterable(self._live)
        if compared:
            ids = [*map(id, now)]
            for container in self._containers:
                ids[container.at] = 0
            for at, first in self._same:
                ids[at] = int(now[at] is not now[first])
            if ids != self._ids or not all([ref() is not None for ref in self._refs]):  # noqa: C419
                return None
        return now

    def conditions(self, source: Source) -> tuple[list[str], dict[int, str]] | None:
        """Return what is true if every place holds the same, for a follower.

        That may raise `LookupError` and `ValueError` if a place is empty now, and `RuntimeError` if
        somebody is writing one. What it refers to is kept alive, but for objects and functions, and
        containers that lead to them.

        Arguments:
            source: of the follower.

        Returns:
            Expressions, and the names that they give to containers that lead to objects, by place;
            None if only `is_same` can tell.
        """
        now = self.read()
        if now is None:
            return None
        found: list[str] = []
        for container in self._live:
            held, name = [*container], source.constant(container)
            found.append(
                f"len({name}) == {len(held)} and all(map(is_, {name}, {source.constant(held)}))"
            )
        places = [source.constant(x) for x in self._given]
        for function in self._functions:
            lines = function.lines(source)
            if lines is None:
                return None
            found += lines[0]
            places += lines[1]
        names: dict[int, str] = {}
        for container in self._containers:
            name, x = source.fresh(), now[container.at]
            parts = container.places(name, x)
            if parts is None:
                return None
            found.append(f"type({name} := {places[container.at]}) is {source.constant(type(x))}")
            found += container.conditions(name, source)
            places += parts
            names[container.at] = name
        opened = {*names, *[at for at, _ in self._same]}
        for i, (place, x) in enumerate(zip(places, now, strict=False)):
            if i in opened:
                continue
            if is_weak(x):  # when it is gone, None is no answer
                found.append(f"{place} is {source.constant(weakref.ref(x))}() is not None")
            else:
                found.append(f"{place} is {source.constant(x)}")
        found += [f"{places[at]} is {names[first]}" for at, first in self._same]
        return found, names

    def place_of(self, x: Any) -> int | None:
        """Return the place of a container that leads to objects, None if it is none."""
        now = self.read() or []
        places = [container.at for container in self._containers if now and now[container.at] is x]
        return places[0] if places else None

    def _follow(self, functions: Sequence[Any]) -> None:
        pending: list[tuple[Any, _Place]] = [(x, None) for x in functions]
        containers: list[tuple[_Place, Any]] = []
        lengths: list[list[int]] = [[], [], []]
        first: dict[int, _Place] = {}  # the places of containers that lead to objects
        same: list[tuple[_Place, _Place]] = []
        seen: set[int] = set()
        while pending:
            x, place = pending.pop()
            if id(x) in first:
                same.append((place or self._give(x, lengths), first[id(x)]))
            if id(x) in seen or is_settled(x):
                continue
            seen.add(id(x))
            if len(seen) > _MOST:
                raise Unplannable
            stage: int | None = None
            if isinstance(x, types.FunctionType):
                count = len(self._functions)
                children: Sequence[Any] = self._add(x, any(x is f for f in functions))
                stage = _FUNCTION if len(self._functions) > count else None
            elif type(x) in _IMMUTABLE and place is None:
                children = children_of(x)
            elif is_container(x) and leads(x):
                first[id(x)] = place = place or self._give(x, lengths)
                containers.append((place, x))
                children, stage = children_of(x), _CONTAINER
                if not are_comparable([*children]):
                    raise Unplannable
            else:
                children = children_of(x)
                if is_live(x):
                    self._live += (x, x.values()) if isinstance(x, dict) else (x,)
            if stage is not None:
                lengths[stage].append(len(children))
                owner = len(lengths[stage]) - 1
                pending += [(child, (stage, owner, k)) for k, child in enumerate(children)]
            else:
                pending += [(child, None) for child in children]
        starts = [*accumulate(chain.from_iterable(lengths), initial=0)]
        before = [0, *accumulate([len(each) for each in lengths])]

        def number(place: _Place) -> int:
            assert place is not None
            stage, owner, offset = place
            return starts[before[stage] + owner] + offset

        for place, x in containers:
            kind: Any = _classify.rule_of(x)
            extra, keys, _ = kind.open(x)
            self._containers.append(CapturedContainer(number(place), kind, type(x), extra, keys))
        self._same = [(number(place), number(known)) for place, known in same]

    def _give(self, x: Any, lengths: list[list[int]]) -> _Place:
        self._given.append(x)
        lengths[_GIVEN].append(1)
        return _GIVEN, len(self._given) - 1, 0

    def _add(self, function: types.FunctionType, is_given: bool) -> list[Any]:
        scope = function.__globals__
        names = () if is_library(scope) else global_names(function.__code__)
        added = CapturedFunction(
            weakref.ref(function),
            tuple(map(is_filled, function.__closure__ or ())),
            tuple([name for name in names if name in scope]),
            tuple([name for name in names if name not in scope]),
            is_given,
        )
        found = added.read() or []
        if found or added.filled or added.absent:
            self._functions.append(added)
        return found
