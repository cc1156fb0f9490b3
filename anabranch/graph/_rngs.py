"""Random streams as nodes: a key that stays and a count that moves.

Key number `n` of a stream is `jax.random.fold_in(key, n)`, so a stream is two Variables, drawing
writes one of them, and a transform sees a draw as what it is, a write. The name of a stream is
only a tag: it selects, and does not enter the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp

from anabranch.errors import ArgumentError, MissingStreamError, bounded
from anabranch.graph._module import Module
from anabranch.graph._variable import RngCount, RngKey

Seed: TypeAlias = "int | jax.Array"
"""An integer, a typed key, or a legacy key (uint32 of shape (2,) or (4,)); tracers too."""


class RngStream(Module):
    """Give out random keys, a new one at each call.

    Arguments:
      seed: an integer, or a key (typed, or a legacy array of uint32). A key of shape (n,), n
        streams in one, can only be drawn from where a transform maps over its first axis.
      name: becomes the metadata `tag` of both Variables, so that filters find the stream.

    Attributes:
      key: RngKey, never written by drawing.
      count: RngCount, uint32; how many keys were given out.

    Raises:
      TypeError: the seed is neither an integer nor a key.

    >>> import anabranch as ab
    >>> import jax
    >>> stream = ab.RngStream(0)
    >>> stream() == jax.random.fold_in(jax.random.key(0), 0)
    Array(True, dtype=bool)
    >>> stream() == jax.random.fold_in(jax.random.key(0), 1)
    Array(True, dtype=bool)
    >>> int(stream.count)
    2
    """

    key: RngKey
    count: RngCount

    def __init__(self, seed: Seed, *, name: str | None = None) -> None:
        key = _as_key(seed)
        metadata = {} if name is None else {"tag": name}
        self.key = RngKey(key, **metadata)
        # One count for each key, so that mapping over the first axis maps over both.
        self.count = RngCount(jnp.zeros(_batch_shape(key), jnp.uint32), **metadata)

    def __call__(self) -> jax.Array:
        """Return the next key, of the kind that the stream was made with.

        Raises:
          ValueError: the stream holds several keys.
          CapturedWriteError: the stream belongs to an outer trace that cannot be written.
        """
        key, count = self.key.value, self.count.value
        if shape := _batch_shape(key):
            tag = self.key.get_metadata().get("tag")
            name = "This random stream" if tag is None else f"The random stream {tag!r}"
            raise ArgumentError(
                f"{name} holds keys of shape {shape}, so there is no single next key. "
                "Map over it, for example with `vmap(f, in_axes=0)`, and draw inside."
            )
        drawn = jax.random.fold_in(key, count)
        self.count.value = count + 1
        return drawn


class Rngs(Module):
    """Hold random streams by name.

    A name without a stream of its own falls back to the default stream: it draws the next key of
    that stream, whatever the name is.

    Arguments:
      default: the seed of the default stream; None for no default.
      **streams: seeds of further streams. Names that Rngs itself uses and names with a leading
        underscore are refused.

    Raises:
      TypeError: a seed is neither an integer nor a key.
      ValueError: a stream cannot have that name.

    >>> import anabranch as ab
    >>> rngs = ab.Rngs(0, params=1)
    >>> key = rngs.params()
    >>> key = rngs["params"]()
    >>> int(rngs.params.count)
    2
    >>> key = rngs()
    >>> key = rngs.dropout()  # there is no such stream
    >>> int(rngs.default.count)
    2
    """

    def __init__(self, default: Seed | None = None, **streams: Seed) -> None:
        seeds = streams if default is None else {"default": default, **streams}
        for name, seed in seeds.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise ArgumentError(
                    f"Rngs: a stream cannot be called {name!r}, which is taken or private; "
                    "choose another name"
                )
            setattr(self, name, RngStream(seed, name=name))

    def __call__(self) -> jax.Array:
        """Return the next key of the default stream.

        Raises:
          AttributeError: there is no default stream.
        """
        return self.default()

    def __getattr__(self, name: str) -> RngStream:
        # Only reached if there is no such attribute. Python itself asks for names with a leading
        # underscore (copying, pickling, displaying), and must hear that there are none.
        stream = None if name.startswith("_") else vars(self).get("default")
        if isinstance(stream, RngStream):
            return stream
        raise MissingStreamError(self._missing_text(name))

    def __getitem__(self, name: str) -> RngStream:
        stream = vars(self).get(name, vars(self).get("default"))
        if isinstance(stream, RngStream):
            return stream
        raise MissingStreamError(self._missing_text(name))

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a stream of its own under a name."""
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the streams."""
        return (name for name, value in vars(self).items() if isinstance(value, RngStream))

    def _missing_text(self, name: str) -> str:
        known = ", ".join(self) or "none"
        return bounded(
            f"Rngs has no stream {name!r} and no default stream; its streams: {known}. Write "
            f"Rngs(seed) for a default, or Rngs({name}=seed)."
        )


def _is_typed(key: jax.Array) -> bool:
    return bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))


def _batch_shape(key: jax.Array) -> tuple[int, ...]:
    """Return the shape of an array of keys; a legacy key has one dimension more."""
    return key.shape if _is_typed(key) else key.shape[:-1]


def _as_key(seed: Seed) -> jax.Array:
    """Return the key that a seed stands for; a key stays as it is, legacy ones included."""
    found = type(seed).__name__
    if isinstance(seed, int) and not isinstance(seed, bool):
        return jax.random.key(seed)
    if hasattr(seed, "dtype") and hasattr(seed, "shape"):
        array = jnp.asarray(seed)
        if _is_typed(array) or (array.dtype == jnp.uint32 and array.shape[-1:] in {(2,), (4,)}):
            return array
        if array.shape == () and jnp.issubdtype(array.dtype, jnp.integer):
            return jax.random.key(array)
        found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    raise ArgumentError(
        f"expected a seed, found {found}. A seed is an integer, a key such as "
        "jax.random.key(0), or a legacy key, uint32[2] or uint32[4]."
    )
