"""Streams, Refs, tangents and filters of flax under transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import FilterError, SharedStreamError


class Box(nnx.Module):
    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def noise(rngs: Any, x: Any) -> Any:
    return jax.random.normal(rngs.dropout()) + 0 * x


class TestStreams:
    def test_a_draw_from_a_shared_stream_is_refused_until_a_policy_is_said(self):
        rngs = nnx.Rngs(dropout=0)
        with pytest.raises(SharedStreamError, match="dropout"):
            ab.vmap(noise, in_axes=(None, 0))(rngs, jnp.arange(3.0))
        assert rngs.dropout.count[...] == 0
        share = ab.vmap(noise, in_axes=(None, 0), rngs="share")(rngs, jnp.arange(3.0))
        assert len(set(share.tolist())) == 1
        split = ab.vmap(noise, in_axes=(None, 0), rngs="split")(rngs, jnp.arange(3.0))
        assert len(set(split.tolist())) == 3
        assert rngs.dropout.count[...] == 2

    def test_a_dropout_layer_in_lanes_and_in_a_loop(self):
        layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        x = jnp.ones((4, 16))
        with pytest.raises(SharedStreamError):
            ab.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(layer, x)
        out = ab.vmap(lambda layer, x: layer(x), in_axes=(None, 0), rngs="split")(layer, x)
        assert len({tuple(row) for row in out.tolist()}) == 4

        def body(carry, x):
            layer, total = carry
            return (layer, total + 1), layer(x)

        axes = (ab.Carry, 0)
        before = layer.rngs.count[...]
        _, steps = ab.scan(body, in_axes=axes, out_axes=axes)((layer, 0), x)
        assert len({tuple(row) for row in steps.tolist()}) == 4
        assert layer.rngs.count[...] == before + 4

    def test_streams_of_flax_and_ours_draw_the_same_keys(self):
        theirs, ours = nnx.Rngs(0, dropout=3), ab.Rngs(0, dropout=3)
        for _ in range(2):
            assert jnp.all(theirs.dropout() == ours.dropout())
            assert jnp.all(theirs.params() == ours.params())

    def test_streams_can_be_split_by_hand(self):
        rngs = nnx.Rngs(dropout=0)

        @ab.split_rngs(splits=3)
        @ab.vmap
        def draw(rngs):
            return jax.random.normal(rngs.dropout())

        assert len(set(draw(rngs).tolist())) == 3
        assert rngs.dropout.count[...] == 1
        assert rngs.dropout.key[...].shape == ()

    def test_lanes_with_keys_of_their_own_need_no_policy(self):
        rngs = nnx.Rngs(dropout=0).split(3)
        out = ab.vmap(noise, in_axes=(0, 0))(rngs, jnp.arange(3.0))
        assert len(set(out.tolist())) == 3
        assert rngs.dropout.count[...].tolist() == [1, 1, 1]


class TestRefs:
    def counter(self) -> Any:
        return Box(n=nnx.Variable(jnp.array(0.0), ref=True), w=nnx.Param(jnp.array(2.0)))

    def test_a_variable_around_a_ref_goes_through_jit_loops_and_gradients(self):
        m = self.counter()

        @ab.jit
        def f(m, x):
            m.n[...] += 1
            return m.w[...] * x

        assert f(m, 3.0) == f(m, 3.0) == 6
        assert m.n[...] == 2
        grads = ab.grad(f)(m, 3.0)
        assert grads["w"] == 3
        assert m.n[...] == 3

        ab.cond(True, lambda m: f(m, 1.0), lambda m: 0.0, m)
        assert m.n[...] == 4

    def test_one_ref_in_two_variables_is_passed_once(self):
        m = self.counter()
        m.again = m.n
        assert ab.jit(lambda m: m.again is m.n)(m)

    def test_a_ref_as_an_attribute(self):
        m = Box(r=nnx.data(jax.new_ref(jnp.array(1.0))))

        @ab.jit
        def f(m):
            m.r[...] += 1

        f(m)
        f(m)
        assert m.r[...] == 3

    def test_what_jax_cannot_do_raises_and_changes_nothing(self):
        m = self.counter()

        def f(m, x):
            m.n[...] += x
            return x

        with pytest.raises(Exception, match="unbatched array reference"):
            ab.vmap(f, in_axes=(None, 0))(m, jnp.arange(2.0))
        assert m.n[...] == 0


class TestDerivatives:
    def test_params_are_differentiated_and_everything_else_is_not(self):
        net = nnx.Sequential(
            nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(3, rngs=nnx.Rngs(1)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(2)),
        )
        grads = ab.grad(lambda net: net(jnp.ones((4, 2))).sum())(net)
        assert {info.kind for info in grads.infos} == {nnx.Param}
        assert grads.paths == ab.state(net, nnx.Param).paths

    def test_a_filter_that_matches_nothing_names_the_kinds(self):
        m = Box(n=nnx.BatchStat(jnp.array(1.0)))
        with pytest.raises(FilterError, match="BatchStat"):
            ab.grad(lambda m: m.n[...])(m)

    def test_a_shared_param_counts_once_with_the_sum(self):
        v = nnx.Param(jnp.array(2.0))
        grads = ab.grad(lambda m: m.a[...] * 3 + m.b[...] * 4)(Box(b=v, a=v))
        assert grads.flat() == {("a",): 7.0}

    def test_gradients_of_containers_of_models_go_into_their_optimizers(self):
        import optax

        models = [nnx.Linear(2, 1, rngs=nnx.Rngs(i)) for i in range(2)]
        optimizers = [nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in models]
        before = [m.kernel[...] for m in models]
        grads = ab.grad(lambda models: sum(m(jnp.ones(2)).sum() for m in models))(models)
        for m, optimizer, g, old in zip(models, optimizers, grads, before, strict=True):
            optimizer.update(m, g)
            np.testing.assert_allclose(m.kernel[...], old - 0.1, rtol=1e-5)

    def test_an_optimizer_in_the_mode_without_graphs_takes_converted_gradients(self):
        import optax

        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, graph=False)
        old = model.kernel[...]
        grads = ab.grad(lambda m: m(jnp.ones(2)).sum())(model)
        optimizer.update(model, ab.interop.to_nnx_state(grads))
        np.testing.assert_allclose(model.kernel[...], old - 0.1, rtol=1e-5)

    def test_a_state_of_flax_has_a_gradient_too(self):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(model)

        def loss(params):
            return nnx.merge(graphdef, params)(jnp.array([1.0, 2.0])).sum()

        grads = ab.grad(loss)(params)
        assert grads["kernel"].tolist() == [[1.0], [2.0]]

    def test_tangents_and_pullbacks_and_jacobians(self):
        m = Box(w=nnx.Param(jnp.array([1.0, 2.0])), n=nnx.BatchStat(jnp.array(0)))

        def f(m):
            m.n[...] += 1
            return m.w[...] ** 2

        tangent = ab.state(m, nnx.Param).map(lambda path, x: jnp.ones_like(x))
        _, moved = ab.jvp(f, (m,), (tangent,))
        assert moved.tolist() == [2.0, 4.0]
        _, pullback = ab.vjp(f, m)
        (grads,) = pullback(jnp.array([1.0, 0.0]))
        assert grads["w"].tolist() == [2.0, 0.0]
        jacobian = ab.jacrev(f)(m)
        assert jacobian["w"].tolist() == [[2.0, 0.0], [0.0, 4.0]]
        assert m.n[...] == 3

    def test_one_filter_does_for_models_that_mix_both_libraries(self):
        class Mixed(ab.Module):
            def __init__(self) -> None:
                self.theirs = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
                self.scale = ab.Param(jnp.array(2.0))

        m = Mixed()
        grads = ab.grad(lambda m: (m.scale.value * m.theirs(jnp.ones(2))).sum())(m)
        assert set(grads.paths) == {("theirs", "kernel"), ("theirs", "bias"), ("scale",)}
        nnx_grads = ab.interop.to_nnx_state(grads)
        assert {type(v) for _, v in nnx.to_flat_state(nnx_grads)} == {nnx.Param}


def test_lanes_stack_kinds_of_flax_along_their_axes():
    m = Box(w=nnx.Param(jnp.arange(3.0)), n=nnx.BatchStat(jnp.array(0.0)))
    axes = ab.StateAxes({nnx.Param: 0, ...: None})

    def f(m, x):
        m.w[...] *= 2
        m.late = nnx.Cache(x)
        return m.w[...] + m.n[...]

    out = ab.vmap(f, in_axes=(axes, None))(m, 5.0)
    assert out.tolist() == [0.0, 2.0, 4.0]
    assert m.w[...].tolist() == [0.0, 2.0, 4.0]


def test_a_captured_model_is_read_afresh_and_written():
    model = Box(w=nnx.Param(jnp.array(1.0)), n=nnx.BatchStat(jnp.array(0)))
    traces = []

    @ab.jit
    def f(x):
        traces.append(1)
        model.n[...] += 1
        return model.w[...] * x

    assert f(2.0) == 2
    model.w[...] = jnp.array(10.0)
    assert f(2.0) == 20
    assert model.n[...] == 2
    assert len(traces) == 1
