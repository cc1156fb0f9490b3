"""Give lanes different values: a world for each of them, and one that has all of them, stacked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from tests.property.contents import is_array, put_back, raw, reachable
from tests.property.objects import DICTS, LISTS, Pair

LANES = 5
"""Longer than any axis in a program, so that shapes tell what is stacked."""

Make = Callable[[Any, int], Any]
"""From an array, and how many there were before it, to the one in its place."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How lanes differ."""

    shared: type | None
    """The kind of Variables that are the same in all lanes."""

    size: int = LANES

    @property
    def axes(self) -> ab.StateAxes:
        """The axes of the world that has all lanes."""
        return ab.StateAxes({is_number: None, self._is_shared: None, ...: 0})

    def _is_shared(self, path: Any, owner: Any) -> bool:
        return type(owner) is self.shared

    def apply(self, lanes: Sequence[dict[str, Any]], stacked: dict[str, Any]) -> None:
        """Give each world its arrays; all worlds are the same to begin with."""
        for lane, names in enumerate(lanes):
            self._replace(names, functools.partial(shifted, lane=lane))
        self._replace(stacked, _all_lanes)

    def given(self, x: Any) -> Any:
        """Return an argument of the world that has all lanes: arrays have the axis of lanes."""
        if is_array(x) or isinstance(x, np.generic):
            stacked = x.shape[:1] == (LANES,)  # what a shared Variable holds is not
            return x if stacked else jnp.broadcast_to(x, (LANES, *x.shape))
        return _rebuilt(x, self.given)

    def has_axes(self, x: Any) -> bool:
        """Tell whether no list or dict of an argument holds a NumPy scalar, which has no axis."""
        containers = [node for node in reachable([x]) if isinstance(node, (*LISTS, *DICTS))]
        held = [y for c in containers for y in (c.values() if isinstance(c, DICTS) else c)]
        return not any(isinstance(y, np.generic) for y in held)

    def _replace(self, names: dict[str, Any], make: Make) -> None:
        nodes = [names, *reachable(names.values())]
        shared = [node for node in nodes if type(node) is self.shared]
        same = {id(node) for node in reachable(shared)}
        variables = [node for node in nodes if isinstance(node, ab.Variable)]
        of_variables = {id(node) for node in reachable(variables)}
        arrays: dict[int, tuple[Any, Any]] = {}  # by identity; the old ones are kept alive

        def replaced(x: Any, variable: bool) -> Any:
            if is_array(x) or (variable and isinstance(x, np.generic)):
                return arrays.setdefault(id(x), (x, make(x, len(arrays))))[1]
            return _rebuilt(x, functools.partial(replaced, variable=variable))

        for node in nodes:
            if id(node) not in same:
                variable = id(node) in of_variables
                put_back(node, _each(node, functools.partial(replaced, variable=variable)))


def is_number(path: Any, owner: Any) -> bool:
    """Tell numbers, which are the same in all lanes; a transform around makes them weak arrays."""
    if isinstance(owner, ab.Variable) or np.ndim(owner):
        return False
    return isinstance(owner, (int, float)) or getattr(owner, "weak_type", False)


def slice_of(stacked: Any, like: Any, lane: int) -> Any:
    """Return what one lane sees of what is there."""
    if is_array(stacked) and stacked.shape == (LANES, *np.shape(like)):
        return stacked[lane]
    return stacked


def shifted(array: Any, number: int, lane: int) -> Any:
    """Return an array of one lane, in the place of the given one."""
    step = lane * (1 if array.dtype.kind == "i" else 0.25) * (-1) ** number
    if isinstance(array, jax.Array):
        return jnp.clip(array + step, -8, 8).astype(
            array.dtype
        )  # not of a weak type, as numbers are
    return _read_only(np.clip(array + step, -8, 8).astype(array.dtype))


def _all_lanes(array: Any, number: int) -> Any:
    lanes = [shifted(array, number, lane) for lane in range(LANES)]
    return jnp.stack(lanes) if isinstance(array, jax.Array) else _read_only(np.stack(lanes))


def _read_only(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def _each(node: Any, replaced: Callable[[Any], Any]) -> Any:
    """Return what a node is to hold."""
    held = raw(node)
    if isinstance(node, ab.Variable):
        return replaced(held[0]), held[1]
    if type(node) in LISTS:
        return [replaced(x) for x in held]
    if type(node) in DICTS:
        return [(key, replaced(x)) for key, x in held]
    return {name: replaced(x) for name, x in held.items()}


def _rebuilt(x: Any, replaced: Callable[[Any], Any]) -> Any:
    if isinstance(x, Pair):
        return Pair(replaced(x.a), replaced(x.b))
    if isinstance(x, functools.partial):
        keywords = {key: replaced(child) for key, child in x.keywords.items()}
        return functools.partial(x.func, *map(replaced, x.args), **keywords)
    if isinstance(x, tuple):
        children = map(replaced, x)
        return type(x)(*children) if hasattr(x, "_fields") else tuple(children)
    return x  # a bound method holds a node
