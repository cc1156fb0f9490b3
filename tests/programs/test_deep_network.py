"""Scan over layers, inside remat, inside grad, inside jit: dropout and running statistics.

Beside it is the same training in plain JAX: Python loops over lists of arrays.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms

LAYERS, WIDTH, BATCH, STEPS = 3, 4, 5, 2


class Layer(ab.Module):
    def __init__(self, rngs):
        self.w = ab.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 2)
        self.mean = ab.BatchStat(jnp.zeros(WIDTH))
        self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, rngs):
        h = jnp.tanh(x @ self.w)
        self.mean.value = 0.9 * self.mean + 0.1 * h.mean(0)
        self.calls.value += 1
        keep = jax.random.bernoulli(rngs.dropout(), 0.5, h.shape)
        return jnp.where(keep, 2 * (h - self.mean), 0.0)


def make(seed=0):
    def layer(rngs):
        return Layer(rngs)

    return transforms.vmap(layer, in_axes=None, axis_size=LAYERS, rngs="split")(ab.Rngs(seed))


def plain_layer(w, mean, x, key):
    h = jnp.tanh(x @ w)
    mean = 0.9 * mean + 0.1 * h.mean(0)
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.where(keep, 2 * (h - mean), 0.0), mean


def plain_training(ws, means, key, xs):
    """Train layers that are lists of arrays; key number n is the n-th draw."""
    draws, losses = 0, []

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def differentiated(ws, means, x, keys):
        after = []
        for w, mean, k in zip(ws, means, keys, strict=True):
            x, mean = plain_layer(w, mean, x, k)
            after.append(mean)
        return (x**2).mean(), after

    for x in xs:
        keys = [jax.random.fold_in(key, draws + i) for i in range(LAYERS)]
        draws += LAYERS
        (value, means), grads = differentiated(ws, means, x, keys)
        ws = [w - 0.5 * g for w, g in zip(ws, grads, strict=True)]
        losses.append(value)
    return jnp.stack(ws), jnp.stack(means), jnp.stack(losses)


def forward_remat_in_scan(stack, rngs, x, note):
    @transforms.remat
    def layer(h, block, rngs):
        note()
        return block(h, rngs), None

    return transforms.scan(layer, in_axes=(ab.Carry, 0, None))(x, stack, rngs)[0]


def forward_scan_in_remat(stack, rngs, x, note):
    def layer(h, block, rngs):
        note()
        return block(h, rngs), None

    @transforms.remat
    def all_layers(stack, rngs, x):
        return transforms.scan(layer, in_axes=(ab.Carry, 0, None))(x, stack, rngs)[0]

    return all_layers(stack, rngs, x)


def forward_scan(stack, rngs, x, note):
    def layer(h, block, rngs):
        note()
        return block(h, rngs), None

    return transforms.scan(layer, in_axes=(ab.Carry, 0, None))(x, stack, rngs)[0]


FORWARDS = [forward_scan, forward_remat_in_scan, forward_scan_in_remat]


@pytest.mark.parametrize("forward", FORWARDS)
def test_training_equals_the_python_loops(forward):
    traces = []

    def loss(stack, rngs, x):
        return (forward(stack, rngs, x, lambda: traces.append(1)) ** 2).mean()

    @transforms.jit
    def step(stack, rngs, x):
        value, grads = transforms.value_and_grad(loss)(stack, rngs, x)
        stack.w.value = stack.w - 0.5 * grads["w"]
        return value

    stack, rngs = make(), ab.Rngs(dropout=7)
    xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, WIDTH))
    key = rngs.dropout.key.value
    expected = plain_training([*stack.w.value], [*stack.mean.value], key, xs)
    cells = [stack.w, stack.mean, stack.calls, rngs.dropout, rngs.dropout.count]
    losses = [step(stack, rngs, x) for x in xs]

    after = [stack.w, stack.mean, stack.calls, rngs.dropout, rngs.dropout.count]
    assert all(a is b for a, b in zip(cells, after, strict=True))
    found = stack.w.value, stack.mean.value, jnp.stack(losses)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert stack.calls.value.tolist() == [STEPS] * LAYERS
    assert rngs.dropout.key.value is key
    assert int(rngs.dropout.count) == LAYERS * STEPS
    assert len(traces) == 1


def test_the_masks_of_both_passes_agree():
    """A gradient of the sum is the mask times what the layer does; a second mask would show."""

    @transforms.remat
    def drop(x, rngs):
        keep = jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)
        return jnp.where(keep, jnp.sin(x), 0.0), keep

    def loss(x, rngs):
        def step(x, _, rngs):
            return drop(x, rngs)

        x, masks = transforms.scan(step, in_axes=(ab.Carry, None, None), length=4)(x, None, rngs)
        return x.sum(), masks

    x, rngs = jnp.linspace(0.1, 1.0, 16), ab.Rngs(dropout=0)
    gradients, masks = transforms.jit(transforms.grad(loss, has_aux=True))(x, rngs)
    assert masks.shape == (4, 16)
    assert len({tuple(mask) for mask in masks.tolist()}) == 4

    expected, h = jnp.ones(16), x
    for mask in masks:
        expected = expected * jnp.where(mask, jnp.cos(h), 0.0)
        h = jnp.where(mask, jnp.sin(h), 0.0)
    np.testing.assert_allclose(gradients, expected, rtol=1e-5)


def test_a_failure_three_levels_down_changes_nothing():
    def loss(stack, rngs, x):
        def layer(h, block, rngs):
            block.extra = ab.Variable(jnp.zeros(()))
            h = block(h, rngs)
            raise RuntimeError("layer")

        return transforms.remat(transforms.scan(layer, in_axes=(ab.Carry, 0, None)))(
            x, stack, rngs
        )[0].sum()

    stack, rngs = make(), ab.Rngs(dropout=7)
    before = ab.graphdef((stack, rngs))
    values = [stack.w.value, stack.mean.value, rngs.dropout.count.value]
    with pytest.raises(RuntimeError, match="layer"):
        transforms.jit(transforms.grad(loss))(stack, rngs, jnp.ones((BATCH, WIDTH)))
    assert ab.graphdef((stack, rngs)) is before
    after = [stack.w.value, stack.mean.value, rngs.dropout.count.value]
    assert all(a is b for a, b in zip(values, after, strict=True))


def test_sliced_layers_may_share_a_module_that_is_broadcast():
    """All layers hold one counter; the axis of the counter is None, that of the weights 0."""

    class Shared(ab.Module):
        def __init__(self, ws):
            self.w = ab.Param(ws)
            self.total = ab.BatchStat(jnp.zeros(()))

    def loss(m, x):
        @transforms.remat
        def layer(h, m):
            h = jnp.sin(h * m.w)
            m.total.value = m.total + h
            return h, m.total * 1

        axes = ab.StateAxes({ab.Param: 0, ...: None})
        h, totals = transforms.scan(layer, in_axes=(ab.Carry, axes))(x, m)
        return h + m.total.value, totals

    def plain(ws, x):
        total, totals = 0.0, []
        for w in ws:
            x = jnp.sin(x * w)
            total = total + x
            totals.append(total)
        return x + total, jnp.stack(totals)

    ws = jnp.array([0.5, 1.0, 1.5])
    m = Shared(ws)
    grads, totals = transforms.jit(transforms.grad(loss, has_aux=True))(m, 0.7)
    expected, expected_totals = jax.grad(plain, has_aux=True)(ws, 0.7)
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-6)
    np.testing.assert_allclose(m.total.value, expected_totals[-1], rtol=1e-6)
    assert m.w.value is ws
