"""What random programs are made of: classes, kinds of Variables, and the names in their text."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from anabranch.errors import AnabranchError

Array = jax.Array | np.ndarray


class Block(ab.Module):
    """A Module with an `__init__` that has no required parameter, and a method."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def bump(self) -> None:
        self.hits = getattr(self, "hits", 0) + 1


class Strict(ab.Module):
    """A Module that cannot be made without an argument."""

    def __init__(self, a: Any, /) -> None:
        self.a = a


@ab.graph.node
class Box:
    """A plain class that is declared a node."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@ab.graph.node
class Slotted:
    """A node without `__dict__`."""

    __slots__ = ("__weakref__", "a", "b", "c")

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass
class Record:
    """An unfrozen dataclass: a node without a declaration; its `==` makes it unhashable."""

    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class Pair:
    """A frozen dataclass: a value."""

    a: Any
    b: Any


class Point(NamedTuple):
    """A named tuple: a value."""

    a: Any
    b: Any


class Own(ab.Variable):
    """A kind of Variable of the user's own."""


class OwnParam(ab.Param):
    """A kind below another kind."""


class Boom(Exception):
    """The injected failure."""


def is_no_program(error: BaseException) -> bool:
    """Tell what numbers and NumPy arrays refuse: it is possible once they are traced (S1a)."""
    text = str(error)
    if isinstance(error, AttributeError) and "'update'" in text:
        return True  # tracers have an `update`, that of their aval
    if isinstance(error, IndexError):  # in a trace, an index is clamped, and another error raised
        return any(
            x in text for x in ("out of bounds for axis", "scalar variable", "valid indices")
        )
    if isinstance(error, TypeError | AttributeError):
        return any(x in text for x in ("'int'", "'float'", "'numpy.")) or type(
            error
        ).__module__.startswith("numpy")
    return isinstance(error, ValueError) and ("read-only" in text or "delete array" in text)


class _Skip:
    """Leave out a statement that does not fit the objects any more.

    What the library itself refuses is no reason to go on, and neither is a misused tracer.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        fits = (AttributeError, LookupError, TypeError, ValueError, NameError)
        foreign = (AnabranchError, jax.errors.JAXTypeError, jax.errors.JAXIndexError)
        if not isinstance(error, fits) or isinstance(error, foreign):
            return False
        return not is_no_program(error)


@contextlib.contextmanager
def arrays_refuse_attributes() -> Iterator[None]:
    """Let JAX arrays refuse attributes as tracers do; outside a trace they take any."""
    cls = type(jnp.zeros(()))

    def refuse(array: jax.Array, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"an array has no attribute {name!r} that can be set")
        object.__setattr__(array, name, value)

    cls.__setattr__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cls.__setattr__


def f32(value: Any) -> jax.Array:
    return jnp.asarray(np.array(value, np.float32))


def i32(value: Any) -> jax.Array:
    return jnp.asarray(np.array(value, np.int32))


def n32(value: Any) -> np.ndarray:
    """Make a NumPy array that no statement can write to: inside a trace it would be replaced."""
    array = np.array(value, np.float32)
    array.setflags(write=False)
    return array


def poke(array: np.ndarray, value: int) -> None:
    """Write into a NumPy array all the same, as the caller may between calls."""
    array.setflags(write=True)
    array[0] = value
    array.setflags(write=False)


def arrays_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what is no array: JAX would walk it as a pytree, and does not survive cycles."""

    def checked(*operands: Any) -> Any:
        for x in operands:
            if not isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
                raise TypeError(f"{function.__name__} takes arrays")
        return function(*operands)

    return checked


def array(x: Any) -> Any:
    return x


def bounded(x: Any) -> Any:
    """Keep numbers so small that everything stays exact."""
    return jnp.clip(x, -8, 8)


def cyclic(x: Any) -> Any:
    """Keep numbers small without an end where they would stay."""
    return jnp.mod(x + 8, 16) - 8


NAMES = "a b c d e".split()
ATTRIBUTE_NODES = (Block, Strict, Box, Slotted, Record)
DICTS = (dict, OrderedDict, defaultdict)
LISTS = (list, deque)
VARIABLES = (ab.Variable, ab.Param, ab.BatchStat, Own, OwnParam)

VOCABULARY: dict[str, Any] = {
    "np": np,
    "f32": f32,
    "i32": i32,
    "n32": n32,
    "poke": poke,
    "array": arrays_only(array),
    "bounded": arrays_only(bounded),
    "cyclic": arrays_only(cyclic),
    "floor": arrays_only(jnp.floor),
    "maximum": arrays_only(jnp.maximum),
    "minimum": arrays_only(jnp.minimum),
    "total": arrays_only(jnp.sum),
    "where": arrays_only(jnp.where),
    "skip": _Skip(),
    "partial": functools.partial,
    "MethodType": types.MethodType,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
    "deque": deque,
    **{cls.__name__: cls for cls in (*ATTRIBUTE_NODES, *VARIABLES, Pair, Point, Boom)},
}
