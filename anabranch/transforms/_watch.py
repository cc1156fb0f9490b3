"""Whether functions still capture what they captured: values compared by identity, in a moment.

To tell where a function reaches objects, all that it captures has to be followed, helper functions
and containers included, which takes many times as long as a call. So what was found on the way is
remembered, and as long as every place holds the same, the answer is the same. Objects and functions
are remembered weakly: nothing here keeps alive what a function has captured once.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from anabranch.graph import _classify, _kinds
from anabranch.graph._function import global_names, is_filled, is_library, is_settled
from anabranch.graph._kinds import Kind

_MOST = 512  # places; functions that reach more are followed anew on every call
_DICTS = frozenset({dict, OrderedDict, defaultdict})


class Unplannable(Exception):
    """A call cannot be planned."""


class _Function(NamedTuple):
    """The places in one function."""

    ref: weakref.ref[types.FunctionType]
    filled: tuple[bool, ...]  # of its cells
    names: tuple[str, ...]  # of globals that are set
    absent: tuple[str, ...]  # of those that are not

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


class Watch:
    """What functions capture.

    Arguments:
        functions: functions, methods, partials, callable objects.

    Raises:
        Unplannable: they capture too much, or an object in a container, which may lose it.
    """

    __slots__ = ("_functions", "_ids", "_kept", "_live", "_refs")

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions: list[_Function] = []
        self._live: list[Iterable[Any]] = []
        self._follow(functions)
        now = self._now()
        if now is None or len(now) > _MOST:
            raise Unplannable
        self._ids = [*map(id, now)]
        self._refs = [weakref.ref(x) for x in now if _is_weak(x)]
        self._kept = [x for x in now if not _is_weak(x)]  # so that ids stay valid

    def __bool__(self) -> bool:
        """Tell whether anything has to be watched."""
        return bool(self._functions)

    def is_same(self) -> bool:
        """Tell whether every place holds what it held."""
        if not self._functions:
            return True
        now = self._now()
        if now is None or [*map(id, now)] != self._ids:
            return False
        return all([ref() is not None for ref in self._refs])  # noqa: C419 - it is short

    def conditions(self, constant: Callable[[Any], str]) -> list[str] | None:
        """Return expressions that are all true if every place holds the same, for a follower.

        They may raise `LookupError` and `ValueError` if a place is empty now, and `RuntimeError` if
        somebody is writing one. What they refer to is kept alive, but for objects and functions.

        Arguments:
            constant: from a value to a name for it.

        Returns:
            None if there are places that are no part of this: empty cells.
        """
        functions = [function.ref() for function in self._functions]
        if not self.is_same() or None in functions:
            return None
        found: list[str] = []
        for container in self._live:
            held, name = [*container], constant(container)
            found.append(f"len({name}) == {len(held)} and all(map(is_, {name}, {constant(held)}))")

        def known(x: Any) -> str:
            return f"{constant(weakref.ref(x))}()" if _is_weak(x) else constant(x)

        for place, function in zip(self._functions, functions, strict=True):
            if function is None or not all(place.filled):
                return None
            for cell in function.__closure__ or ():
                found.append(f"{constant(cell)}.cell_contents is {known(cell.cell_contents)}")
            names, scope = function.__globals__, constant(function.__globals__)
            found += [f"{scope}[{name!r}] is {known(names[name])}" for name in place.names]
            found += [f"{name!r} not in {scope}" for name in place.absent]
            own, defaults = constant(function), function.__kwdefaults__
            found.append(f"{own}.__defaults__ is {constant(function.__defaults__)}")
            found.append(f"{own}.__kwdefaults__ is {constant(defaults)}")
            for name, value in (defaults or {}).items():
                found.append(f"{constant(defaults)}[{name!r}] is {known(value)}")
        return found

    def _now(self) -> list[Any] | None:
        now: list[Any] = []
        for function in self._functions:
            found = function.read()
            if found is None:
                return None
            now += found
        now += chain.from_iterable(self._live)
        return now

    def _follow(self, functions: Sequence[Any]) -> None:
        pending = [(x, False) for x in functions]  # and whether something here keeps it alive
        seen: set[int] = set()
        while pending:
            x, held = pending.pop()
            if id(x) in seen or is_settled(x):
                continue
            seen.add(id(x))
            if len(seen) > _MOST or (held and _is_weak(x)):
                raise Unplannable
            if isinstance(x, types.FunctionType):
                pending += [(child, False) for child in self._add(x)]
            else:
                holds = held or not any(x is function for function in functions)
                pending += [(child, holds) for child in self._children(x)]

    def _add(self, function: types.FunctionType) -> list[Any]:
        scope = function.__globals__
        names = () if is_library(scope) else global_names(function.__code__)
        added = _Function(
            weakref.ref(function),
            tuple(map(is_filled, function.__closure__ or ())),
            tuple([name for name in names if name in scope]),
            tuple([name for name in names if name not in scope]),
        )
        found = added.read() or []
        if found or added.filled or added.absent:
            self._functions.append(added)
        return found

    def _children(self, x: Any) -> Iterable[Any]:
        cls: Any = type(x)
        if cls in _classify.LOOK:
            return (getattr(x, "__wrapped__", None),)
        rule = _classify.rule_of(x)
        if not isinstance(rule, Kind) or rule.is_object:
            return ()
        if rule is _kinds.METHOD:
            return (x.__self__, x.__func__)
        if rule is _kinds.PARTIAL:
            return (x.func, *x.args, *x.keywords.values())
        if rule is _kinds.TUPLE or rule is _kinds.FROZEN:
            return rule.open(x)[2]
        if rule is _kinds.LIST or rule is _kinds.DEQUE:
            self._live.append(x)
            return tuple(x)
        if cls in _DICTS:
            self._live += (x, x.values())
            return tuple(x.values())
        return ()


def _is_weak(x: Any) -> bool:
    if isinstance(x, types.FunctionType) or type(x) in _classify.LOOK:
        return True
    rule = _classify.rule_of(x)
    return isinstance(rule, Kind) and rule.is_object and bool(type(x).__weakrefoffset__)
