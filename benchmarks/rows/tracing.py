"""Row 5: tracing, and the time from a new function to its first result.

Every call makes a new function, inner ones included, as JAX and anabranch keep what they have
traced. Both sides then trace the same
operations; what differs is what the objects cost, and that our frames make the Python stack deeper:
JAX records it for every operation.

How deep the stack is when a trace begins decides where a chunk of the memory for frames ends, and
that may decide about a third of the time. So every call begins some frames deeper than the last.

A trace leaves hundreds of thousands of objects, and a collection of all of them takes as long as a
quarter of a large trace. Whether one falls due during a call depends on what the other contestants
have left; so every call begins right after one, and pays for those that it makes necessary itself.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, NNX, NNX_TREE, OURS, Effort, Line, Step, compare
from benchmarks.models import Library
from benchmarks.rows import adam

LAYERS = 24
FRAMES = range(0, 26, 2)


class Program(NamedTuple):
    """One function in both forms."""

    case: str
    size: int
    function: Callable[[Library], Callable[..., Any]]
    make: Callable[[Library], models.Made]
    bare: Callable[..., Any]
    bare_arguments: Callable[[], tuple[Any, ...]]


def lines(effort: Effort, programs: list[Program] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    for program in programs or PROGRAMS[1 if effort.quick else 0 :]:
        for what, use in (("trace", trace), ("first result", first_result)):
            yield compare(
                5,
                f"{what}: {program.case}",
                program.size,
                _makers(program, use),
                effort,
                unit="ms",
                slow=True,
            )


def trace(jit: Callable[[Any], Any], function: Any, arguments: tuple[Any, ...]) -> None:
    """Trace."""
    jit(lambda *a: function(*a)).trace(*arguments)  # noqa: PLW0108


def first_result(jit: Callable[[Any], Any], function: Any, arguments: tuple[Any, ...]) -> None:
    """Trace, compile and run."""
    jax.block_until_ready(jit(lambda *a: function(*a))(*arguments))  # noqa: PLW0108


def _at_all_depths(call: Callable[[], None]) -> Step:
    frames = itertools.cycle(FRAMES)
    return Step(lambda: _below(next(frames), call), before=gc.collect)


def _below(frames: int, call: Callable[[], None]) -> None:
    if frames:
        _below(frames - 1, call)
    else:
        call()


def _makers(program: Program, use: Callable[..., None]) -> dict[str, Callable[[], Step]]:
    def objects(library: Library, jit: Callable[[Any], Any]) -> Step:
        nodes, rest = program.make(library)
        return _at_all_depths(lambda: use(jit, program.function(library), (*nodes, *rest)))

    def bare() -> Step:
        arguments = program.bare_arguments()
        return _at_all_depths(lambda: use(jax.jit, program.bare, arguments))

    return {
        OURS: lambda: objects(models.ours(), ab.jit),
        BARE: bare,
        NNX: lambda: objects(models.nnx(), models.flax_nnx().jit),
        NNX_TREE: lambda: objects(models.nnx(), lambda f: models.flax_nnx().jit(f, graph=False)),
    }


# -- the programs ----------------------------------------------------------------------------------


def adam_program(depth: int) -> Program:
    """Return the Adam step."""
    return Program(
        "Adam step",
        1 + 6 * depth,
        adam.stepper,
        lambda library: adam.trained(library, depth),
        adam.pure_step,
        lambda: (*adam.pure_state(depth), *adam.data()),
    )


def scanned(library: Library) -> Callable[..., Any]:
    """Return a gradient step through a scan over stacked layers."""
    scan, carry = library.transforms.scan, library.transforms.Carry

    def body(x: Any, layer: Any) -> Any:
        return layer(x), None

    def loss_of(layers: Any, x: Any) -> Any:
        x, _ = scan(body, in_axes=(carry, 0), out_axes=(carry, 0))(x, layers)
        return x.sum()

    def step(layers: Any, x: Any) -> Any:
        grads = library.transforms.grad(loss_of)(layers, x)
        for v, g in zip(
            (layers.w, layers.b), sorted(jax.tree.leaves(grads), key=_rank), strict=True
        ):
            v[...] -= 0.1 * g

    return step


def _rank(x: Any) -> int:
    return -x.ndim


def bare_scanned(w: Any, b: Any, x: Any) -> Any:
    """The same by hand."""

    def body(x: Any, layer: Any) -> Any:
        w, b = layer
        return jnp.tanh(x @ w + b), None

    def loss_of(layers: Any) -> Any:
        return jax.lax.scan(body, x, layers)[0].sum()

    grads = jax.grad(loss_of)((w, b))
    return w - 0.1 * grads[0], b - 0.1 * grads[1]


def scan_program(depth: int) -> Program:
    """Return the step through a scan."""
    width = models.WIDTH
    return Program(
        f"scan of {depth} layers, grad",
        2,
        scanned,
        lambda library: ((library.classes.stacked(depth),), (models.array(4, width),)),
        bare_scanned,
        lambda: (
            models.array(depth, width, width),
            models.array(depth, width),
            models.array(4, width),
        ),
    )


def nested(library: Library) -> Callable[..., Any]:
    """Return a gradient of lanes of a checkpointed network."""
    transforms = library.transforms

    def run(net: Any, x: Any) -> Any:
        return net(x)

    def loss_of(net: Any, x: Any) -> Any:
        return transforms.vmap(transforms.remat(run), in_axes=(None, 0))(net, x).sum()

    def step(net: Any, x: Any) -> Any:
        return jax.tree.leaves(transforms.grad(loss_of)(net, x))

    return step


def bare_nested(layers: Any, x: Any) -> Any:
    """The same by hand."""

    def run(layers: Any, x: Any) -> Any:
        for w, b in layers:
            x = jnp.tanh(x @ w + b)
        return x

    def loss_of(layers: Any) -> Any:
        return jax.vmap(jax.checkpoint(run), in_axes=(None, 0))(layers, x).sum()

    return jax.grad(loss_of)(layers)


def nested_program(depth: int) -> Program:
    """Return nested transforms."""
    return Program(
        "grad of vmap of remat",
        2 * depth,
        nested,
        lambda library: ((library.classes.net(depth),), (models.array(4, models.WIDTH),)),
        bare_nested,
        lambda: (adam.pure_state(depth)[0], models.array(4, models.WIDTH)),
    )


PROGRAMS = [
    adam_program(60),
    adam_program(20),
    scan_program(LAYERS),
    nested_program(4),
    nested_program(20),
]
