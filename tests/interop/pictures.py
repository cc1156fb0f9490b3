"""A picture of objects: who holds what, by number, so that two worlds can be compared with `==`.

Objects are numbered from the names that the caller has, then in the order in which they are
found. Objects of the caller keep the number that they had in the first picture, so a copy in the
place of an object shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import anabranch as ab

World = dict[str, Any]


class Album:
    """Takes pictures of one world."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def picture(self, world: World) -> list[Any]:
        """Return a line for each name, and for each object that was ever seen."""
        todo = list(self._alive)
        lines: dict[Any, Any] = {}

        def brief(x: Any) -> Any:
            if isinstance(x, jax.core.Tracer):
                raise AssertionError(f"a tracer leaked: {x}")
            if isinstance(x, (jax.Array, np.ndarray)):
                if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
                    x = jax.random.key_data(x)
                return (str(x.dtype), np.round(np.asarray(x, np.float64), 5).tolist())
            if isinstance(x, jax.Ref):
                return ("ref", brief(x[...]))
            if isinstance(x, tuple):
                return tuple(brief(y) for y in x)
            if held(x) is None:
                basic = isinstance(x, (bool, int, float, str))
                return (type(x).__name__, x if basic else None)
            if id(x) not in self._numbers:
                self._numbers[id(x)] = len(self._alive)
                self._alive.append(x)
                todo.append(x)
            return f"#{self._numbers[id(x)]}"

        for name, x in world.items():
            lines[name] = brief(x)
        while todo:
            x = todo.pop(0)
            inside = [(key, brief(child)) for key, child in held(x) or ()]
            lines[self._numbers[id(x)]] = (type(x).__name__, inside)
        return sorted(lines.items(), key=str)


def held(x: Any) -> list[tuple[Any, Any]] | None:
    """Return what an object holds, in order; None for what has no identity."""
    if isinstance(x, nnx.Variable):
        own = ("hijax", "ref", "eager_sharding")
        metadata = [(k, v) for k, v in x.get_metadata().items() if k not in own]
        return [("value", x.get_raw_value()), *metadata]
    if isinstance(x, ab.Variable):
        return [("value", x.value), *x.get_metadata().items()]
    if isinstance(x, nnx.State):
        return list(x.raw_mapping.items())
    if isinstance(x, (nnx.Module, nnx.Pytree, ab.Module)):
        return [(k, v) for k, v in vars(x).items() if k != "_pytree__state"]
    if type(x) is list:
        return list(enumerate(x))
    if type(x) is dict:
        return list(x.items())
    return None


def same(
    build: Callable[[], World],
    program: Callable[..., Any],
    transform: Callable[[Any], Any],
    calls: int = 2,
) -> World:
    """Run a program on the objects of a world, plainly and transformed, and compare.

    The program gets the world's objects as keyword arguments. Returns the transformed world.
    """
    plain, other = build(), build()
    albums = Album(), Album()
    assert albums[0].picture(plain) == albums[1].picture(other)
    transformed = transform(program)
    for call in range(calls):
        given = {k: v for k, v in plain.items() if not k.startswith("result")}
        plain[f"result{call}"] = program(**given)
        given = {k: v for k, v in other.items() if not k.startswith("result")}
        other[f"result{call}"] = transformed(**given)
        expected, found = albums[0].picture(plain), albums[1].picture(other)
        assert found == expected, "\n".join(
            f"{b}\ninstead of {a}" for a, b in zip(expected, found, strict=False) if a != b
        )
    return other
