"""`JitAwareContextVar`: a context variable that refuses to be read behind a jit boundary.

The rule of `get`: walk outwards from the current trace to the first trace that was active when the
value was set. If a boundary lies on the way, refuse. `_jax.find_crossed_boundary` does the walk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Generic, NoReturn, TypeVar, overload

import jax.core

from anabranch import _jax
from anabranch.contextvars_ext import _messages
from anabranch.contextvars_ext._set_on_enter import SetOnEnter
from anabranch.contextvars_ext._stack import find_entry
from anabranch.errors import (
    ArgumentError,
    BehindBoundaryError,
    ContextValueNotSetError,
    CopyError,
    bounded,
)

T = TypeVar("T")
F = TypeVar("F")


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


_MISSING: Final = _Missing()


class JitAwareContextVar(Generic[T]):
    """Hold a value per context, readable only where JAX cannot make it stale.

    A value is visible inside the `with` block of `set_on_enter`, in everything that the block
    calls, and through vmap, grad, vjp, jvp and linearize. It is not visible behind a jit-like
    boundary (jit, pmap, shard_map, scan, the loops, cond, switch, checkpoint, ...) that was entered
    after it was set: JAX may cache what it traced there, and the cached program would go on using
    the old value.

    Arguments:
        name: shown in messages; any string.
        default: what `get` returns where nothing is set. It counts as set outside of all traces.
        default_factory: computes the default on first use, once, outside of all traces.

    Raises:
        TypeError: both `default` and `default_factory` are given.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> depth = cx.JitAwareContextVar[int]("depth", default=0)
        >>> with depth.set_on_enter(3):
        ...     depth.get()
        3
        >>> depth.get()
        0
    """

    __slots__ = ("__weakref__", "_default", "_factory", "_lock", "_name")

    @overload
    def __init__(self, name: str | None = None) -> None: ...
    @overload
    def __init__(self, name: str | None = None, *, default: T) -> None: ...
    @overload
    def __init__(self, name: str | None = None, *, default_factory: Callable[[], T]) -> None: ...
    def __init__(
        self,
        name: str | None = None,
        *,
        default: T | _Missing = _MISSING,
        default_factory: Callable[[], T] | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ArgumentError(
                f"The name of a context variable is a string or None, not {name!r:.200}."
            )
        if not isinstance(default, _Missing) and default_factory is not None:
            raise ArgumentError("Give either default or default_factory, not both.")
        if default_factory is not None and not callable(default_factory):
            raise ArgumentError(f"default_factory must be callable, not {default_factory!r:.200}.")
        self._name = name
        self._default = default
        self._factory = default_factory
        self._lock = threading.RLock()

    @property
    def name(self) -> str | None:
        """Return the name that was given, or None."""
        return self._name

    @overload
    def get(self, /) -> T: ...
    @overload
    def get(self, fallback: F, /) -> T | F: ...
    def get(self, fallback: F | _Missing = _MISSING, /) -> T | F:
        """Return the value of the current context.

        Arguments:
            fallback: returned where no value is set and where it is set behind a boundary. It
                comes before the default of the variable, as in the standard library.

        Returns:
            The value itself, not a copy.

        Raises:
            ContextValueNotSetError: no value is set and there is neither fallback nor default.
            BehindBoundaryError: the value was set outside of a jit-like boundary, and there is no
                fallback. Both errors are `LookupError`s.

        Example:
            >>> from anabranch import contextvars_ext as cx
            >>> cx.JitAwareContextVar().get("nothing")
            'nothing'
        """
        entry = find_entry(self)
        if entry is not None:
            crossed = _jax.find_crossed_boundary(entry.chain)
            if crossed is None:
                return entry.value
            if isinstance(fallback, _Missing):
                self._refuse(crossed, _messages.where_set(entry.chain))
            return fallback
        if not isinstance(fallback, _Missing):
            return fallback
        return self._get_default()

    def set_on_enter(self, value: T) -> SetOnEnter[T]:
        """Make a context manager that sets a value while it is open.

        It can be entered any number of times, also while it is open, from any thread and task, and
        it decorates functions and coroutine functions. The traces are recorded on entry.

        Arguments:
            value: the value; `with` gives it back after `as`.

        Returns:
            The context manager.

        Raises:
            ContextExitError: (on exit) it is not open in the current context.

        Example:
            >>> from anabranch import contextvars_ext as cx
            >>> unit = cx.JitAwareContextVar[str]()
            >>> @unit.set_on_enter("metre")
            ... def label(x):
            ...     return f"{x} {unit.get()}"
            >>> label(3)
            '3 metre'
        """
        return SetOnEnter(self, value)

    def _get_default(self) -> T:
        if isinstance(self._default, _Missing) and self._factory is None:
            raise ContextValueNotSetError(bounded(_messages.not_set(self)))
        crossed = _jax.find_crossed_boundary(_jax.ROOT_REFS)
        if crossed is not None:
            self._refuse(crossed, "its default counts as set outside of all traced functions")
        return self._make_default()

    def _make_default(self) -> T:
        if isinstance(self._default, _Missing):
            assert self._factory is not None
            with self._lock, jax.core.eval_context():
                if isinstance(self._default, _Missing):
                    made = self._factory()
                    if isinstance(self._default, _Missing):  # else a finaliser has asked, too
                        self._default = made
        assert not isinstance(self._default, _Missing)
        return self._default

    def _remedy(self) -> str:
        """Say how to get the value to where it was read; overridden for random keys."""
        return _messages.plumb_value(self)

    def _refuse(self, crossed: _jax.Trace, where_set: str) -> NoReturn:
        text = _messages.behind_boundary(self, _jax.describe_boundary(crossed), where_set)
        raise BehindBoundaryError(bounded(f"{text}\n\n{self._remedy()}")) from None

    def __reduce__(self) -> NoReturn:
        raise CopyError(
            f"{self!r} cannot be copied or pickled: what is set belongs to this object. Refer to "
            "it by its name in a module."
        )

    def __repr__(self) -> str:
        name = "" if self._name is None else f"{self._name!r} "
        return f"<JitAwareContextVar {name}at {id(self):#x}>"
