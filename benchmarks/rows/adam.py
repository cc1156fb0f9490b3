"""Row 4: a whole Adam step, all parameters written, against the pure step written by hand.

The arithmetic is the same for everybody: `adam_leaf`, on every array of a network of small layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import anabranch as ab
from benchmarks import models
from benchmarks.measure import BARE, EQUINOX, OURS, Effort, Line, Step, compare
from benchmarks.models import Library

DEPTHS = (2, 5, 20, 60)
RATE, FIRST, SECOND = 1e-3, 0.9, 0.999


def lines(effort: Effort, depths: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    for depth in depths or effort.pick(DEPTHS[:3], DEPTHS):
        yield _line(depth, effort)
    for case, make in (("moments in States", with_states), ("moments in dicts", with_dicts)):
        for depth in depths or effort.pick(DEPTHS[1:2], DEPTHS):
            makers = {OURS: partial(make, depth), BARE: partial(bare, depth)}
            yield compare(4, case, 1 + 6 * depth, makers, effort)


def _line(depth: int, effort: Effort) -> Line:
    makers = models.on_nodes(stepper, lambda library: trained(library, depth))
    makers |= {BARE: partial(bare, depth), EQUINOX: partial(equinox, depth)}
    return compare(4, "moments in Variables", 1 + 6 * depth, makers, effort)


def adam_leaf(p: Any, g: Any, m: Any, v: Any, t: Any) -> tuple[Any, Any, Any]:
    """Return the new parameter and its new moments."""
    m = FIRST * m + (1 - FIRST) * g
    v = SECOND * v + (1 - SECOND) * g * g
    corrected = jnp.sqrt(v / (1 - SECOND**t)) + 1e-8
    return p - RATE * m / (1 - FIRST**t) / corrected, m, v


def data() -> tuple[jax.Array, jax.Array]:
    """Return a batch of inputs and targets."""
    return models.array(4, models.WIDTH), models.array(4, models.WIDTH)


def trained(library: Library, depth: int) -> models.Made:
    """Return a network, its optimiser and a batch."""
    net = library.classes.net(depth)
    return (net, library.classes.adam(net)), data()


def stepper(library: Library) -> Callable[..., Any]:
    """Return the step of a library of objects."""
    value_and_grad = library.transforms.value_and_grad

    def loss_of(net: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net(x) - y) ** 2)

    def step(net: Any, adam: Any, x: Any, y: Any) -> Any:
        loss, grads = value_and_grad(loss_of)(net, x, y)
        adam.count[...] += 1
        t = adam.count[...]
        params = models.params_of(net)
        flat = jax.tree.leaves(grads)
        # both libraries may order the leaves of a layer by name: b, w
        if flat[0].ndim < params[0][...].ndim:
            flat = [g for i in range(0, len(flat), 2) for g in (flat[i + 1], flat[i])]
        for p, g, m, v in zip(params, flat, adam.first, adam.second, strict=True):
            p[...], m[...], v[...] = adam_leaf(p[...], g, m[...], v[...], t)
        return loss

    return step


def pure_step(params: Any, first: Any, second: Any, t: Any, x: Any, y: Any) -> Any:
    """Return the new parameters, moments and count, and the loss."""

    def loss_of(params: Any) -> Any:
        out = x
        for w, b in params:
            out = jnp.tanh(out @ w + b)
        return jnp.mean((out - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    t = t + 1
    treedef = jax.tree.structure(params)
    trees = (params, grads, first, second)
    flat = [adam_leaf(*leaves, t) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
    new = [jax.tree.unflatten(treedef, [leaf[i] for leaf in flat]) for i in range(3)]
    return (*new, t, loss)


def pure_state(depth: int) -> list[Any]:
    """Return parameters, moments and count as flat pytrees."""
    width = models.WIDTH
    params = [(models.array(width, width), models.array(width)) for _ in range(depth)]
    zeros = jax.tree.map(jnp.zeros_like, params)
    return [params, zeros, jax.tree.map(jnp.copy, zeros), jnp.array(0)]


def bare(depth: int) -> Step:
    """Return the pure step, with tuples of arrays."""
    called = jax.jit(pure_step)
    state, (x, y) = pure_state(depth), data()

    def call() -> None:
        *state[:], _ = called(*state, x, y)

    return Step(call, lambda: state)


def equinox(depth: int) -> Step:
    """Return the pure step, with equinox modules for layers."""
    eqx = models.equinox()

    class Linear(eqx.Module):
        w: Any
        b: Any

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.w + self.b)

    class Net(eqx.Module):
        layers: Any

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    def step(net: Any, first: Any, second: Any, t: Any, x: Any, y: Any) -> Any:
        def loss_of(net: Any) -> Any:
            return jnp.mean((net(x) - y) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_of)(net)
        t = t + 1
        treedef = jax.tree.structure(net)
        trees = (net, grads, first, second)
        flat = [adam_leaf(*leaves, t) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
        new = [jax.tree.unflatten(treedef, [leaf[i] for leaf in flat]) for i in range(3)]
        return (*new, t, loss)

    params, _, _, t = pure_state(depth)
    net = Net([Linear(*layer) for layer in params])
    zeros = jax.tree.map(jnp.zeros_like, net)
    called = eqx.filter_jit(step)
    state, (x, y) = [net, zeros, zeros, t], data()

    def call() -> None:
        *state[:], _ = called(*state, x, y)

    return Step(call, lambda: jax.tree.leaves(state))


class StateAdam(ab.Module):
    """The optimiser with moments in two States, as one writes it with `jax.tree.map`."""

    def __init__(self, net: Any) -> None:
        self.first = jax.tree.map(jnp.zeros_like, ab.state(net, ab.Param))
        self.second = jax.tree.map(jnp.zeros_like, self.first)
        self.count = jnp.array(0)


def state_step(net: Any, adam: StateAdam, x: Any, y: Any) -> Any:
    """Take one step with States."""
    loss, grads = ab.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
    adam.count += 1
    params = ab.state(net, ab.Param)
    moved = jax.tree.map(
        lambda *leaves: adam_leaf(*leaves, adam.count), params, grads, adam.first, adam.second
    )
    new, adam.first, adam.second = jax.tree.transpose(
        jax.tree.structure(params), jax.tree.structure((0, 0, 0)), moved
    )
    ab.update(net, new)
    return loss


def with_states(depth: int) -> Step:
    """Return our step with the moments in States."""
    net = models.ours().classes.net(depth)
    adam, (x, y) = StateAdam(net), data()
    called = ab.jit(state_step)
    return Step(lambda: called(net, adam, x, y), lambda: adam.count)


class DictAdam(ab.Module):
    """The parameters and the moments in dicts, which every step replaces by new ones."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.first, self.second = ({k: jnp.zeros_like(p) for k, p in params.items()} for _ in "12")
        self.count = jnp.array(0)


def dict_step(adam: DictAdam, x: Any, y: Any) -> Any:
    """Take one step with dicts."""

    def loss_of(params: Any) -> Any:
        out = x
        for i in range(len(params) // 2):
            out = jnp.tanh(out @ params[f"w{i:03}"] + params[f"b{i:03}"])
        return jnp.mean((out - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(adam.params)
    adam.count += 1
    trees = adam.params, grads, adam.first, adam.second
    moved = jax.tree.map(lambda *leaves: adam_leaf(*leaves, adam.count), *trees)
    adam.params, adam.first, adam.second = jax.tree.transpose(
        jax.tree.structure(adam.params), jax.tree.structure((0, 0, 0)), moved
    )
    return loss


def with_dicts(depth: int) -> Step:
    """Return our step with everything in dicts."""
    layers, _, _, _ = pure_state(depth)
    weights = {f"w{i:03}": w for i, (w, _) in enumerate(layers)}
    adam = DictAdam({f"b{i:03}": b for i, (_, b) in enumerate(layers)} | weights)
    (x, y), called = data(), ab.jit(dict_step)
    return Step(lambda: called(adam, x, y), lambda: adam.count)
