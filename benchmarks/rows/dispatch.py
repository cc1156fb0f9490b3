"""Row 1: a call that writes one integer leaf of a model, by the size of the model.

Bare JAX is a function of the flat leaves that returns the one written. Equinox has no writes:
its function returns the new leaf, and nobody puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks import models
from benchmarks.measure import BARE, EQUINOX, Effort, Line, Step, compare
from benchmarks.models import Library

DEPTHS = (1, 5, 20, 100, 500)  # 7, 31, 121, 601, 3,001 leaves


def lines(effort: Effort, depths: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    for elsewhere in (False, True):
        for depth in depths or effort.pick(DEPTHS[:4], DEPTHS):
            yield _line(depth, effort, elsewhere=elsewhere)


def _line(depth: int, effort: Effort, *, elsewhere: bool) -> Line:
    makers = models.on_nodes(
        lambda library: count,
        lambda library: one_model(library, depth),
        after=writes_elsewhere if elsewhere else None,
    )
    makers[BARE] = lambda: bare(depth, elsewhere=elsewhere)
    makers[EQUINOX] = lambda: equinox(depth)
    case = "and another module written" if elsewhere else "one leaf written"
    return compare(1, case, 1 + 6 * depth, makers, effort)


def count(model: Any) -> None:
    """Write one integer leaf."""
    model.count[...] += 1


def one_model(library: Library, depth: int) -> models.Made:
    """Return a model as the only argument."""
    return (models.blocks(library, depth),), ()


def writes_elsewhere(library: Library) -> Callable[[], None]:
    """Return what sets an attribute of an unrelated module."""
    other = library.classes.holder()

    def write() -> None:
        other.tag = 1 - other.tag

    return write


class _Plain:
    tag = 0


def bare(depth: int, *, elsewhere: bool = False) -> Step:
    """Return the step on flat leaves."""
    step = models.on_leaves(lambda *leaves: leaves[0] + 1, models.leaves_of(depth))
    if not elsewhere:
        return step
    other, call = _Plain(), step.call

    def both() -> None:
        call()
        other.tag = 1 - other.tag

    return step._replace(call=both)


def equinox(depth: int) -> Step:
    """Return the step of equinox."""
    eqx = models.equinox()
    model = equinox_model(depth)
    called = eqx.filter_jit(lambda model: model.count + 1)
    result: list[Any] = [None]

    def call() -> None:
        result[0] = called(model)

    return Step(call, lambda: result[0])


def equinox_model(depth: int) -> Any:
    """Return the same model as equinox modules."""
    eqx = models.equinox()
    array, width = models.array, models.WIDTH

    class Linear(eqx.Module):
        w: Any
        b: Any

    class BatchNorm(eqx.Module):
        scale: Any
        bias: Any
        mean: Any
        var: Any

    class Block(eqx.Module):
        linear: Any
        norm: Any

    class Model(eqx.Module):
        count: Any
        blocks: Any

    def block() -> Any:
        norm = BatchNorm(*[array(width) for _ in range(4)])
        return Block(Linear(array(width, width), array(width)), norm)

    return Model(jnp.array(0), [block() for _ in range(depth)])
