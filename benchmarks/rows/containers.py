"""Row 2: the same call for models of dataclasses, of dicts and lists, and of flax nnx objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, OURS, Effort, Line, Step, compare
from benchmarks.models import Library
from benchmarks.rows import dispatch


@dataclasses.dataclass(eq=False)
class Linear:
    """Two arrays."""

    w: Any
    b: Any


@dataclasses.dataclass(eq=False)
class BatchNorm:
    """Four arrays."""

    scale: Any
    bias: Any
    mean: Any
    var: Any


@dataclasses.dataclass(eq=False)
class Block:
    """Six arrays."""

    linear: Linear
    norm: BatchNorm


@dataclasses.dataclass(eq=False)
class Model:
    """A counter and blocks, as plain arrays in dataclasses."""

    count: Any
    blocks: list[Block]


def lines(effort: Effort, depths: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    depths = depths or effort.pick(dispatch.DEPTHS[:3], dispatch.DEPTHS)
    for case, make in CASES.items():
        for depth in depths:
            makers = make(depth)
            makers[BARE] = partial(dispatch.bare, depth)
            yield compare(2, case, 1 + 6 * depth, makers, effort)


def count(model: Any) -> None:
    """Write one integer leaf, a plain array."""
    model.count = model.count + 1


def _ours(function: Callable[[Any], None], model: Any) -> Step:
    called = ab.jit(function)
    return Step(lambda: called(model), lambda: model.count)


def dataclass(depth: int) -> Model:
    """Return a model of dataclasses."""
    array, width = models.array, models.WIDTH
    made = [
        Block(
            Linear(array(width, width), array(width)),
            BatchNorm(*[array(width) for _ in range(4)]),
        )
        for _ in range(depth)
    ]
    return Model(jnp.array(0), made)


def in_dicts(library: Library, depth: int) -> Any:
    """Return a module with a list of dicts of dicts of Variables."""
    array, width = models.array, models.WIDTH
    made: list[Any] = []
    for _ in range(depth):
        linear = {"w": library.param(array(width, width)), "b": library.param(array(width))}
        names = ("scale", "bias", "mean", "var")
        norm = {name: library.param(array(width)) for name in names}
        made.append(
            library.dict_of({"linear": library.dict_of(linear), "norm": library.dict_of(norm)})
        )
    return library.classes.model(made)


def flax_objects(depth: int) -> Step:
    """Return our `jit` of a flax nnx model; raises while they are no nodes."""
    model = models.blocks(models.nnx(), depth)
    called = ab.jit(dispatch.count)
    return Step(lambda: called(model), lambda: model.count[...])


Makers = dict[str, Callable[[], Step]]


def of_dataclasses(depth: int) -> Makers:
    """Return the call for dataclasses, which flax does not take for objects."""
    return {OURS: lambda: _ours(count, dataclass(depth))}


def of_dicts(depth: int) -> Makers:
    """Return the call for dicts and lists."""
    return models.on_nodes(
        lambda library: dispatch.count, lambda library: ((in_dicts(library, depth),), ())
    )


def of_flax(depth: int) -> Makers:
    """Return the call for flax nnx objects, ours included."""
    makers = models.on_nodes(
        lambda library: dispatch.count, lambda library: dispatch.one_model(library, depth)
    )
    return {**makers, OURS: lambda: flax_objects(depth)}


CASES: dict[str, Callable[[int], Makers]] = {
    "dataclasses": of_dataclasses,
    "dicts and lists in a module": of_dicts,
    "flax nnx objects": of_flax,
}
