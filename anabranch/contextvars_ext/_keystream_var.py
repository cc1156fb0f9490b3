"""Random keys without passing keys: the current stream is the value of a context variable.

A default stream serves programs that never mention keys. It is made on first use, since making a
key starts JAX's backend, and it counts as set outside of all traces, as any default does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, ParamSpec, SupportsIndex, TypeVar, cast, overload

import jax
import jax.core

from anabranch.contextvars_ext import _messages
from anabranch.contextvars_ext._keystream import KeyStream
from anabranch.contextvars_ext._plumb import plumb_and_transform
from anabranch.contextvars_ext._set_on_enter import SetOnEnter
from anabranch.contextvars_ext._var import JitAwareContextVar
from anabranch.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


class _DefaultStream:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may draw keys, too
        self._seed = 0
        self._stream: KeyStream | None = None

    def reset(self, seed: int) -> None:
        with self._lock:
            self._seed, self._stream = seed, None

    def get(self) -> KeyStream:
        with self._lock:
            if self._stream is None:
                # Eagerly, whatever vmap or grad is active: the stream outlives them.
                with jax.core.eval_context():
                    made = KeyStream(jax.random.key(self._seed))
                if self._stream is None:
                    self._stream = made
            return self._stream


_default_stream: Final = _DefaultStream()


class _KeyStreamVar(JitAwareContextVar[KeyStream]):
    __slots__ = ()

    def _make_default(self) -> KeyStream:
        return _default_stream.get()

    def _remedy(self) -> str:
        return _messages.plumb_key()


_keystream_var: Final = _KeyStreamVar("keystream", default_factory=_default_stream.get)


def set_keystream_on_enter(keystream: KeyStream) -> SetOnEnter[KeyStream]:
    """Make a context manager inside which all keys come from a stream.

    Arguments:
        keystream: the stream.

    Returns:
        A context manager that is re-usable and a decorator, as those of
        `JitAwareContextVar.set_on_enter`.

    Raises:
        TypeError: `keystream` is no `KeyStream`.

    Example:
        >>> import jax
        >>> from anabranch import contextvars_ext as cx
        >>> with cx.set_keystream_on_enter(cx.KeyStream(jax.random.key(0))) as stream:
        ...     key = cx.get_next_key()
        >>> stream.counter
        1
    """
    if not isinstance(keystream, KeyStream):
        raise ArgumentError(f"Wrap a key into a stream: KeyStream(key). Got {keystream!r:.200}.")
    return _keystream_var.set_on_enter(keystream)


def get_next_key() -> jax.Array:
    """Return the next key of the current stream.

    Outside of every `set_keystream_on_enter` it comes from the default stream of the process.

    Returns:
        A key of shape ().

    Raises:
        BehindBoundaryError: the current stream was set outside of a jit-like boundary. The message
            shows the remedy, `plumb_rng_key_and_jit`.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> cx.get_next_key().shape
        ()
    """
    return _keystream_var.get().next_key()


def set_default_seed(seed: int) -> None:
    """Start the default stream of the process anew, from a seed; it starts from 0 otherwise.

    The stream is made on first use, so that this does not start JAX's backend.

    Arguments:
        seed: an integer, as for `jax.random.key`.

    Raises:
        TypeError: `seed` is no integer.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> cx.set_default_seed(1)
        >>> first = cx.get_next_key()
        >>> cx.set_default_seed(1)
        >>> bool(first == cx.get_next_key())
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise ArgumentError(f"A seed is an integer, not {seed!r:.200}.")
    _default_stream.reset(int(seed.__index__()))


def _shift(position: int) -> int:
    return position + 1 if position >= 0 else position


def _behind_key(jit_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Let arguments of jit that count positions count the user's, not the key in front of them."""
    shifted = dict(jit_kwargs)
    for name in ("static_argnums", "donate_argnums"):
        numbers = jit_kwargs.get(name)
        if isinstance(numbers, int):
            shifted[name] = _shift(numbers)
        elif numbers is not None:
            shifted[name] = tuple(_shift(number) for number in numbers)
    shardings = jit_kwargs.get("in_shardings")
    if isinstance(shardings, (tuple, list)):
        shifted["in_shardings"] = (None, *cast("tuple[Any, ...]", shardings))
    elif shardings is not None:
        raise ArgumentError(
            "Give in_shardings to plumb_rng_key_and_jit as a tuple with one entry per positional "
            f"argument, not as {type(shardings).__name__}: the key that is plumbed in has its own."
        )
    return shifted


@overload
def plumb_rng_key_and_jit(func: Callable[P, R], **jit_kwargs: Any) -> Callable[P, R]: ...
@overload
def plumb_rng_key_and_jit(
    func: None = None, **jit_kwargs: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def plumb_rng_key_and_jit(func: Callable[..., Any] | None = None, **jit_kwargs: Any) -> Any:
    """Compile a function that draws random numbers from the current stream.

    Every call takes one key from the stream outside and makes a stream from it inside. The tree of
    keys grows by one level, so the numbers differ from those of the plain function.

    Arguments:
        func: the function. Without it, the result is a decorator.
        **jit_kwargs: for `jax.jit`. Positions (`static_argnums`, `donate_argnums`, a tuple
            `in_shardings`) count the arguments of `func`.

    Returns:
        A function with the signature of `func`, or a decorator that makes one.

    Raises:
        TypeError: `in_shardings` is not a tuple.

    Example:
        >>> import jax
        >>> from anabranch import contextvars_ext as cx
        >>> @cx.plumb_rng_key_and_jit
        ... def noisy(x):
        ...     return x + cx.random.normal()
        >>> with cx.set_keystream_on_enter(cx.KeyStream(jax.random.key(0))):
        ...     bool(noisy(1.0) == noisy(1.0))
        False
    """
    if func is None:
        return functools.partial(plumb_rng_key_and_jit, **jit_kwargs)
    return plumb_and_transform(
        func,
        transform_to_apply=functools.partial(jax.jit, **_behind_key(jit_kwargs)),
        compute_extra_input_before=get_next_key,
        create_context_managers_after=lambda key: [set_keystream_on_enter(KeyStream(key))],
    )
