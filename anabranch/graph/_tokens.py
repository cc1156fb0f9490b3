"""Who may write an object: trace tokens and structure stamps.

Every Module and Variable carries the **token** of the trace that it was made in: the eager root
itself, or a weak reference to any other trace. A write from another trace would leave a tracer of
that trace behind in the object (or lose the write in a cached trace), so it is refused.

Every structural write also renews a **stamp**, a fresh object that is the same for all objects.
Equal stamps mean an unchanged structure; it is set after the write, so that whoever reads it first
and then walks an object can only be too careful. Whoever wants to know about some Modules only
watches them (see `_watchers`).

A function that is called on twins in the trace of its caller, by `jax.named_call` say, or by any
transform under `jax.disable_jit`, would own all objects of the caller. So a **level** can be
opened, whose token takes the place of the trace's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from anabranch import _jax
from anabranch.errors import CapturedWriteError

R = TypeVar("R")

ROOT = _jax.root_trace()


def _current_trace() -> Any:
    """Return the current trace; what is made in a `hoisting` block belongs to the one around it."""
    trace = _jax.current_trace()
    return trace if trace is ROOT else _jax.opened_in(trace)


NOBODY = object()
"""The token of a copy that JAX made inside a trace."""


class Level:
    """A token of its own within the current trace.

    Who opens one cuts the list of `levels` to its old length, in place, as an interrupt may come
    whenever a function is entered or left; then takes it out of `OPEN_LEVELS`.
    """

    __slots__ = ("trace",)

    def __init__(self) -> None:
        self.trace = _current_trace()

    def open(self) -> None:
        """Let only what is made from now on in the trace belong to it."""
        OPEN_LEVELS.append(self)
        STRUCTURE.unwatched = object()
        _LEVELS.stack.append(self)


class _Levels(threading.local):
    def __init__(self) -> None:
        self.stack: list[Level] = []

    def of(self, trace: Any) -> Level | None:
        """Return the innermost level of a trace in this thread."""
        return next((level for level in reversed(self.stack) if level.trace is trace), None)


_LEVELS = _Levels()
OPEN_LEVELS: list[Level] = []  # those of all threads: most often there is none


def levels() -> list[Level]:
    """Return the levels of this thread."""
    return _LEVELS.stack


def call_at_own_level(function: Callable[..., R], *args: Any) -> R:
    """Call a function; only what it makes in the current trace belongs to it."""
    level, stack = Level(), levels()
    depth = len(stack)
    try:
        level.open()
        return function(*args)
    finally:
        del stack[depth:]
        level.trace = None  # tokens of objects that outlive it do not keep the trace
        if level in OPEN_LEVELS:
            OPEN_LEVELS.remove(level)


def current_token() -> Any:
    """Return the token of the current trace; equal tokens are the same object."""
    trace = _current_trace()
    if OPEN_LEVELS:
        level = _LEVELS.of(trace)
        if level is not None:
            return level
    return token_of(trace)


def token_of(trace: Any) -> Any:
    """Return the token of what is made in a trace, at no level of its own."""
    # without a callback, Python keeps one reference object a trace
    return trace if trace is ROOT or trace is None else weakref.ref(trace)


def levels_are_open() -> bool:
    """Tell whether there is a level of its own in any thread."""
    return bool(OPEN_LEVELS)


def is_level(token: Any) -> bool:
    """Tell whether a token is that of a level within a trace."""
    return type(token) is Level


def trace_of(token: Any) -> Any:
    """Return the trace that a token belongs to, None if it is gone."""
    if type(token) is weakref.ref:
        return token()
    return token.trace if type(token) is Level else token


def owns(token: Any) -> bool:
    """Tell whether a token belongs to the current trace."""
    if token is ROOT and _jax.current_trace() is ROOT and not OPEN_LEVELS:
        return True
    trace = _current_trace()
    if OPEN_LEVELS:
        level = _LEVELS.of(trace)
        if level is not None:
            return token is level
    return token is trace or (type(token) is weakref.ref and token() is trace)


def check_owned(obj: object, token: Any, action: str) -> None:
    """Raise `CapturedWriteError` unless the token belongs to the current trace."""
    if not owns(token):
        refuse(obj, action)


def refuse(obj: object, action: str) -> NoReturn:
    """Raise `CapturedWriteError` for an object of another trace."""
    from anabranch.graph._expression import expression_for  # it needs all kinds of objects

    trace = _current_trace()
    eager = trace is None or trace is ROOT
    here = "eager code" if eager else _jax.describe_boundary(trace)
    name = expression_for(obj)
    named = "" if name is None else f" ({name})"
    raise CapturedWriteError(
        f"Cannot {action} of {type(obj).__name__}{named}: the object belongs to another trace "
        f"level than {here}, which runs now: the write would be lost or would leak a tracer.\n"
        "Pass the object as an argument to a transform of anabranch.transforms "
        "(for example `transforms.jit(f)(obj)` in place of a closure over it)."
    )


class _Structure:
    __slots__ = ("stamp", "unwatched", "variables")

    def __init__(self) -> None:
        self.stamp: object = object()
        self.variables: object = object()
        self.unwatched: object = object()

    def renew_variables(self) -> None:
        """Say that the metadata or the class of a Variable was written."""
        self.variables = object()
        self.unwatched = object()
        self.stamp = object()


STRUCTURE = _Structure()
"""The stamps of the last structural write to anything; of the last one to a Variable; and of the
last event that matters to all who make calls and that nobody can watch: writes to Variables, and
whatever makes calls go another way, such as a level that is opened."""
