"""What can be reached from functions and objects, and by which steps: what Python itself can name.

Attributes and elements, variables that a function captures, attributes of classes, of functions and
of modules, what a context variable or a weak reference holds, and whatever else the garbage
collector sees. Libraries are not entered.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from anabranch.graph import _classify, _kinds, _module
from anabranch.graph._code import names_in
from anabranch.graph._function import (
    LIBRARIES,
    Capture,
    is_library,
    plain_function,
    what_is_captured,
)
from anabranch.graph._kinds import Kind

_MOST = 20_000  # objects that are looked at
_LONG = 4096  # elements of one of them
CAPTURED, BEHIND, CONTENT, PLAIN, SLOT, CLASS, HELD, REFERENT = (
    "captured",  # by a function
    "behind",  # the same, and there the function behind methods, partials and transforms
    "content",  # of a node
    "plain",  # an attribute that is in a dictionary
    "slot",
    "class",  # an attribute of a class, or of the class of an object
    "held",  # by a context variable or a weak reference
    "referent",  # seen by the garbage collector
)

Step: TypeAlias = "tuple[str, Any]"
"""Where something is in an object, and its key there."""


class Found(NamedTuple):
    """How an object is reached."""

    text: str | None  # the shortest way, as it is written, if it can be
    edges: tuple[tuple[int, Step, int], ...]
    """All steps on all ways: from one object to another. The first ones are where they start."""
    target: int


def search(
    objs: Sequence[Any], starts: Sequence[tuple[str, Any]], visible: Collection[int] = ()
) -> list[Found | None]:
    """Return how each of some objects is reached, None if no way is found.

    Arguments:
        objs: the objects.
        starts: what the ways start from: names and objects.
        visible: the ids of functions whose captured nodes are left out.
    """
    found = _Search(starts, visible, {id(obj) for obj in objs})
    found.run()
    return [found.ways_to(obj) for obj in objs]


class _Search:
    def __init__(
        self, starts: Sequence[tuple[str, Any]], visible: Collection[int], wanted: set[int]
    ) -> None:
        self._visible, self._wanted = visible, wanted
        self._texts: list[str | None] = []
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._edges: list[tuple[int, Step, int]] = []
        self._mentioned: set[str] = set()
        for text, x in starts:
            self._number(text, x)
        self._num_starts = len(self._objects)

    def _number(self, text: str | None, x: Any) -> int:
        number = self._numbers.setdefault(id(x), len(self._objects))
        if number == len(self._objects):
            self._objects.append(x)
            self._texts.append(text)
        return number

    def run(self) -> None:
        """Look at everything, nearest first."""
        at = 0
        while at < len(self._objects) < _MOST:
            x = self._objects[at]
            for text, step, child in self._children(x):
                if id(child) in self._wanted or _may_lead_on(child):
                    named = _joined(self._texts[at], step, text)
                    self._edges.append((at, step, self._number(named, child)))
            at += 1

    def _children(self, x: Any) -> Iterator[tuple[str, Step, Any]]:
        if isinstance(x, types.FunctionType):
            self._mentioned.update(names_in(x.__code__).mentioned)
            yield from _captured_by(x, nodes=id(x) not in self._visible)
        elif isinstance(x, types.ModuleType):
            for name in self._mentioned & vars(x).keys():
                yield f".{name}", (PLAIN, name), vars(x)[name]
        else:
            yield from _children(x)

    def ways_to(self, obj: Any) -> Found | None:
        """Return all ways to an object, with the objects on them numbered anew."""
        target = self._numbers.get(id(obj))
        if target is None:
            return None
        pending, on_them = [target], {target}
        while pending:
            for parent in self._parents.get(pending.pop(), ()):
                if parent not in on_them:
                    on_them.add(parent)
                    pending.append(parent)
        edges = [edge for edge in self._edges if edge[2] in on_them]
        numbers = {at: at for at in range(self._num_starts)}
        for _, _, child in edges:
            numbers.setdefault(child, len(numbers))
        renumbered = [(numbers[parent], step, numbers[child]) for parent, step, child in edges]
        return Found(self._texts[target], tuple(renumbered), numbers[target])

    @functools.cached_property
    def _parents(self) -> dict[int, list[int]]:
        parents: dict[int, list[int]] = {}
        for parent, _, child in self._edges:
            parents.setdefault(child, []).append(parent)
        return parents


def _joined(text: str | None, step: Step, key: str) -> str | None:
    """Return how something is written that is reached by a step from what is written so."""
    where, _ = step
    if where in (CAPTURED, BEHIND):
        return key
    return None if text is None or where == REFERENT else text + key


def _may_lead_on(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        return not is_library(x.__globals__)
    if isinstance(x, types.ModuleType):
        return _is_of_user(x.__name__)
    if isinstance(x, type):
        return _is_of_user(x.__module__)
    rule = _classify.rule_of(x)
    if isinstance(rule, Kind):
        return not rule.is_variable
    return rule is _classify.UNKNOWN and _is_of_user(type(x).__module__, standard=True)


def _is_of_user(module: Any, *, standard: bool = False) -> bool:
    """Tell whether a module is of no library.

    Arguments:
        module: its name.
        standard: whether those of Python count as those of the user.
    """
    name = str(module).partition(".")[0]
    return name not in LIBRARIES and (standard or name not in sys.stdlib_module_names)


def _captured_by(function: types.FunctionType, *, nodes: bool) -> Iterator[Any]:
    for capture, x in what_is_captured(function):
        behind = plain_function(x)
        if isinstance(behind, types.FunctionType):
            yield capture.name, (BEHIND, capture), behind
        if nodes or not isinstance(_classify.rule_of(x), Kind):
            yield capture.name, (CAPTURED, capture), x
    for key, x in [*function.__dict__.items()]:
        yield f"{function.__name__}.{key}", (PLAIN, key), x


def _children(x: Any) -> Iterator[tuple[str, Step, Any]]:
    rule = _classify.rule_of(x)
    if isinstance(rule, Kind):
        try:
            _, keys, values = rule.open(x)
        except Exception:  # it cannot be opened: then nothing is found in it
            return
        for key, child in zip(keys[:_LONG], values, strict=False):
            yield rule.show_key(key), (CONTENT, key), child
        if rule.is_object:
            yield from _of_class(type(x))
    elif isinstance(x, type):
        yield from _of_class(x)
    elif isinstance(x, contextvars.ContextVar):
        yield ".get()", (HELD, None), _held_by(x)
    elif isinstance(x, weakref.ref):
        yield "()", (HELD, None), _held_by(x)
    else:
        yield from _of_unknown(x)


def _of_unknown(x: Any) -> Iterator[tuple[str, Step, Any]]:
    known: list[Any] = [getattr(x, "__dict__", None), type(x)]
    for key, child in [*getattr(x, "__dict__", {}).items()]:
        known.append(child)
        yield f".{key}", (PLAIN, key), child
    for name in _module.slot_names(type(x)):
        child = getattr(x, name, None)
        known.append(child)
        yield f".{name}", (SLOT, name), child
    yield from _of_class(type(x))
    seen = {*map(id, known)}
    for i, child in enumerate(gc.get_referents(x)[:_LONG]):
        if id(child) not in seen:
            yield "", (REFERENT, i), child


def _of_class(cls: type) -> Iterable[tuple[str, Step, Any]]:
    bases = [base for base in cls.__mro__ if _is_of_user(base.__module__)]
    found = {key: value for base in reversed(bases) for key, value in vars(base).items()}
    for key, value in found.items():
        yield f".{key}", (CLASS, key), _unwrapped(value)


def _unwrapped(value: Any) -> Any:
    """Return the function of a property or a method of a class."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _held_by(x: Any) -> Any:
    return x.get(None) if isinstance(x, contextvars.ContextVar) else x()


def follow(x: Any, step: Step) -> Any:
    """Return what is there now; raise some error if there is nothing."""
    where, key = step
    if where == PLAIN:
        return x.__dict__[key]
    if where in (CAPTURED, BEHIND):
        capture: Capture = key
        return plain_function(capture.read(x)) if where == BEHIND else capture.read(x)
    if where == CLASS:
        cls: Any = x if isinstance(x, type) else type(x)
        return _unwrapped(next(vars(base)[key] for base in cls.__mro__ if key in vars(base)))
    if where == SLOT:
        return getattr(x, key)
    if where == HELD:
        return _held_by(x)
    if where == REFERENT:
        return gc.get_referents(x)[key]
    if type(x) in _INDEXED and type(key) in _PLAIN:
        return x[key]
    rule: Any = _classify.rule_of(x)
    if rule is _kinds.MODULE and not _module.slot_names(type(x)):
        return _module.attributes_of(x)[key]
    _, keys, values = rule.open(x)
    return values[keys.index(key)]


_INDEXED = frozenset({list, tuple, dict})
_PLAIN = frozenset({int, str})  # as keys of a dict, numbers are in another form
