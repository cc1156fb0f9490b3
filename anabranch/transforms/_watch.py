"""Whether functions still capture what they captured: values compared by identity, in a moment.

To tell where a function reaches objects, all that it captures has to be followed, helper functions
and containers included, which takes many times as long as a call. So what was found on the way is
remembered, and as long as every place holds the same, the answer is the same.

Nothing here keeps alive what a function has captured once: objects and functions are remembered
weakly, and so are the containers that lead to them, of which only the contents are compared. As
these are in one place each, it does not matter which list it is.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _kinds
from anabranch.graph._function import global_names, is_filled, is_library, is_settled
from anabranch.graph._kinds import Kind
from anabranch.transforms._columns import has_plain_attributes
from anabranch.transforms._source import Source

_MOST = 512  # places; functions that reach more are followed anew on every call
_FEW = 16  # elements of a container that are compared one by one
_DICTS = frozenset({dict, OrderedDict, defaultdict})
_CONTAINERS = frozenset(
    {
        _kinds.LIST,
        _kinds.DEQUE,
        _kinds.DICT,
        _kinds.TUPLE,
        _kinds.FROZEN,
        _kinds.METHOD,
        _kinds.PARTIAL,
    }
)


class Unplannable(Exception):
    """A call cannot be planned."""


class _Function(NamedTuple):
    """The places in one function."""

    ref: weakref.ref[types.FunctionType]
    filled: tuple[bool, ...]  # of its cells
    names: tuple[str, ...]  # of globals that are set
    absent: tuple[str, ...]  # of those that are not
    is_given: bool  # and kept alive by who asks

    def read(self) -> list[Any] | None:
        """Return what is in the places, None if one is empty that was not, or the reverse."""
        function = self.ref()
        if function is None:
            return None
        found: list[Any] = []
        if self.filled:
            cells = function.__closure__ or ()
            if tuple(map(is_filled, cells)) != self.filled:
                return None
            found += [c.cell_contents for c, full in zip(cells, self.filled, strict=True) if full]
        scope = function.__globals__
        if self.names:
            try:
                found += [scope[name] for name in self.names]
            except KeyError:
                return None
        if self.absent and any(map(scope.__contains__, self.absent)):
            return None
        found += function.__defaults__ or ()
        if function.__kwdefaults__:
            found += function.__kwdefaults__.values()
        return found

    def lines(self, source: Source) -> tuple[list[str], list[str]] | None:
        """Return conditions for the places to be the same ones, and expressions for them.

        Returns:
            None if there are empty cells.
        """
        function = self.ref()
        if function is None or not all(self.filled):
            return None
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        if self.is_given:
            own, scope = source.constant(function), source.constant(function.__globals__)
            cells = [source.constant(cell) for cell in function.__closure__ or ()]
            conditions: list[str] = []
        else:
            own = source.fresh()
            scope = f"{own}.__globals__"
            cells = [f"{own}.__closure__[{i}]" for i in range(len(self.filled))]
            conditions = [f"({own} := {source.constant(self.ref)}()) is not None"]
        conditions += [f"{name!r} not in {scope}" for name in self.absent]
        if defaults:
            conditions.append(f"len({own}.__defaults__ or ()) == {len(defaults)}")
        else:
            conditions.append(f"not {own}.__defaults__")
        if by_name:
            keys = source.constant([*by_name])
            conditions.append(f"[*({own}.__kwdefaults__ or ())] == {keys}")
        else:
            conditions.append(f"not {own}.__kwdefaults__")
        return conditions, [
            *[f"{cell}.cell_contents" for cell in cells],
            *[f"{scope}[{name!r}]" for name in self.names],
            *[f"{own}.__defaults__[{i}]" for i in range(len(defaults))],
            *[f"{own}.__kwdefaults__[{name!r}]" for name in by_name],
        ]


_Place = tuple[int, int, int] | None
"""In what is given, in a function, or in a container: which one of them, and where in it."""
_GIVEN, _FUNCTION, _CONTAINER = range(3)
_IMMUTABLE = frozenset({types.MethodType, functools.partial, *_classify.LOOK})


class _Container(NamedTuple):
    """A container that leads to objects or functions."""

    at: int  # its place among all that is read
    kind: Kind
    cls: type
    extra: Any
    keys: Any

    def read(self, x: Any) -> Sequence[Any] | None:
        """Return what it holds, None if it is another one."""
        if type(x) is not self.cls:
            return None
        try:
            extra, keys, values = self.kind.open(x)
        except (RuntimeError, NodeTypeError, StaticValueError):  # somebody is writing it
            return None
        return values if keys == self.keys and extra == self.extra else None

    def places(self, name: str, x: Any) -> list[str] | None:
        """Return expressions for what it holds, None if that is not simple.

        Arguments:
            name: of it.
            x: the container itself.
        """
        if len(self.keys) > _FEW:
            return None
        if self.kind is _kinds.METHOD:
            return [f"{name}.{key}" for key in self.keys]
        if self.cls in (list, tuple):
            return [f"{name}[{i}]" for i in range(len(x))]
        if self.cls is dict and all(type(key) is str for key in self.keys):
            return [f"{name}[{key!r}]" for key in self.keys]
        if self.kind is _kinds.PARTIAL:
            by_name = [f"{name}.keywords[{key!r}]" for key in x.keywords]
            return [f"{name}.func", *[f"{name}.args[{i}]" for i in range(len(x.args))], *by_name]
        if self.kind is _kinds.FROZEN and has_plain_attributes(x):
            return [f"{name}.__dict__[{key!r}]" for key in self.keys]
        return None

    def conditions(self, name: str, source: Source) -> list[str]:
        """Return conditions for it to hold as much under the same keys."""
        if self.cls in (list, tuple):
            return [f"len({name}) == {len(self.keys)}"]
        if self.cls is dict:
            return [f"[*{name}] == {source.constant([*self.keys])}"]
        return []  # it cannot change


class Watch:
    """What functions capture.

    Arguments:
        functions: functions, methods, partials, callable objects; the caller keeps them alive.

    Raises:
        Unplannable: they capture too much.
    """

    __slots__ = ("_containers", "_functions", "_given", "_ids", "_kept", "_live", "_refs", "_same")

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions: list[_Function] = []
        self._containers: list[_Container] = []
        self._live: list[Iterable[Any]] = []
        self._given: list[Any] = []  # containers in methods and partials, which cannot change
        self._follow(functions)
        now = self.read(compared=False)
        if now is None or len(now) > _MOST:
            raise Unplannable
        opened = {*[container.at for container in self._containers], *[at for at, _ in self._same]}
        self._ids = [0 if i in opened else id(x) for i, x in enumerate(now)]
        compared = [x for i, x in enumerate(now) if i not in opened]
        self._refs = [weakref.ref(x) for x in compared if _is_weak(x)]
        self._kept = [x for x in compared if not _is_weak(x)]  # so that ids stay valid

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
            if _is_weak(x):  # when it is gone, None is no answer
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
                children = _children(x)
            elif _is_container(x) and _leads(x):
                first[id(x)] = place = place or self._give(x, lengths)
                containers.append((place, x))
                children, stage = _children(x), _CONTAINER
            else:
                children = _children(x)
                if _is_live(x):
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
            self._containers.append(_Container(number(place), kind, type(x), extra, keys))
        self._same = [(number(place), number(known)) for place, known in same]

    def _give(self, x: Any, lengths: list[list[int]]) -> _Place:
        self._given.append(x)
        lengths[_GIVEN].append(1)
        return _GIVEN, len(self._given) - 1, 0

    def _add(self, function: types.FunctionType, is_given: bool) -> list[Any]:
        scope = function.__globals__
        names = () if is_library(scope) else global_names(function.__code__)
        added = _Function(
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


def _is_weak(x: Any) -> bool:
    if isinstance(x, types.FunctionType) or type(x) in _classify.LOOK:
        return True
    rule = _classify.rule_of(x)
    return isinstance(rule, Kind) and rule.is_object and bool(type(x).__weakrefoffset__)


def _is_container(x: Any) -> bool:
    rule = _classify.rule_of(x)
    return rule in _CONTAINERS and (rule is not _kinds.DICT or type(x) in _DICTS)


def _is_live(x: Any) -> bool:
    """Tell whether an object may come into a container."""
    rule = _classify.rule_of(x)
    return rule is _kinds.LIST or rule is _kinds.DEQUE or type(x) in _DICTS


def _leads(x: Any) -> bool:
    """Tell whether a container leads to an object or a function."""
    pending, seen = [x], set[int]()
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if _is_weak(x) or len(seen) > _MOST:
            return True
        if _is_container(x):
            pending += _children(x)
    return False


def _children(x: Any) -> Sequence[Any]:
    if type(x) in _classify.LOOK:
        return (getattr(x, "__wrapped__", None),)
    kind: Any = _classify.rule_of(x)
    return kind.open(x)[2] if _is_container(x) else ()
