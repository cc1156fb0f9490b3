"""Row 7: what grows with the number of leaves, and with the number of variants of a function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, NNX, NNX_TREE, OURS, Absent, Effort, Line, Step, compare
from benchmarks.models import Library

_WARM = 4  # calls of each variant: the first ones compile, and make what later ones use
SIZES = (100, 1_000, 10_000, 100_000)
VARIANTS = 400


def lines(
    effort: Effort, sizes: tuple[int, ...] | None = None, variants: int | None = None
) -> Iterator[Line]:
    """Yield the lines of the row."""
    sizes = sizes or effort.pick(SIZES[:3], SIZES)
    for case in ("split", "merge", "update", "state"):
        for size in sizes:
            yield compare(7, case, size, _makers(case, size), effort, unit="ms")
    for size in sizes:
        if size <= effort.pick(1_000, 10_000):
            yield compare(7, "call, one leaf written", size, _calls(size), effort, unit="ms")
    count = variants or effort.pick(40, VARIANTS)
    for case, make in (
        ("call, variants by a static argument", by_argument),
        ("call, variants by an attribute", by_attribute),
    ):
        yield compare(7, case, count, make(count), effort)


def many(library: Library, size: int) -> Any:
    """Return a model of as many leaves, ten in each module."""

    class Ten(library.module):
        def __init__(self, arrays: list[Any]) -> None:
            for i, array in enumerate(arrays):
                setattr(self, f"p{i}", library.param(array))

    arrays = jax.device_put([np.float32(i) for i in range(size - 1)])
    return library.classes.model([Ten(arrays[i : i + 10]) for i in range(0, size - 1, 10)])


def _makers(case: str, size: int) -> dict[str, Callable[[], Step]]:
    def objects(package: Any, library: Library) -> Step:
        model = many(library, size)
        if case in ("split", "state"):
            return Step(lambda: getattr(package, case)(model))
        graphdef, state = package.split(model)
        if case == "merge":
            return Step(lambda: package.merge(graphdef, state))
        return Step(lambda: package.update(model, state))

    def bare() -> Step:
        arrays = jax.device_put([np.float32(i) for i in range(size)])
        tree = [arrays[0], [arrays[i : i + 10] for i in range(1, size, 10)]]
        if case in ("split", "state"):
            return Step(lambda: jax.tree.flatten(tree))
        leaves, treedef = jax.tree.flatten(tree)
        return Step(lambda: jax.tree.unflatten(treedef, leaves))

    return {
        OURS: lambda: objects(ab, models.ours()),
        BARE: bare,
        NNX: lambda: objects(*_flax(size, 10_000)),
    }


def _flax(size: int, limit: int) -> tuple[Any, Library]:
    if size > limit:
        raise Absent(f"not measured beyond {limit:,} leaves: it takes too long")
    return models.flax_nnx(), models.nnx()


def _calls(size: int) -> dict[str, Callable[[], Step]]:
    def function(model: Any) -> None:
        model.count[...] += 1

    def make(library: Library) -> models.Made:
        _flax(size, models.FEW if library is not models.ours() else size)
        return (many(library, size),), ()

    def bare() -> Step:
        arrays = jax.device_put([np.int32(i) for i in range(size)])
        return models.on_leaves(lambda *leaves: leaves[0] + 1, arrays)

    makers = models.on_nodes(lambda library: function, make)
    return {name: makers[name] for name in (OURS, NNX, NNX_TREE)} | {BARE: bare}


# -- variants --------------------------------------------------------------------------------------


def _write(model: Any, k: int) -> None:
    model.count[...] += k


def by_argument(count: int) -> dict[str, Callable[[], Step]]:
    """Return calls whose static argument takes `count` values in turn, all of them compiled."""

    def objects(library: Library, jit: Any) -> Step:
        model = models.blocks(library, 1)
        called = jit(_write, static_argnums=1)
        return _in_turn(count, lambda k: called(model, k), lambda: model.count[...])

    def bare() -> Step:
        leaves = models.leaves_of(1)
        called = jax.jit(lambda k, *leaves: leaves[0] + k, static_argnums=0)

        def call(k: int) -> None:
            leaves[0] = called(k, *leaves)

        return _in_turn(count, call, lambda: leaves[0])

    return {
        OURS: lambda: objects(models.ours(), ab.jit),
        BARE: bare,
        NNX: lambda: objects(models.nnx(), models.flax_nnx().jit),
        NNX_TREE: lambda: objects(models.nnx(), _tree_jit),
    }


def by_attribute(count: int) -> dict[str, Callable[[], Step]]:
    """Return calls with as many models, each with another static attribute; all are compiled."""

    def function(model: Any) -> None:
        _write(model, model.k)

    def objects(library: Library, jit: Any) -> Step:
        made = [models.blocks(library, 1) for _ in range(count)]
        for k, model in enumerate(made):
            model.k = k
        called = jit(function)
        return _in_turn(count, lambda k: called(made[k]), lambda: made[0].count[...])

    return {
        OURS: lambda: objects(models.ours(), ab.jit),
        BARE: by_argument(count)[BARE],
        NNX: lambda: objects(models.nnx(), models.flax_nnx().jit),
        NNX_TREE: lambda: objects(models.nnx(), _tree_jit),
    }


def _tree_jit(function: Any, **options: Any) -> Any:
    return models.flax_nnx().jit(function, graph=False, **options)


def _in_turn(count: int, call: Callable[[int], Any], pending: Callable[[], Any]) -> Step:
    for k in (*range(count),) * _WARM:
        call(k)
    turn = itertools.cycle(range(count))
    return Step(lambda: call(next(turn)), pending)
