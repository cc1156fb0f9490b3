"""The ways on which functions reach objects that no look at the code tells: found by searching.

A Variable that was found by its use is an input of later calls only as long as the function still
reaches it: an attribute of an instance that is no node, or of a class, may have been bound to
another object since, and nothing tells us.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from anabranch.graph import _classify
from anabranch.graph._function import Capture, plain_function, what_is_captured
from anabranch.graph._kinds import Kind

_MOST = 5000  # objects that are looked at
CONTENT, PLAIN, CLASS = "content", "plain", "class"

_Step: TypeAlias = "tuple[str, Any]"  # where a child is, and its key there
Trail: TypeAlias = "tuple[Any, Any] | None"  # the trail before, and the step after it


class Way(NamedTuple):
    """A way from a function to an object."""

    function: weakref.ref[types.FunctionType]
    capture: Capture
    steps: tuple[_Step, ...]
    text: str  # how it is written

    def leads_to(self, obj: Any) -> bool:
        """Tell whether the object is still there."""
        function = self.function()
        if function is None:
            return False
        try:
            x = self.capture.read(function)
            for where, key in self.steps:
                x = _child(x, where, key)
        except (LookupError, AttributeError, TypeError, ValueError):
            return False
        return x is obj


def ways_to(functions: Iterable[Any], objs: Sequence[Any]) -> list[Way | None]:
    """Return a short way from functions to each of some objects, None if there is none.

    Where there are several, it is one that does not begin with an object: what is reached from
    those is an input in any case.
    """
    starts: list[tuple[str, Any, Any]] = []
    pending = [plain_function(function) for function in functions]
    seen: set[int] = set()
    while pending and len(seen) < _MOST:
        function = pending.pop(0)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            for capture, x in what_is_captured(function):
                starts.append((capture.name, (None, (function, capture)), x))
                pending.append(plain_function(x))
    hidden = [start for start in starts if not isinstance(_classify.rule_of(start[2]), Kind)]
    found = zip(search(objs, hidden), search(objs, starts), strict=True)
    return [None if (way := a or b) is None else _way(*way) for a, b in found]


def _way(text: str, trail: Any) -> Way:
    steps: list[Any] = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    (function, capture), *rest = reversed(steps)
    return Way(weakref.ref(function), capture, tuple(rest), text)


def search(
    objs: Sequence[Any], starts: Sequence[tuple[str, Trail, Any]]
) -> list[tuple[str, Trail] | None]:
    """Return the shortest way to each of some objects: how it is written, and the steps.

    Arguments:
        objs: the objects.
        starts: what the ways start from: names, trails and objects.
    """
    wanted = {id(obj) for obj in objs}
    found: dict[int, tuple[str, Trail]] = {}
    level, seen = [*starts], set[int]()
    while level and wanted and len(seen) < _MOST:
        deeper: list[tuple[str, Trail, Any]] = []
        for name, trail, x in level:
            if id(x) in wanted:
                wanted.discard(id(x))
                found[id(x)] = (name, trail)
            if id(x) not in seen and len(seen) < _MOST:
                seen.add(id(x))
                for key, step, child in _children(x):
                    deeper.append((f"{name}{key}", (trail, step), child))
        level = deeper
    return [found.get(id(obj)) for obj in objs]


def _children(x: Any) -> Iterator[tuple[str, _Step, Any]]:
    rule = _rule_of(x)
    if isinstance(rule, Kind) and not rule.is_variable:
        try:
            _, keys, values = rule.open(x)
        except Exception:  # it cannot be opened: then nothing is found in it
            return
        for key, child in zip(keys, values, strict=True):
            yield rule.show_key(key), (CONTENT, key), child
        if rule.is_object:
            yield from _class_attributes(type(x))
    elif isinstance(x, type):
        yield from _class_attributes(x)
    elif rule is _classify.UNKNOWN:
        for key, child in [*getattr(x, "__dict__", {}).items()]:
            yield f".{key}", (PLAIN, key), child


def _class_attributes(cls: type) -> Iterator[tuple[str, _Step, Any]]:
    for base in cls.__mro__:
        for key, value in [*vars(base).items()]:
            if isinstance(_rule_of(value), Kind):
                yield f".{key}", (CLASS, key), value


def _rule_of(x: Any) -> Any:
    """Return what an object is, nothing for functions: these are followed before."""
    return None if type(x) in _classify.LOOK else _classify.rule_of(x)


def _child(x: Any, where: str, key: Any) -> Any:
    if where is PLAIN:
        return x.__dict__[key]
    if where is CLASS:
        cls: Any = x if isinstance(x, type) else type(x)
        return next(vars(base)[key] for base in cls.__mro__ if key in vars(base))
    if type(x) is dict and type(key) is str:
        return x[key]
    rule: Any = _classify.RULES.get(type(x))
    _, keys, values = rule.open(x)
    return values[keys.index(key)]
