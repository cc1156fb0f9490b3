"""Row 3: calls with several objects, in the ways that they can be passed.

Four leaves are written: a counter of the model, one of the optimiser, and two metrics.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, NNX, NNX_TREE, OURS, Absent, Effort, Line, Step, compare
from benchmarks.models import Library

DEPTHS = (1, 5, 20)


def lines(effort: Effort, depths: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    for depth in depths or effort.pick(DEPTHS[:2], DEPTHS):
        size = sum(map(len, flat(depth))) + 1
        for case, makers in {FIRST: by_position(depth), **_ways(depth)}.items():
            makers[BARE] = partial(bare, depth)
            yield compare(3, case, size, makers, effort)


Makers = dict[str, Callable[[], Step]]
FIRST = "model, optimiser, metrics, batch"


def by_position(depth: int) -> Makers:
    """Return the ordinary call."""
    return models.on_nodes(
        lambda library: step, lambda library: (objects(library, depth), (batch(),))
    )


def _ways(depth: int) -> dict[str, Makers]:
    def make(call: Any, library: Library, jit: Any) -> Step:
        return call(library, jit, objects(library, depth), (batch(),))

    return {
        case: {
            OURS: lambda call=call: make(call, models.ours(), ab.jit),
            NNX: lambda call=call: make(call, models.nnx(), _nnx_jit()),
            NNX_TREE: lambda call=call: make(call, models.nnx(), _nnx_jit(graph=False)),
        }
        for case, call in WAYS.items()
    }


def batch() -> jax.Array:
    """Return one batch."""
    return models.array(4, models.WIDTH)


def objects(library: Library, depth: int) -> tuple[Any, Any, Any]:
    """Return a model, an optimiser for some of it, and metrics."""
    classes = library.classes
    return models.blocks(library, depth), classes.adam(classes.net(depth)), classes.metrics()


def step(model: Any, optimiser: Any, metrics: Any, batch: Any) -> Any:
    """Write four leaves."""
    model.count[...] += 1
    optimiser.count[...] += 1
    total = batch.sum()
    metrics.total[...] += total
    metrics.seen[...] += 1
    return total


def flat(depth: int) -> tuple[list[Any], ...]:
    """Return the leaves of the objects as lists."""
    moments = [models.array(models.WIDTH, models.WIDTH), models.array(models.WIDTH)] * 2 * depth
    return models.leaves_of(depth), [jnp.array(0), *moments], [jnp.array(0.0), jnp.array(0)]


def bare(depth: int) -> Step:
    """Return the step on flat leaves."""
    parts, data = flat(depth), batch()
    leaves = [x for part in parts for x in part]
    written = [0, len(parts[0]), len(leaves) - 2, len(leaves) - 1]

    def function(*arguments: Any) -> Any:
        model, optimiser, metric, seen = [arguments[i] for i in written]
        total = arguments[-1].sum()
        return model + 1, optimiser + 1, metric + total, seen + 1, total

    called = jax.jit(function)

    def call() -> Any:
        *new, total = called(*leaves, data)
        for i, leaf in zip(written, new, strict=True):
            leaves[i] = leaf
        return total

    return Step(call, lambda: leaves[0])


def _nnx_jit(**options: Any) -> Callable[..., Any]:
    module = models.flax_nnx()
    return lambda f, **more: module.jit(f, **options, **more)


# From a library, its `jit`, the objects and the other arguments to a step.


def by_keyword(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass everything by keyword."""
    called = jit(step)
    model, optimiser, metrics = nodes
    (data,) = rest
    return Step(
        lambda: called(model=model, optimiser=optimiser, metrics=metrics, batch=data),
        lambda: model.count[...],
    )


def in_pytree(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass everything in one nested container."""
    called = jit(lambda tree: step(tree["net"][0], *tree["rest"]))
    model, optimiser, metrics = nodes
    tree = {"net": (model,), "rest": (optimiser, metrics, *rest)}
    return Step(lambda: called(tree), lambda: model.count[...])


def method(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Call a method that was wrapped in the class body."""
    model, optimiser, metrics = nodes
    (data,) = rest

    class Trainer(library.module):
        def __init__(self) -> None:
            self.model, self.optimiser, self.metrics = model, optimiser, metrics

        @jit
        def step(self, data: Any) -> Any:
            return step(self.model, self.optimiser, self.metrics, data)

    trainer = Trainer()
    return Step(lambda: trainer.step(data), lambda: model.count[...])


def static(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass a static argument too."""

    def function(model: Any, optimiser: Any, metrics: Any, batch: Any, mode: str) -> Any:
        if mode != "train":
            raise Absent("not the mode that was passed")
        return step(model, optimiser, metrics, batch)

    called = jit(function, static_argnums=4)
    return Step(lambda: called(*nodes, *rest, "train"), lambda: nodes[0].count[...])


def captured(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Capture the objects in a closure."""
    model, optimiser, metrics = nodes
    (data,) = rest
    called = jit(lambda data: step(model, optimiser, metrics, data))
    return Step(lambda: called(data), lambda: model.count[...])


def captured_in_containers(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Capture a list of the objects, and a dict of functions."""
    held, functions = [*nodes], {"step": step, "loss": lambda total: total}
    (data,) = rest
    called = jit(lambda data: functions["loss"](functions["step"](*held, data)))
    return Step(lambda: called(data), lambda: nodes[0].count[...])


def with_a_part(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass a Variable of the model, too, and the list of its blocks."""

    def function(count: Any, blocks: Any, *more: Any) -> Any:
        count[...] += 1
        more[1].count[...] += 1
        total = more[-1].sum() + 0 * len(blocks)
        more[2].total[...] += total
        more[2].seen[...] += 1
        return total

    called = jit(function)
    model = nodes[0]
    return Step(lambda: called(model.count, model.blocks, *nodes, *rest), lambda: model.count[...])


def in_turn(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Call two functions in turn that share the model, and have optimisers of their own."""
    model, optimiser, metrics = nodes
    calls = [
        partial(jit(function), model, own, metrics, *rest)
        for function, own in ((step, optimiser), (_other_step, copy.deepcopy(optimiser)))
    ]
    turn = itertools.cycle(calls)

    def call() -> Any:
        return next(turn)()

    return Step(call, lambda: model.count[...])


def _other_step(*arguments: Any) -> Any:
    return step(*arguments)


def metrics_in_a_dict(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass the batch in a dict, and return a dict."""

    def function(model: Any, optimiser: Any, metrics: Any, batch: Any) -> Any:
        return {"loss": step(model, optimiser, metrics, batch["x"])}

    called = jit(function)
    (data,) = rest
    return Step(lambda: called(*nodes, {"x": data})["loss"], lambda: nodes[0].count[...])


class Moments(NamedTuple):
    """The state of an optimiser as optax keeps it."""

    count: Any
    first: Any
    second: Any


def in_named_tuples(library: Library, jit: Any, nodes: Any, rest: Any) -> Step:
    """Pass the optimiser as a tree of named tuples and States, and return the next one."""
    model, optimiser, metrics = nodes

    def function(model: Any, state: Any, metrics: Any, batch: Any) -> Any:
        (moments,) = state
        model.count[...] += 1
        total = batch.sum()
        metrics.total[...] += total
        metrics.seen[...] += 1
        return (moments._replace(count=moments.count + 1),), total

    called = jit(function)
    if library is not models.ours():
        raise Absent("a State of flax is another one")
    first, second = (
        ab.State.from_dict({str(i): v[...] for i, v in enumerate(part)})
        for part in (optimiser.first, optimiser.second)
    )
    held = [(Moments(optimiser.count[...], first, second),)]

    def call() -> Any:
        held[0], total = called(model, held[0], metrics, *rest)
        return total

    return Step(call, lambda: model.count[...])


WAYS = {
    "keyword arguments": by_keyword,
    "modules in a nested pytree": in_pytree,
    "method wrapped in the class": method,
    "a static argument": static,
    "captured in a closure": captured,
    "captured in a list and a dict": captured_in_containers,
    "parts of the model, too": with_a_part,
    "two functions in turn": in_turn,
    "a batch and metrics in dicts": metrics_in_a_dict,
    "an optimiser in named tuples": in_named_tuples,
}
