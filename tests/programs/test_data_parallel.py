"""Data-parallel training on eight devices by shard_map and by pmap, against one device.

Momentum, statistics of the whole batch, and dropout whose mask is drawn for the whole batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import anabranch as ab
from anabranch import transforms

DEVICES, BATCH, STEPS = 8, 16, 2
LOCAL = BATCH // DEVICES


class Net(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.linspace(-1.0, 1.0, 6).reshape(2, 3))
        self.out = ab.Param(jnp.ones(3))
        self.tied = self.w
        self.mean = ab.BatchStat(jnp.zeros(3))

    def __call__(self, x, mask, mean):
        h = jnp.tanh(x @ self.w) + jnp.sin(x @ self.tied)
        self.mean.value = 0.5 * self.mean + 0.5 * mean(h.mean(0))
        return jnp.where(mask, h - self.mean, 0.0) @ self.out


class Trainer(ab.Module):
    """A model, its optimiser, and its random stream."""

    def __init__(self):
        self.net = Net()
        self.momentum = [ab.Variable(jnp.zeros((2, 3))), ab.Variable(jnp.zeros(3))]
        self.rngs = ab.Rngs(dropout=0)
        self.steps = ab.Variable(jnp.zeros((), jnp.int32))

    def mask(self, rows):
        mask = jax.random.bernoulli(self.rngs.dropout(), 0.7, (BATCH, 3))
        return rows(mask)

    def apply(self, grads):
        params = [self.net.w, self.net.out]
        for p, m, name in zip(params, self.momentum, ("w", "out"), strict=True):
            m.value = 0.9 * m + grads[name]
            p.value = p - 0.05 * m
        self.steps.value += 1


def step(trainer, x, y, *, mean, mean_of_grads, rows):
    mask = trainer.mask(rows)

    def loss(net, x, y):
        return mean(((net(x, mask, mean) - y) ** 2).mean())

    value, grads = transforms.value_and_grad(loss)(trainer.net, x, y)
    trainer.apply(jax.tree.map(mean_of_grads, grads))
    return value


def on_one_device(trainer, x, y):
    return step(trainer, x, y, mean=lambda v: v, mean_of_grads=lambda g: g, rows=lambda m: m)


def _mean(value):
    return jax.lax.pmean(value, "i")


def own_rows(mask):
    start = jax.lax.axis_index("i") * LOCAL
    return jax.lax.dynamic_slice_in_dim(mask, start, LOCAL)


def shard_types(trainer, x, y):
    # gradients of what is equal on all devices are summed by JAX, where types say so
    return step(trainer, x, y, mean=_mean, mean_of_grads=lambda g: g, rows=own_rows)


def shard_values(trainer, x, y):
    """The gradient of a mean of means: each device gets the part that comes from its own rows."""
    return step(trainer, x, y, mean=_mean, mean_of_grads=_mean, rows=own_rows)


MESH = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("i",))
SPECS = {"in_specs": (P(), P("i"), P("i")), "out_specs": P()}


def by_types():
    return transforms.jit(transforms.shard_map(shard_types, mesh=MESH, rngs="share", **SPECS))


def by_pmap():
    mapped = transforms.pmap(
        shard_values, axis_name="i", in_axes=(None, 0, 0), out_axes=None, rngs="share"
    )

    def call(trainer, x, y):
        return mapped(trainer, x.reshape(DEVICES, LOCAL, 2), y.reshape(DEVICES, LOCAL))

    return call


def by_values():
    options = {"mesh": MESH, "rngs": "share", "check_vma": False}
    return transforms.shard_map(shard_values, **options, **SPECS)


def by_vmap():
    options = {"axis_name": "i", "in_axes": (None, 0, 0), "out_axes": None}
    mapped = transforms.jit(transforms.vmap(shard_values, rngs="share", **options))

    def call(trainer, x, y):
        return mapped(trainer, x.reshape(DEVICES, LOCAL, 2), y.reshape(DEVICES, LOCAL))

    return call


@functools.cache
def trained_on_one_device():
    return train(transforms.jit(on_one_device))


def train(run):
    trainer = Trainer()
    x = jax.random.normal(jax.random.key(1), (BATCH, 2))
    y = jnp.sin(x).sum(1)
    cells = [node for _, node in ab.iter_nodes(trainer)]
    losses = [float(run(trainer, x, y)) for _ in range(STEPS)]
    assert all(a is b for a, (_, b) in zip(cells, ab.iter_nodes(trainer), strict=True))
    assert trainer.net.tied is trainer.net.w
    assert int(trainer.rngs.dropout.count) == int(trainer.steps) == STEPS
    net = trainer.net
    arrays = [net.w, net.out, net.mean, *trainer.momentum]
    return losses, [np.asarray(v.value) for v in arrays]


@pytest.mark.parametrize("make", [by_types, by_values, by_pmap, by_vmap])
def test_eight_devices_equal_one(make):
    losses, expected = trained_on_one_device()
    found_losses, found = train(make())
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [by_types, by_pmap])
def test_a_scan_of_steps_on_each_device(make):
    """The loop over steps is inside: one program for the whole training."""

    def body(carry, batch, step_of):
        trainer, total = carry
        value = step_of(trainer, *batch)
        return (trainer, total + value), value

    def looped(step_of):
        def run(trainer, x, y):
            batches = (jnp.stack([x] * STEPS), jnp.stack([y] * STEPS))
            function = transforms.scan(lambda c, b: body(c, b, step_of))
            return function((trainer, 0.0), batches)[0][1]

        return run

    if make is by_types:
        run = transforms.shard_map(looped(shard_types), mesh=MESH, rngs="share", **SPECS)
    else:
        mapped = transforms.pmap(
            looped(shard_values), axis_name="i", in_axes=(None, 0, 0), out_axes=None, rngs="share"
        )

        def run(trainer, x, y):
            return mapped(trainer, x.reshape(DEVICES, LOCAL, 2), y.reshape(DEVICES, LOCAL))

    x = jax.random.normal(jax.random.key(1), (BATCH, 2))
    y = jnp.sin(x).sum(1)
    trainer = Trainer()
    total = run(trainer, x, y)
    losses, expected = trained_on_one_device()
    np.testing.assert_allclose(total, sum(losses), rtol=1e-5)
    net = trainer.net
    found = [net.w, net.out, net.mean, *trainer.momentum]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.value, b, rtol=1e-4, atol=1e-6)
    assert int(trainer.rngs.dropout.count) == STEPS


@pytest.mark.parametrize("make", ["shard_map", "pmap"])
def test_statistics_that_devices_leave_different_are_refused(make):
    """C37: the mean of the local rows only."""

    def local(trainer, x, y):
        def same(v):
            return v

        return step(trainer, x, y, mean=same, mean_of_grads=_mean, rows=own_rows)

    trainer = Trainer()
    values = [trainer.net.mean.value, trainer.net.w.value, trainer.rngs.dropout.count.value]
    x, y = jnp.linspace(0.0, 1.0, 2 * BATCH).reshape(BATCH, 2), jnp.ones(BATCH)
    if make == "shard_map":
        options = {"mesh": MESH, "rngs": "share", "check_vma": False}
        specs = {**SPECS, "out_specs": None}
        run = transforms.shard_map(lambda *a: (local(*a), None)[1], **options, **specs)
    else:
        run = transforms.pmap(local, axis_name="i", in_axes=(None, 0, 0), rngs="share")
        x, y = x.reshape(DEVICES, LOCAL, 2), y.reshape(DEVICES, LOCAL)
    with pytest.raises(ab.errors.BroadcastWriteError, match="mean"):
        run(trainer, x, y)
    after = [trainer.net.mean.value, trainer.net.w.value, trainer.rngs.dropout.count.value]
    assert all(a is b for a, b in zip(values, after, strict=True))


def test_dropout_without_a_policy_is_refused():
    """C8."""
    run = transforms.pmap(shard_values, axis_name="i", in_axes=(None, 0, 0), out_axes=None)
    trainer = Trainer()
    with pytest.raises(ab.errors.SharedStreamError, match=r"dropout[\s\S]*split[\s\S]*share"):
        run(trainer, jnp.ones((DEVICES, LOCAL, 2)), jnp.ones((DEVICES, LOCAL)))
    assert int(trainer.rngs.dropout.count) == 0
