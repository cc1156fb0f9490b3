"""Row 8: bytes and live arrays; counted, not timed.

The bytes are what the compiler reports for the compiled function.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, NNX, NNX_TREE, OURS, Effort, Line, counted
from benchmarks.models import Library
from benchmarks.rows import adam, dispatch

DROPPED = 1_000


def lines(effort: Effort, depth: int = 20, dropped: int | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    size = 1 + 6 * depth
    for case, makers in (
        ("outputs of a call that only reads", read_only(depth)),
        ("Adam step, peak", peak(depth, donate=False)),
        ("Adam step, peak, donated", peak(depth, donate=True)),
    ):
        yield counted(8, case, size, makers, effort, unit="bytes")
    count = dropped or effort.pick(100, DROPPED)
    case = f"live arrays after {count:,} models"
    yield counted(8, case, count, left(count), effort, unit="arrays")


def _jits() -> dict[str, Callable[[], tuple[Library, Any]]]:
    return {
        OURS: lambda: (models.ours(), ab.jit),
        NNX: lambda: (models.nnx(), models.flax_nnx().jit),
        NNX_TREE: lambda: (
            models.nnx(),
            lambda f, **options: models.flax_nnx().jit(f, graph=False, **options),
        ),
    }


def _analysis(jitted: Any, *arguments: Any) -> Any:
    return jitted.lower(*arguments).compile().memory_analysis()


def read_only(depth: int) -> dict[str, Callable[[], float]]:
    """Return the bytes that come out of a call that returns one number."""

    def objects(get: Callable[[], tuple[Library, Any]]) -> float:
        library, jit = get()
        net = library.classes.net(depth)
        return _analysis(jit(lambda net, x: net(x).sum()), net, adam.data()[0]).output_size_in_bytes

    def bare() -> float:
        def run(params: Any, x: Any) -> Any:
            for w, b in params:
                x = jnp.tanh(x @ w + b)
            return x.sum()

        params = adam.pure_state(depth)[0]
        return _analysis(jax.jit(run), params, adam.data()[0]).output_size_in_bytes

    return {name: lambda get=get: objects(get) for name, get in _jits().items()} | {BARE: bare}


def peak(depth: int, *, donate: bool) -> dict[str, Callable[[], float]]:
    """Return the bytes of arguments, outputs and temporaries of a step, shared ones once."""

    def objects(get: Callable[[], tuple[Library, Any]]) -> float:
        library, jit = get()
        donated = {"donate_argnums": (0, 1)} if donate else {}
        nodes, rest = adam.trained(library, depth)
        return _peak(_analysis(jit(adam.stepper(library), **donated), *nodes, *rest))

    def bare() -> float:
        donated = {"donate_argnums": (0, 1, 2, 3)} if donate else {}
        jitted = jax.jit(adam.pure_step, **donated)
        return _peak(_analysis(jitted, *adam.pure_state(depth), *adam.data()))

    return {name: lambda get=get: objects(get) for name, get in _jits().items()} | {BARE: bare}


def _peak(found: Any) -> float:
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def left(count: int) -> dict[str, Callable[[], float]]:
    """Return how many arrays stay alive after models were made, called and dropped."""

    def objects(get: Callable[[], tuple[Library, Any]]) -> float:
        library, jit = get()
        called = jit(dispatch.count)
        called(models.blocks(library, 1))
        return _left(lambda: called(models.blocks(library, 1)), count)

    def bare() -> float:
        called = jax.jit(lambda *leaves: leaves[0] + 1)
        called(*models.leaves_of(1))
        return _left(lambda: called(*models.leaves_of(1)), count)

    return {name: lambda get=get: objects(get) for name, get in _jits().items()} | {BARE: bare}


def _left(once: Callable[[], Any], count: int) -> float:
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(count):
        once()
    gc.collect()
    return len(jax.live_arrays()) - before
