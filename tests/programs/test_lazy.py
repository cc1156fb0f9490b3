"""Variables that are created at the first call, inside a transform: C29."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms


class Lazy(ab.Module):
    """A layer that learns its width from its first input."""

    def __init__(self, seed=0):
        self.rngs = ab.Rngs(params=seed)

    def __call__(self, x):
        if not hasattr(self, "w"):
            self.w = ab.Param(jax.random.normal(self.rngs.params(), (x.shape[-1],)))
            self.calls = ab.Variable(jnp.zeros((), jnp.int32))
        self.calls.value += 1
        return x @ self.w


class Deep(ab.Module):
    def __init__(self):
        self.first, self.second = Lazy(1), Lazy(2)

    def __call__(self, x):
        return self.second(jnp.stack([self.first(x), x.sum()]))


X = jnp.array([1.0, 2.0, 3.0])


def test_appears_outside_after_jit():
    traces = []

    @transforms.jit
    def run(m, x):
        traces.append(1)
        return m(x)

    m, other = Deep(), Deep()
    for call in (1, 2, 3):
        np.testing.assert_allclose(run(m, X), other(X), rtol=1e-6)
        assert int(m.first.calls) == int(m.second.calls) == call
    assert type(m.first.w) is ab.Param
    np.testing.assert_allclose(m.first.w.value, other.first.w.value, rtol=1e-6)
    assert int(m.first.rngs.params.count) == 1
    assert len(traces) == 2  # with and without the variables
    w = m.first.w
    run(m, X)
    assert m.first.w is w


@pytest.mark.parametrize("wrap", [lambda f: f, transforms.jit], ids=["eager", "jit"])
def test_appears_outside_after_vmap_of_a_broadcast_module(wrap):
    def run(m, x):
        return m(x)

    xs = jnp.stack([X, 2 * X])
    m, other = Lazy(), Lazy()
    if_shared = wrap(transforms.vmap(run, in_axes=(None, 0), rngs="share"))
    expected = jnp.stack([ab.clone(other)(x) for x in xs])
    np.testing.assert_allclose(if_shared(m, xs), expected, rtol=1e-6)
    assert m.w.value.shape == (3,)
    assert int(m.calls) == 1
    assert int(m.rngs.params.count) == 1
    w = m.w
    if_shared(m, xs)
    assert m.w is w
    assert int(m.calls) == 2


def test_lanes_that_would_create_different_values_are_refused():
    m = Lazy()
    before = ab.graphdef(m)
    with pytest.raises(ab.errors.SharedStreamError, match="params"):
        transforms.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, jnp.stack([X, X]))
    with pytest.raises(ab.errors.BroadcastWriteError, match="w"):
        transforms.vmap(lambda m, x: m(x), in_axes=(None, 0), rngs="split")(m, jnp.stack([X, X]))
    assert ab.graphdef(m) is before
    assert int(m.rngs.params.count) == 0


@pytest.mark.parametrize("wrap", [lambda f: f, transforms.jit], ids=["eager", "jit"])
def test_appears_stacked_after_vmap_of_a_mapped_module(wrap):
    keys = jax.random.split(jax.random.key(0), 4)
    lanes = transforms.vmap(Lazy)(keys)
    run = wrap(transforms.vmap(lambda m, x: m(x), in_axes=(0, None)))
    members = [Lazy(key) for key in keys]
    for _ in range(2):
        found = run(lanes, X)
        np.testing.assert_allclose(found, jnp.stack([m(X) for m in members]), rtol=1e-5)
    np.testing.assert_allclose(lanes.w.value, jnp.stack([m.w.value for m in members]), rtol=1e-6)
    assert lanes.calls.value.tolist() == [2] * 4


def test_created_inside_grad_has_no_gradient_yet_and_is_there_afterwards():
    class WithScale(Lazy):
        def __init__(self):
            super().__init__()
            self.scale = ab.Param(2.0)

        def __call__(self, x):
            return self.scale * super().__call__(x)

    m, other = WithScale(), WithScale()
    loss = transforms.jit(transforms.grad(lambda m, x: m(x)))
    first = loss(m, X)
    assert [*first.flat()] == [("scale",)]
    np.testing.assert_allclose(first["scale"], other(X) / 2, rtol=1e-6)
    second = loss(m, X)
    assert {*second.flat()} == {("scale",), ("w",)}
    np.testing.assert_allclose(second["w"], 2 * X, rtol=1e-6)
    assert int(m.calls) == 2


def test_under_remat_and_cond_it_appears_too():
    m = Lazy()
    out = transforms.remat(lambda m, x: m(x))(m, X)
    other = Lazy()
    np.testing.assert_allclose(out, other(X), rtol=1e-6)
    assert int(m.calls) == 1
    n = Lazy()
    out = transforms.cond(True, lambda m, x: m(x), lambda m, x: m(-x), n, X)
    np.testing.assert_allclose(out, other(X), rtol=1e-6)
    assert int(n.calls) == 1


LOOPS = {
    "scan": lambda m, xs: transforms.scan(lambda m, x: (m, m(x)))(m, xs)[1],
    "scan, broadcast": lambda m, xs: transforms.scan(
        lambda _, x, m: (None, m(x)), in_axes=(ab.Carry, 0, None)
    )(None, xs, m)[1],
    "fori_loop": lambda m, xs: transforms.fori_loop(
        0, 2, lambda i, s: (s[0], s[1] + s[0](xs[0])), (m, 0.0)
    )[1],
    "while_loop": lambda m, xs: transforms.while_loop(
        lambda s: s[1] < 3, lambda s: (s[0], s[1] + 1 + 0 * s[0](xs[0])), (m, 0.0)
    )[1],
}


@pytest.mark.parametrize("wrap", [lambda f: f, transforms.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("loop", LOOPS)
def test_in_a_loop_it_is_an_error_that_names_it(loop, wrap):
    m, xs = Lazy(), jnp.stack([X, 2 * X])
    before, count = ab.graphdef(m), m.rngs.params.count.value
    with pytest.raises(ab.errors.StructureError, match=r"\.w\b|\.calls\b") as error:
        wrap(LOOPS[loop])(m, xs)
    assert loop.partition(",")[0] in str(error.value)
    assert len(str(error.value)) < 4000
    assert ab.graphdef(m) is before
    assert m.rngs.params.count.value is count


@pytest.mark.parametrize("loop", LOOPS)
def test_a_call_before_the_loop_is_enough(loop):
    m, other, xs = Lazy(), Lazy(), jnp.stack([X, 2 * X])

    def run(m, xs):
        m(xs[0])
        return LOOPS[loop](m, xs)

    transforms.jit(run)(m, xs)
    other(xs[0])
    np.testing.assert_allclose(m.w.value, other.w.value, rtol=1e-6)
    steps = 1 + (2 if loop != "while_loop" else 3)
    assert int(m.calls) == steps


def test_lazy_layers_in_a_scan_over_layers_are_stacked():
    """A slice may change its structure: each layer makes its own, all at the first call."""
    keys = jax.random.split(jax.random.key(0), 3)
    stack = transforms.vmap(Lazy)(keys)

    def layer(h, m):
        return h * jnp.tanh(m(h)), None

    run = transforms.jit(transforms.scan(layer))
    members = [Lazy(key) for key in keys]
    for _ in range(2):
        h, _ = run(X, stack)
        expected = X
        for m in members:
            expected, _ = layer(expected, m)
        np.testing.assert_allclose(h, expected, rtol=1e-5)
    np.testing.assert_allclose(stack.w.value, jnp.stack([m.w.value for m in members]), rtol=1e-6)
    assert stack.calls.value.tolist() == [2, 2, 2]
