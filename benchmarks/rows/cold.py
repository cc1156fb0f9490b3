"""Row 6: operations on objects and States outside of a compiled call, per leaf.

Bare JAX does what comes closest on a nested dict of the same arrays: flatten it (for `split` and
`state`, with paths), build it (for `merge` and `update`), map the identity over it (for `clone`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, EQUINOX, NNX, NNX_TREE, OURS, Effort, Line, Step, compare
from benchmarks.rows import dispatch

DEPTHS = (5, 100)


def lines(effort: Effort, depths: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    for depth in depths or effort.pick(DEPTHS[1:], DEPTHS):
        leaves = 1 + 6 * depth
        for case, operation in OPERATIONS.items():
            makers = operation(depth)
            yield compare(6, f"{case}, per leaf", leaves, makers, effort, per=leaves)
        for case, makers in (
            ("jax.jit of a State, whole call", state_call(depth)),
            ("jax.tree.map over a State, whole", state_map(depth, 1)),
            ("jax.tree.map over three States, whole", state_map(depth, 3)),
        ):
            yield compare(6, case, leaves, makers, effort)


def nested(depth: int) -> Any:
    """Return the arrays of a model in dicts and lists."""
    count, *leaves = models.leaves_of(depth)
    names = ("scale", "bias", "mean", "var")
    blocks = [
        {
            "linear": dict(zip("wb", leaves[i : i + 2], strict=True)),
            "norm": dict(zip(names, leaves[i + 2 : i + 6], strict=True)),
        }
        for i in range(0, len(leaves), 6)
    ]
    return {"count": count, "blocks": blocks}


Operation = Callable[[int], dict[str, Callable[[], Step]]]


def _operation(
    make: Callable[[Any, Any, dict[str, Any]], Callable[[], Any]],
    bare: Callable[[Any], Callable[[], Any]],
    eqx: Callable[[Any, Any], Callable[[], Any]] | None = None,
) -> Operation:
    """Return the makers of one operation, given how each library does it.

    Arguments:
        make: from a package, a model and its options to what is timed.
        bare: the same for a nested dict.
        eqx: the same for equinox and its model.
    """

    def makers(depth: int) -> dict[str, Callable[[], Step]]:
        found: dict[str, Callable[[], Step]] = {
            OURS: lambda: Step(make(ab, models.blocks(models.ours(), depth), {})),
            BARE: lambda: Step(bare(nested(depth))),
            NNX: lambda: Step(make(models.flax_nnx(), models.blocks(models.nnx(), depth), {})),
            NNX_TREE: lambda: Step(
                make(models.flax_nnx(), models.blocks(models.nnx(), depth), {"graph": False})
            ),
        }
        if eqx is not None:
            found[EQUINOX] = lambda: Step(eqx(models.equinox(), dispatch.equinox_model(depth)))
        return found

    return makers


def _merge(package: Any, model: Any, options: dict[str, Any]) -> Callable[[], Any]:
    parts = package.split(model, **options)
    return lambda: package.merge(*parts)


def _update(package: Any, model: Any, options: dict[str, Any]) -> Callable[[], Any]:
    state = package.state(model, **options)
    return lambda: package.update(model, state)


def _combine(eqx: Any, model: Any) -> Callable[[], Any]:
    parts = eqx.partition(model, eqx.is_array)
    return lambda: eqx.combine(*parts)


def _unflatten(tree: Any) -> Callable[[], Any]:
    leaves, treedef = jax.tree.flatten(tree)
    return lambda: jax.tree.unflatten(treedef, leaves)


OPERATIONS: dict[str, Operation] = {
    "split": _operation(
        lambda package, model, options: lambda: package.split(model, **options),
        lambda tree: lambda: jax.tree.flatten(tree),
        lambda eqx, model: lambda: eqx.partition(model, eqx.is_array),
    ),
    "split, two filters": _operation(
        lambda package, model, options: lambda: package.split(model, package.Param, ..., **options),
        lambda tree: lambda: jax.tree.flatten(tree),
    ),
    "merge": _operation(_merge, _unflatten, _combine),
    "update": _operation(_update, _unflatten),
    "state": _operation(
        lambda package, model, options: lambda: package.state(model, **options),
        lambda tree: lambda: jax.tree.flatten_with_path(tree),
    ),
    "state, one filter": _operation(
        lambda package, model, options: lambda: package.state(model, package.Param, **options),
        lambda tree: lambda: jax.tree.flatten_with_path(tree),
    ),
    "clone": _operation(
        lambda package, model, options: lambda: package.clone(model, **options),
        lambda tree: lambda: jax.tree.map(lambda x: x, tree),
        lambda eqx, model: lambda: jax.tree.map(lambda x: x, model),
    ),
}


def _first(tree: Any) -> Any:
    return jax.tree.leaves(tree)[0].sum() + 1


def _called(argument: Any) -> Step:
    called = jax.jit(_first)
    result: list[Any] = [None]

    def call() -> None:
        result[0] = called(argument)

    return Step(call, lambda: result[0])


def state_call(depth: int) -> dict[str, Callable[[], Step]]:
    """Return calls of `jax.jit` with a State, against a tuple of its arrays."""
    return {
        OURS: lambda: _called(ab.state(models.blocks(models.ours(), depth))),
        BARE: lambda: _called(ab.state(models.blocks(models.ours(), depth)).leaves),
        NNX: lambda: _called(models.flax_nnx().state(models.blocks(models.nnx(), depth))),
        NNX_TREE: lambda: _called(
            models.flax_nnx().state(models.blocks(models.nnx(), depth), graph=False)
        ),
    }


def state_map(depth: int, count: int) -> dict[str, Callable[[], Step]]:
    """Return `jax.tree.map` over States, against tuples of their arrays."""

    def mapped(tree: Any) -> Step:
        return Step(lambda: jax.tree.map(_last, *[tree] * count))

    return {
        OURS: lambda: mapped(ab.state(models.blocks(models.ours(), depth))),
        BARE: lambda: mapped(ab.state(models.blocks(models.ours(), depth)).leaves),
        NNX: lambda: mapped(models.flax_nnx().state(models.blocks(models.nnx(), depth))),
    }


def _last(*leaves: jnp.ndarray) -> jnp.ndarray:
    return leaves[-1]
