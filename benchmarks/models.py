"""The models that are measured, written once for anabranch and flax nnx, whose classes are alike.

A `Library` has what the models need of either. Blocks of a linear layer and a batch-norm have six
leaves; with one counter a model has 1 + 6 * depth of them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from benchmarks.measure import (
    NNX,
    NNX_CACHED,
    NNX_PARTIAL,
    NNX_TREE,
    OURS,
    Absent,
    Step,
)

WIDTH = 8
FEW = 700  # leaves: what walks in Python on every call gets slow beyond


class Library(NamedTuple):
    """What a model is made of."""

    module: Any
    variable: Any
    param: Any
    batch_stat: Any
    list_of: Callable[[list[Any]], Any]
    dict_of: Callable[[dict[str, Any]], Any]
    transforms: Any  # value_and_grad, grad, vmap, remat, scan, Carry
    classes: Any


@functools.cache
def ours() -> Library:
    """Return anabranch."""
    return _library(ab, list, dict)


@functools.cache
def nnx() -> Library:
    """Return flax nnx; raise `Absent` if it is not installed."""
    module = flax_nnx()
    return _library(module, module.List, module.Dict)


def flax_nnx() -> Any:
    """Import flax nnx, or raise `Absent`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from flax import nnx as module
    except ImportError:
        raise Absent("flax is not installed") from None
    if not hasattr(module, "List"):
        raise Absent("this flax is older than 0.12")
    return module


def equinox() -> Any:
    """Import equinox, or raise `Absent`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import equinox as module
    except ImportError:
        raise Absent("equinox is not installed") from None
    return module


def _library(source: Any, list_of: Any, dict_of: Any) -> Library:
    class Linear(source.Module):
        def __init__(self) -> None:
            self.w = source.Param(array(WIDTH, WIDTH))
            self.b = source.Param(array(WIDTH))

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.w[...] + self.b[...])

    class BatchNorm(source.Module):
        def __init__(self) -> None:
            self.scale, self.bias = source.Param(array(WIDTH)), source.Param(array(WIDTH))
            self.mean, self.var = source.BatchStat(array(WIDTH)), source.BatchStat(array(WIDTH))

    class Block(source.Module):
        def __init__(self) -> None:
            self.linear, self.norm = Linear(), BatchNorm()

    class Model(source.Module):
        def __init__(self, blocks: list[Any]) -> None:
            self.count = source.Variable(jnp.array(0))
            self.blocks = list_of(blocks)

    class Net(source.Module):
        """Linear layers only: two leaves each."""

        def __init__(self, depth: int) -> None:
            self.layers = list_of([Linear() for _ in range(depth)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    class Adam(source.Module):
        """A first and a second moment for each Param, in the order of the layers."""

        def __init__(self, net: Any) -> None:
            arrays = [v[...] for v in params_of(net)]
            self.first = list_of([source.Variable(jnp.zeros_like(x)) for x in arrays])
            self.second = list_of([source.Variable(jnp.zeros_like(x)) for x in arrays])
            self.count = source.Variable(jnp.array(0))

    class Metrics(source.Module):
        def __init__(self) -> None:
            self.total = source.Variable(jnp.array(0.0))
            self.seen = source.Variable(jnp.array(0))

    class Holder(source.Module):
        """Anything else, to be written to."""

        def __init__(self) -> None:
            self.tag = 0

    class Stacked(source.Module):
        """The layers of a `Net`, stacked for a scan."""

        def __init__(self, depth: int) -> None:
            self.w = source.Param(array(depth, WIDTH, WIDTH))
            self.b = source.Param(array(depth, WIDTH))

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.w[...] + self.b[...])

    made: dict[str, Any] = {
        cls.__name__.lower(): cls
        for cls in (Linear, BatchNorm, Block, Model, Net, Adam, Metrics, Holder, Stacked)
    }
    return Library(
        source.Module,
        source.Variable,
        source.Param,
        source.BatchStat,
        list_of,
        dict_of,
        source,
        type("Classes", (), made),
    )


_NUMBERS = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    """Return small random numbers."""
    return jnp.asarray(_NUMBERS.normal(size=shape).astype(np.float32) * 0.1)


def blocks(library: Library, depth: int) -> Any:
    """Return a model of 1 + 6 * depth leaves."""
    return library.classes.model([library.classes.block() for _ in range(depth)])


def leaves_of(depth: int) -> list[jax.Array]:
    """Return the leaves of such a model, the counter first."""
    square, vector = (WIDTH, WIDTH), (WIDTH,)
    shapes = [square, vector, vector, vector, vector, vector] * depth
    return [jnp.array(0), *[array(*shape) for shape in shapes]]


def params_of(net: Any) -> list[Any]:
    """Return the Params of a `Net`."""
    return [v for layer in net.layers for v in (layer.w, layer.b)]


# -- how an object is passed to a compiled function ------------------------------------------------

Made = tuple[tuple[Any, ...], tuple[Any, ...]]


def on_nodes(
    function: Callable[[Library], Callable[..., Any]],
    make: Callable[[Library], Made],
    *,
    after: Callable[[Library], Callable[[], Any]] | None = None,
) -> dict[str, Callable[[], Step]]:
    """Return the makers for anabranch and the ways that flax has.

    Arguments:
        function: from a library to what is compiled.
        make: from a library to the objects and the other arguments that it is called with.
        after: from a library to what is done after each call, if there is something.
    """

    def step(library: Library, wrap: Callable[[Any, tuple[Any, ...]], Any], bound: bool) -> Step:
        nodes, rest = make(library)
        called = wrap(function(library), nodes)
        arguments = rest if bound else (*nodes, *rest)
        result: list[Any] = [None]

        def call() -> None:
            result[0] = called(*arguments)

        if after is None:
            return Step(call, lambda: (result[0], _written(nodes)))
        more = after(library)

        def both() -> None:
            result[0] = called(*arguments)
            more()

        return Step(both, lambda: (result[0], _written(nodes)))

    def flax(name: str, *arguments: Any, **options: Any) -> Any:
        module = flax_nnx()
        if not hasattr(module, name):
            raise Absent(f"this flax has no nnx.{name}")
        return getattr(module, name)(*arguments, **options)

    def tree(f: Any, nodes: Any) -> Any:
        return flax("jit", f, graph=False)

    def partial(f: Any, nodes: Any) -> Any:
        return flax("jit_partial", f, *nodes, graph=False)

    def cached(f: Any, nodes: Any) -> Any:
        return flax("cached_partial", flax("jit", f), *nodes)

    return {
        OURS: lambda: step(ours(), lambda f, nodes: ab.jit(f), False),
        NNX: lambda: step(nnx(), lambda f, nodes: flax("jit", f), False),
        NNX_TREE: lambda: step(nnx(), tree, False),
        NNX_PARTIAL: lambda: step(nnx(), partial, True),
        NNX_CACHED: lambda: step(nnx(), cached, True),
    }


def _written(nodes: tuple[Any, ...]) -> list[Any]:
    """Return an array of each object that the last call has written."""
    found: list[Any] = []
    for node in nodes:
        count = node["count"] if isinstance(node, dict) else getattr(node, "count", None)
        if count is not None:
            found.append(count if isinstance(count, jax.Array) else count[...])
    return found


def on_leaves(function: Callable[..., Any], leaves: list[Any]) -> Step:
    """Return the step of bare JAX: a function of flat leaves that returns the first one anew."""
    called = jax.jit(function)

    def call() -> None:
        leaves[0] = called(*leaves)

    return Step(call, lambda: leaves[0])
