"""Intermediate values and their gradients through scan and vmap, inside jit: C19."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms

LAYERS, LANES = 3, 4


class Layer(ab.Module):
    def __init__(self, w):
        self.w = ab.Param(w)
        self.seen = ab.Variable(jnp.zeros(()))

    def __call__(self, x):
        ab.sow(self, "input", x)
        self.seen.value = self.seen + 1
        return jnp.sin(ab.perturb(self, "product", self.w * x))


class Net(ab.Module):
    def __init__(self):
        self.layers = Layer(jnp.array([0.5, 1.0, 1.5]))
        self.layers.seen.value = jnp.zeros(LAYERS)
        self.head = Layer(jnp.array(2.0))

    def __call__(self, x):
        def step(h, layer):
            return layer(h), None

        h, _ = transforms.scan(step)(x, self.layers)
        return self.head(h)


def one(net, x):
    return net(x)


NO_WEIGHTS = ab.StateAxes({ab.Param: None, ...: 0})


def lanes(net, xs):
    """Map over the examples; each has its own `seen`."""
    return transforms.vmap(one, in_axes=(NO_WEIGHTS, 0))(net, xs)


def make():
    net = Net()
    net.layers.seen.value = jnp.zeros((LANES, LAYERS))
    net.head.seen.value = jnp.zeros(LANES)
    return net


def plain(ws, head, x, bumps=(0.0,) * (LAYERS + 1)):
    inputs = []
    for w, bump in zip((*ws, head), bumps, strict=True):
        inputs.append(x)
        x = jnp.sin(w * x + bump)
    return x, inputs


def expected_inputs(net, xs):
    rows = [plain(net.layers.w.value, net.head.w.value, x)[1] for x in xs]
    return np.array(rows)


XS = jnp.linspace(0.2, 1.4, LANES)


@pytest.mark.parametrize("outer", [False, True], ids=["jit-in-capture", "capture-in-jit"])
def test_inputs_of_layers_are_stacked_over_lanes_and_layers(outer):
    net = make()
    before = ab.graphdef(net)
    run = transforms.capture(transforms.jit(lanes))
    if outer:
        run = transforms.jit(transforms.capture(lanes))
    for calls in (1, 2):
        out, state = run(net, XS)
        found = {path[1:]: leaf for path, leaf in state.flat().items()}
        expected = expected_inputs(net, XS)
        assert set(found) == {("layers", "input", 0), ("head", "input", 0)}
        np.testing.assert_allclose(found["layers", "input", 0], expected[:, :-1], rtol=1e-5)
        np.testing.assert_allclose(found["head", "input", 0], expected[:, -1], rtol=1e-5)
        rows = [plain(net.layers.w.value, net.head.w.value, x)[0] for x in XS]
        np.testing.assert_allclose(out, jnp.stack(rows), rtol=1e-5)
        assert net.layers.seen.value.tolist() == [[calls] * LAYERS] * LANES
        assert net.head.seen.value.tolist() == [calls] * LANES
        assert ab.graphdef(net) is before


def test_values_inside_a_gradient_come_out_beside_it():
    def loss(net, xs):
        return lanes(net, xs).sum()

    net = make()
    run = transforms.capture(transforms.jit(transforms.grad(transforms.remat(loss))))
    grads, state = run(net, XS)

    def plain_loss(ws, head):
        return sum(plain(ws, head, x)[0] for x in XS)

    ws, head = jax.grad(plain_loss, argnums=(0, 1))(net.layers.w.value, net.head.w.value)
    np.testing.assert_allclose(grads["layers", "w"], ws, rtol=1e-4)
    np.testing.assert_allclose(grads["head", "w"], head, rtol=1e-4)
    expected = expected_inputs(net, XS)
    found = {path[1:]: leaf for path, leaf in state.flat().items()}
    np.testing.assert_allclose(found["layers", "input", 0], expected[:, :-1], rtol=1e-5)
    assert net.head.seen.value.tolist() == [1.0] * LANES


def test_gradients_of_intermediate_values_by_perturb():
    traces = []

    @transforms.jit
    def gradients(net, xs, zeros):
        def loss(zeros, net, xs):
            traces.append(1)
            out, _ = transforms.capture(lanes, init=zeros)(net, xs)
            return out.sum()

        return transforms.grad(loss)(zeros, net, xs)

    net = make()
    _, zeros = transforms.capture(transforms.jit(lanes), ab.Perturbation)(net, XS)
    shapes = {path[1:]: leaf.shape for path, leaf in zeros.flat().items()}
    assert shapes == {("layers", "product"): (LANES, LAYERS), ("head", "product"): (LANES,)}
    for _ in range(2):
        found = {path[1:]: leaf for path, leaf in gradients(net, XS, zeros).flat().items()}

    def plain_loss(bumps, x):
        return plain(net.layers.w.value, net.head.w.value, x, bumps)[0]

    rows = jnp.stack([jax.grad(plain_loss)(jnp.zeros(LAYERS + 1), x) for x in XS])
    np.testing.assert_allclose(found["layers", "product"], rows[:, :-1], rtol=1e-4)
    np.testing.assert_allclose(found["head", "product"], rows[:, -1], rtol=1e-4)
    assert len(traces) == 1
    assert net.head.seen.value.tolist() == [3.0] * LANES


def test_a_failure_inside_leaves_nothing_on_the_modules():
    def failing(net, xs):
        lanes(net, xs)
        raise RuntimeError("late")

    net = make()
    before = ab.graphdef(net)
    values = [net.layers.seen.value, net.head.seen.value]
    with pytest.raises(RuntimeError, match="late"):
        transforms.capture(transforms.jit(failing))(net, XS)
    assert ab.graphdef(net) is before
    assert net.layers.seen.value is values[0]
    assert net.head.seen.value is values[1]
    assert lanes(net, XS).shape == (LANES,)


def test_inside_cond_inside_scan_what_only_one_branch_records_is_told():
    """Both branches record: stacked. One branch records: one structure cannot hold both."""

    def scanned(double):
        def step(h, _, layer):
            return transforms.cond(h > 1, double, lambda m, h: m(h), layer, h), None

        def run(layer, x):
            return transforms.scan(step, in_axes=(ab.Carry, None, None), length=3)(x, None, layer)

        return transforms.capture(transforms.jit(run))

    layer, other = Layer(jnp.array(2.0)), Layer(jnp.array(2.0))
    _, state = scanned(lambda m, h: m(2 * h))(layer, 0.3)
    h, inputs = jnp.array(0.3), []
    for _ in range(3):
        inputs.append(2 * h if h > 1 else h)
        h = other(inputs[-1])
    np.testing.assert_allclose(state[0]["input"][0], jnp.stack(inputs), rtol=1e-6)
    assert float(layer.seen.value) == 3
    with pytest.raises(ab.errors.StructureError, match="input"):
        scanned(lambda m, h: h / 2)(layer, 0.3)
    assert float(layer.seen.value) == 3
