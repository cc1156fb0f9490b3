"""One program, two libraries: the few names that differ between flax nnx and anabranch.

Most names are the same, so a program takes the library itself: `def program(lib): lib.jit(...)`.
With `mixed` it runs on the objects of flax, under the transforms of anabranch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

import anabranch as ab

Library = Any
"""The module `flax.nnx`, the module `anabranch`, or `mixed`."""


class _Mixed:
    """The objects of flax nnx with the functions and the transforms of anabranch."""

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(nnx, name, None)
        return theirs if name in _OBJECTS else getattr(ab, name)


_OBJECTS = frozenset(
    """
    BatchStat Cache Dict Intermediate List Module Param Perturbation RngCount RngKey RngStream Rngs
    Variable
    """.split()
)
mixed = _Mixed()


class NnxBox(nnx.Module):
    """A module whose attributes are its keyword arguments."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class Box(ab.Module):
    """The same with anabranch."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def box(lib: Library, **attributes: Any) -> Any:
    """Return a module with these attributes."""
    return (Box if lib is ab else NnxBox)(**attributes)


def sequence(lib: Library, *items: Any) -> Any:
    """Return a list with identity; a plain list has none in nnx."""
    return list(items) if lib is ab else nnx.List(items)


def paths(lib: Library, state: Any) -> list[tuple[Any, ...]]:
    """Return the paths of a state, in its order."""
    if lib is nnx:
        return [path for path, _ in nnx.to_flat_state(state)]
    return list(state.paths)


def raw(variable: Any) -> Any:
    """Return the very array object that a Variable holds."""
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable.value


def value(x: Any) -> Any:
    """Return the numbers in a Variable or array."""
    if isinstance(x, nnx.Variable):
        x = x.get_value()
    elif isinstance(x, ab.Variable):
        x = x.value
    return np.asarray(x).tolist()


def key_data(key: Any) -> Any:
    """Return the numbers in a random key."""
    return np.asarray(jax.random.key_data(key)).tolist()


def outcome(program: Callable[[], Any]) -> Any:
    """Return what a program returns, or the class of what it raises."""
    try:
        return program()
    except Exception as error:
        return type(error)
