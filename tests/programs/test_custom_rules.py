"""A custom rule that records a statistic, inside scan, inside grad, inside jit: C14."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms

STEPS = 3


class Quantiser(ab.Module):
    """Round to a grid that follows the largest value seen; pass gradients straight through."""

    def __init__(self):
        self.scale = ab.Variable(jnp.ones(()))
        self.largest = ab.BatchStat(jnp.zeros(()))
        self.forward_calls = ab.Variable(jnp.zeros((), jnp.int32))


@transforms.custom_vjp
def quantise(q, x):
    return jnp.round(x / q.scale) * q.scale


def quantise_fwd(q, x):
    out = jnp.round(x / q.scale) * q.scale
    inside = jnp.abs(x) < 4 * q.scale.value
    q.largest.value = jnp.maximum(0.9 * q.largest, jnp.abs(x).max())
    q.forward_calls.value += 1
    return out, inside


def quantise_bwd(inside, ct):
    return None, jnp.where(inside, ct, 0.0)


quantise.defvjp(quantise_fwd, quantise_bwd)


class Net(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.linspace(-1.0, 1.5, 9).reshape(3, 3))
        self.q = Quantiser()
        self.steps = ab.Variable(jnp.zeros((), jnp.int32))

    def cell(self, h, x):
        self.steps.value += 1
        return jnp.tanh(quantise(self.q, h @ self.w) + x)


def loss(net, xs):
    def step(h, x, net):
        h = net.cell(h, x)
        return h, h

    h, hs = transforms.scan(step, in_axes=(ab.Carry, 0, None))(jnp.zeros(3), xs, net)
    return (h**2).sum() + hs.mean()


@functools.partial(jax.jit, static_argnames="record")
def plain_loss(w, xs, largest, *, record):
    def straight(x):
        rounded = jnp.where(jnp.abs(x) < 4, x, jax.lax.stop_gradient(x))
        return rounded + jax.lax.stop_gradient(jnp.round(x) - rounded)

    h, hs = jnp.zeros(3), []
    for x in xs:
        value = h @ w
        if record:
            largest = jnp.maximum(0.9 * largest, jnp.abs(value).max())
        h = jnp.tanh(straight(value) + x)
        hs.append(h)
    return (h**2).sum() + jnp.stack(hs).mean(), largest


XS = jax.random.normal(jax.random.key(0), (STEPS, 3)) * 3


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_the_forward_rule_runs_once_a_step_when_it_is_differentiated(remat):
    run = transforms.jit(transforms.value_and_grad(transforms.remat(loss) if remat else loss))
    net = Net()
    largest, w = jnp.zeros(()), net.w.value
    cells = [net.q, net.q.largest, net.q.forward_calls]
    for call in (1, 2):
        value, grads = run(net, XS / call)
        (expected, largest), own = jax.value_and_grad(plain_loss, has_aux=True)(
            w, XS / call, largest, record=True
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(grads["w"], own, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(net.q.largest.value, largest, rtol=1e-5)
        assert int(net.q.forward_calls) == int(net.steps) == STEPS * call
    assert net.w.value is w
    after = [net.q, net.q.largest, net.q.forward_calls]
    assert all(a is b for a, b in zip(cells, after, strict=True))


def test_without_a_gradient_the_function_itself_runs():
    net = Net()
    value = transforms.jit(loss)(net, XS)
    expected, _ = plain_loss(net.w.value, XS, jnp.zeros(()), record=False)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert int(net.q.forward_calls) == 0
    assert int(net.steps) == STEPS


def test_for_each_example_under_vmap():
    axes = ab.StateAxes({ab.BatchStat: 0, ab.Param: None, ...: None})
    net = Net()
    net.q.largest.value = jnp.zeros(2)
    xs = jnp.stack([XS, XS / 2])
    run = transforms.jit(transforms.vmap(transforms.grad(loss), in_axes=(axes, 0)))
    grads = run(net, xs)
    for i in range(2):
        own, largest = jax.grad(plain_loss, has_aux=True)(
            net.w.value, xs[i], jnp.zeros(()), record=True
        )
        np.testing.assert_allclose(grads["w"][i], own, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(net.q.largest.value[i], largest, rtol=1e-5)
    assert int(net.q.forward_calls) == STEPS


def test_reversed_gradients_of_a_method_in_a_scan_over_layers():
    """The rule of a method: its `self` is a slice of the stack, and records on it."""

    class Reverse(ab.Module):
        def __init__(self, rate):
            self.rate = ab.Variable(rate)
            self.norm = ab.BatchStat(jnp.zeros_like(rate))

        @transforms.custom_vjp
        def __call__(self, x):
            return x * 1

    def forward(self, x):
        self.norm.value = jnp.sqrt((x**2).sum())
        return x * 1, self.rate.value

    Reverse.__call__.defvjp(forward, lambda rate, ct: (None, -rate * ct))

    def loss(x, stack):
        def step(h, layer):
            return layer(jnp.sin(h)), None

        return transforms.scan(step)(x, stack)[0].sum()

    rates = jnp.array([0.5, 2.0, 3.0])
    stack, x = Reverse(rates), jnp.array([0.3, 0.7])
    grads = transforms.jit(transforms.grad(loss))(x, stack)
    expected, h, norms = jnp.ones(2), x, []
    for rate in rates:
        expected = expected * -rate * jnp.cos(h)
        h = jnp.sin(h)
        norms.append(jnp.linalg.norm(h))
    np.testing.assert_allclose(grads, expected, rtol=1e-5)
    np.testing.assert_allclose(stack.norm.value, jnp.stack(norms), rtol=1e-5)


def test_a_custom_jvp_with_state_in_scan_and_both_modes():
    @transforms.custom_jvp
    def clipped(m, x):
        m.calls.value += 1
        return jnp.clip(x, -1.0, 1.0)

    @clipped.defjvp
    def _(primals, tangents):
        m, x = primals
        return clipped(m, x), 0.5 * tangents[1]

    class Counter(ab.Module):
        def __init__(self):
            self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def run(x, m):
        def step(h, _, m):
            return clipped(m, 2 * h), None

        return transforms.scan(step, in_axes=(ab.Carry, None, None), length=3)(x, None, m)[0]

    m = Counter()
    assert float(transforms.jit(transforms.grad(run))(0.3, m)) == 1.0
    assert int(m.calls) == 3
    assert float(transforms.jit(transforms.jacfwd(run))(0.3, m)) == 1.0
    assert int(m.calls) == 6
    assert float(run(0.3, m)) == 1.0
    assert int(m.calls) == 9


def test_a_failing_rule_changes_nothing():
    @transforms.custom_vjp
    def f(m, x):
        return x * 1

    def forward(m, x):
        m.largest.value = x
        raise RuntimeError("rule")

    f.defvjp(forward, lambda residuals, ct: (None, ct))

    def scanned(x, m):
        def step(h, _, m):
            return f(m, h), None

        return transforms.scan(step, in_axes=(ab.Carry, None, None), length=2)(x, None, m)[0]

    q = Quantiser()
    value = q.largest.value
    with pytest.raises(RuntimeError, match="rule"):
        transforms.jit(transforms.grad(scanned))(1.0, q)
    assert q.largest.value is value
