"""`KeyStream`: a sequence of keys from one key.

A stream is a base key and a counter. The counter is a Python int: while a function is traced, each
draw folds a different constant into the base key, so the compiled program depends on the base key
only, and its draws may be computed in any order.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NoReturn, SupportsIndex, TypeAlias, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from anabranch.errors import ArgumentError, CopyError

IntScalar: TypeAlias = "int | np.integer[Any] | jax.Array"

# Words in a raw key, by the name of JAX's default implementation.
_RAW_KEY_WORDS: Final = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def _check_key(key: object) -> jax.Array:
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise ArgumentError(
            f"A KeyStream starts from a key, as jax.random.key(0) makes one, not from {key!r:.200}."
        )
    described = f"an array of shape {key.shape} and dtype {key.dtype}"
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ArgumentError(
                f"A KeyStream starts from one key, not from {described}. Take one of them, or use "
                "jax.vmap over the keys and make the stream inside."
            )
        return cast("jax.Array", key)
    if key.dtype != np.uint32:
        raise ArgumentError(
            f"A KeyStream starts from jax.random.key(seed) or from a raw uint32 key, not from "
            f"{described}."
        )
    implementation = str(cast("Any", jax.config).jax_default_prng_impl)
    words = _RAW_KEY_WORDS.get(implementation)
    if key.ndim != 1 or (words is not None and key.shape != (words,)):
        raise ArgumentError(
            f"A raw key of {implementation} is a vector of {words} words, not {described}. For "
            "several keys use jax.vmap and make the stream inside."
        )
    return cast("jax.Array", key)


def _check_offset(offset: object) -> IntScalar:
    if isinstance(offset, jax.Array):
        if offset.shape == () and jnp.issubdtype(offset.dtype, jnp.integer):
            # In its own dtype, say int8, offset + counter would wrap and repeat keys.
            return offset.astype(jnp.uint32)
    elif isinstance(offset, SupportsIndex) and not isinstance(offset, (bool, np.bool_)):
        number = int(offset.__index__())
        if 0 <= number < 2**32:
            return number
        raise ArgumentError(
            f"The offset of a KeyStream is in [0, 2**32), but the one given has "
            f"{number.bit_length()} bits, or is negative."
        )
    raise ArgumentError(
        f"The offset of a KeyStream is an integer or an integer array of shape (), not "
        f"{offset!r:.200}."
    )


class KeyStream:
    """Produce a sequence of independent keys from one key.

    Key number `i` is `jax.random.fold_in(key, offset + i)`. Streams compare by identity, and have
    no hash, so that one cannot be passed to jit as a static argument by accident.

    Arguments:
        key: a typed key of shape (), or a raw uint32 key; may be traced.
        offset: the number of the first key, an integer or an integer array of shape (); may be
            traced.

    Raises:
        TypeError: `key` is no key, or `offset` is no integer.
        ValueError: `key` is a batch of keys, or `offset` does not fit into 32 bits.

    Example:
        >>> import jax
        >>> from anabranch import contextvars_ext as cx
        >>> stream = cx.KeyStream(jax.random.key(0))
        >>> first, second = stream.next_key(), stream.next_key()
        >>> bool(first == second), stream.counter
        (False, 2)
    """

    __slots__ = ("__weakref__", "_counter", "_key", "_lock", "_offset")
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, key: jax.Array | np.ndarray[Any, Any], offset: IntScalar = 0) -> None:
        self._key = _check_key(key)
        self._offset = _check_offset(offset)
        self._counter = 0
        self._lock = threading.Lock()

    @property
    def counter(self) -> int:
        """Return how many keys were taken."""
        return self._counter

    def next_key(self) -> jax.Array:
        """Return a key that this stream has not given before; safe to call from several threads.

        Returns:
            A key of shape (), typed or raw as the key of the stream is.

        Example:
            >>> import jax
            >>> from anabranch import contextvars_ext as cx
            >>> key = cx.KeyStream(jax.random.key(0), offset=7).next_key()
            >>> bool(key == jax.random.fold_in(jax.random.key(0), 7))
            True
        """
        with self._lock:
            number = self._counter
            self._counter += 1
        return jax.random.fold_in(self._key, self._offset + number)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> NoReturn:
        raise CopyError(
            "A KeyStream is not copied or pickled, since both would give equal keys. Make another "
            "one from another key."
        )

    def __repr__(self) -> str:
        kind = "traced" if isinstance(self._key, jax.core.Tracer) else str(self._key.dtype)
        return f"<KeyStream of a {kind} key, {self._counter} taken>"
