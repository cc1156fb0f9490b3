"""The context manager that sets a variable: re-usable, re-entrant, and a decorator.

It holds no state of its own. What is open lives in the current context, so that one object can be
open in several threads and tasks, and several times in one of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from anabranch.contextvars_ext import _messages
from anabranch.contextvars_ext._stack import close_entry, open_entry
from anabranch.errors import ArgumentError, ContextExitError, bounded

if TYPE_CHECKING:
    from anabranch.contextvars_ext._var import JitAwareContextVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def _is(predicate: Callable[[Any], bool], fn: Callable[..., Any]) -> bool:
    # A callable object counts by its `__call__`.
    return predicate(fn) or predicate(type(fn).__call__)


class SetOnEnter(Generic[T]):
    """Set a context variable while open; made by `JitAwareContextVar.set_on_enter`.

    Arguments:
        var: the variable.
        value: its value while this is open.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> unit = cx.JitAwareContextVar("unit")
        >>> in_metres = unit.set_on_enter("metre")
        >>> with in_metres as value, in_metres:
        ...     value
        'metre'
        >>> in_metres(unit.get)()
        'metre'
    """

    __slots__ = ("_value", "_var")

    def __init__(self, var: JitAwareContextVar[T], value: T) -> None:
        self._var = var
        self._value = value

    def __enter__(self) -> T:
        open_entry(self._var, self._value, self)
        return self._value

    def __exit__(self, *exc_info: object) -> None:
        if not close_entry(self._var, self):
            raise ContextExitError(bounded(_messages.not_open(self._var)))

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs in this context; the signature is kept.

        Raises:
            TypeError: `fn` is a generator function (its body would run in the context of whoever
                iterates, with the value leaking between the steps), a staticmethod or a
                classmethod object, or not callable.
        """
        if isinstance(fn, (staticmethod, classmethod)) or not callable(fn):
            raise ArgumentError(_messages.not_decoratable(self._var, fn))
        if _is(inspect.isgeneratorfunction, fn) or _is(inspect.isasyncgenfunction, fn):
            raise ArgumentError(_messages.generator_function(self._var, fn))
        # A callable object may lack the names that `wraps` copies; it skips those.
        if _is(inspect.iscoroutinefunction, fn):
            coroutine_fn = cast("Callable[..., Any]", fn)

            @functools.wraps(coroutine_fn)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await coroutine_fn(*args, **kwargs)

            return cast("Callable[P, R]", run_async)

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return run

    def __repr__(self) -> str:
        return f"<context that sets {self._var!r}>"
