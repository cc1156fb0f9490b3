"""What functions capture besides objects, in a form that can be compared from call to call.

JAX keeps what it traced by the identity of a function, so that a captured array which has been
replaced since is silently the old one. A compiled function that is kept here is used again only if
what its functions reach by closures, defaults and globals is still the same. What cannot be
compared (an array of a trace) means: trace again. Objects are part of the split.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from anabranch import _jax
from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._function import is_library, what_is_captured
from anabranch.graph._kinds import Kind

_DEPTH = 16  # helpers of helpers; deeper ones are traced again, as is what is longer
_LONG = 256
_LARGE = 1 << 16  # bytes of a numpy array that are compared; larger ones are constants
_CONTAINERS = frozenset({_kinds.LIST, _kinds.DICT, _kinds.DEQUE, _kinds.SET, _kinds.TUPLE})


class _NotComparableError(Exception):
    pass


class _Same:
    """A weak reference that equals those to the same object, while it lives."""

    __slots__ = ("_ref",)

    def __init__(self, obj: Any) -> None:
        self._ref = weakref.ref(obj)

    def __eq__(self, other: object) -> bool:
        obj = self._ref()
        return obj is not None and isinstance(other, _Same) and other._ref() is obj

    def __hash__(self) -> int:
        return id(self._ref)  # Python keeps one reference an object


def captured(functions: Any) -> list[Any] | None:
    """Return what functions capture besides objects, or None if that cannot be compared.

    Arguments:
        functions: functions, methods, partials and callable objects.
    """
    found = _Captured()
    try:
        for function in functions:
            found.add_target(function)
    except _NotComparableError:
        return None
    return found.items


class _Watchers(threading.local):
    def __init__(self) -> None:
        self.stack: list[Callable[[], None]] = []


_WATCHERS = _Watchers()


def call_watched(watcher: Callable[[], None], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; call a watcher whenever a function of the user has been run meanwhile.

    What the function captures is then as it has left it. Later it may be anything else: while the
    program is compiled and runs, other threads run, and callbacks.
    """
    stack = _WATCHERS.stack
    depth = len(stack)
    try:
        stack.append(watcher)
        return function(*args)
    finally:
        del stack[depth:]  # no call: an interrupt may come when a function is entered or left


def tell_watcher() -> None:
    """Say that a function of the user has been run."""
    stack = _WATCHERS.stack
    if stack:
        stack[-1]()


class _Captured:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self._seen: set[int] = set()

    def add_target(self, target: Any) -> None:
        """Add what a target reaches; objects that it is bound to are arguments of the call."""
        while isinstance(target, (functools.partial, types.MethodType)):
            target = target.func if isinstance(target, functools.partial) else target.__func__
        if _classify.is_object(target):
            target = type(target).__call__
        self._function(target, _DEPTH)

    def _function(self, function: Any, depth: int) -> None:
        if hasattr(function, "__wrapped__"):  # a wrapper has captures of its own, too
            self._function(function.__wrapped__, depth)
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        if is_library(function.__globals__):
            return
        if not depth:
            raise _NotComparableError
        for _, value in what_is_captured(function):
            self._value(value, depth)

    def _value(self, value: Any, depth: int) -> None:
        if isinstance(value, (types.ModuleType, type)):
            return
        if type(value) in _classify.LOOK:  # a function, or a transformed one
            self.items.append(_Same(value))
            self._function(value, depth - 1)
            return
        rule = _classify.rule_of(value)
        if rule is _classify.LEAF:
            if _jax.is_tracer(value) or not isinstance(value, (jax.Array, np.ndarray)):
                raise _NotComparableError
            self.items.append(_Same(value))
            if isinstance(value, np.ndarray) and value.nbytes <= _LARGE:
                self.items.append((value.dtype, value.shape, value.tobytes()))
        elif isinstance(rule, Kind):
            if not rule.is_object:
                self._container(value, rule, depth)
        else:
            self._static(value, rule, depth)

    def _container(self, value: Any, kind: Kind, depth: int) -> None:
        if kind is _kinds.METHOD or kind is _kinds.PARTIAL:
            self._function(value.func if kind is _kinds.PARTIAL else value.__func__, depth - 1)
        elif kind not in _CONTAINERS or not depth:
            raise _NotComparableError
        extra, keys, children = kind.open(value)
        if len(children) > _LONG:
            raise _NotComparableError
        self.items.append((type(value), extra, tuple(keys)))
        for child in children:
            if kind.identity and _classify.rule_of(child) is _classify.LEAF:
                raise _NotComparableError
            self._value(child, depth - 1)

    def _static(self, value: Any, rule: Any, depth: int) -> None:
        if hasattr(value, "__wrapped__"):
            self._function(value, depth - 1)
        try:
            if rule is _classify.UNKNOWN:
                _classify.check_static(value)
            by_identity = type(value).__hash__ is object.__hash__
            if by_identity and type(value).__weakrefoffset__:
                self.items.append(_Same(value))
            else:
                self.items.append(_static.encode(value))
        except (NodeTypeError, StaticValueError):
            raise _NotComparableError from None
