"""What is of flax goes into functions of ours, and the other way round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import ArgumentError, UpdateError

X = jnp.arange(8.0).reshape(2, 4)


def make(seed: int = 0) -> Any:
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))


@pytest.mark.parametrize("compiled", [nnx, ab, None])
@pytest.mark.parametrize("differentiated", [nnx, ab])
def test_a_step_may_be_compiled_by_one_library_and_differentiated_by_the_other(
    compiled, differentiated
):
    def step(model, optimizer):
        loss, grads = differentiated.value_and_grad(lambda m: ((m(X) - 1) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def run(f):
        model = make()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        losses = [float(f(model, optimizer)) for _ in range(2)]
        return [*losses, float(model.layers[1].mean[...].sum())]

    found = run(step if compiled is None else compiled.jit(step))
    np.testing.assert_allclose(found, [1.999973, 1.804979, -0.045310], rtol=1e-4)


def test_a_state_of_flax_is_written_into_a_model_and_merged():
    model, other = make(0), make(1)
    ab.update(other, nnx.state(model))
    assert ab.state(other) == ab.state(model)
    ab.update(other, nnx.state(make(2), nnx.Param), nnx.state(make(2), nnx.BatchStat))
    assert ab.state(other) == ab.state(make(2))
    copy = ab.merge(
        ab.graphdef(model), nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
    )
    assert ab.state(copy) == ab.state(model)
    assert copy.layers[0].kernel is not model.layers[0].kernel


def test_a_state_of_flax_with_other_kinds_or_shapes_is_refused():
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    with pytest.raises(UpdateError, match="kind is Param"):
        ab.update(model, nnx.state(nnx.Dict(a=nnx.BatchStat(jnp.ones(2)))))
    with pytest.raises(UpdateError, match="shape"):
        ab.update(model, nnx.state(nnx.Dict(a=nnx.Param(jnp.ones(3)))))


def test_a_graphdef_of_flax_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"GraphDef of flax\.nnx"):
        ab.merge(*nnx.split(make()))


def test_pop_leaves_the_structure_that_there_was_before():
    def f(m):
        m.late = nnx.Intermediate(jnp.array(1.0))
        return ab.pop(m, nnx.Intermediate)["late"]

    theirs, ours = make(), make()
    before = ab.graphdef(ours)
    theirs.late = nnx.Intermediate(jnp.array(1.0))
    nnx.pop(theirs, nnx.Intermediate)
    assert f(ours) == ab.jit(f)(ours) == 1
    assert ab.graphdef(ours) is before
    assert vars(ours)["_pytree__nodes"] == vars(theirs)["_pytree__nodes"]


def test_transformations_of_optax_that_are_objects_are_static():
    model = make()
    tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    traces, before = [], model.layers[0].bias[...]

    @ab.jit
    def step(model, optimizer):
        traces.append(1)
        grads = ab.grad(lambda m: m(X).sum() + m.layers[0].bias[...].sum())(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    assert jnp.all(model.layers[0].bias[...] == before)
    step(model, optimizer)
    assert jnp.all(model.layers[0].bias[...] != before)
    assert len(traces) == 1


def test_inside_of_transforms_of_flax_and_outside():
    stacked = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    expected = X
    for i in range(3):
        expected = expected @ stacked.kernel[...][i] + stacked.bias[...][i]

    def through(outer, inner):
        def step(x, m):
            return inner.remat(lambda m, x: m(x))(m, x), None

        axes = (outer.Carry, 0)
        return outer.scan(step, in_axes=axes, out_axes=axes)(X, stacked)[0]

    np.testing.assert_allclose(through(nnx, ab), expected, rtol=1e-5)
    np.testing.assert_allclose(through(ab, nnx), expected, rtol=1e-5)


class TestSpecificationsOfFlax:
    """Axes, shardings and filters may be written with the classes of either library."""

    def counted(self) -> Any:
        return nnx.Dict(w=nnx.Param(jnp.arange(3.0)), n=nnx.BatchStat(jnp.array(0.0)))

    @pytest.mark.parametrize("lib", [nnx, ab])
    def test_axes_by_filter(self, lib):
        def f(m, x):
            m.w[...] += x
            return m.w[...] + m.n[...], m.n

        axes = lib.StateAxes({nnx.Param: 0, ...: None})
        m = self.counted()
        out, n = ab.vmap(f, in_axes=(axes, None), out_axes=(0, axes))(m, 1.0)
        assert out.tolist() == m.w[...].tolist() == [1, 2, 3]
        assert n is m.n

    @pytest.mark.parametrize("lib", [nnx, ab])
    def test_carries(self, lib):
        def f(carry, m):
            m.n[...] += 1
            return carry + m.w[...], {"carry": carry}

        m = self.counted()
        axes = lib.StateAxes({nnx.Param: 0, ...: lib.Carry})
        scan = ab.scan(f, in_axes=(lib.Carry, axes), out_axes=(lib.Carry, {"carry": 0}))
        total, before = scan(0.0, m)
        assert total == 3
        assert before["carry"].tolist() == [0, 0, 1]
        assert m.n[...] == 3

    @pytest.mark.parametrize("lib", [nnx, ab])
    def test_what_is_differentiated(self, lib):
        chosen = lib.DiffState(1, nnx.BatchStat)
        _, grads = ab.value_and_grad(lambda x, m: (x * m.n[...] + m.w[...]).sum(), argnums=chosen)(
            2.0, self.counted()
        )
        assert grads.flat() == {("n",): 6.0}
        both = ab.grad(lambda x, m: (x * m.n[...]).sum(), argnums=(0, chosen))(2.0, self.counted())
        assert both[0] == 0

    @pytest.mark.parametrize("lib", [nnx, ab])
    def test_shardings(self, lib):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), "i")
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shardings = lib.StateSharding({nnx.Param: split, ...: whole})

        @ab.jit(in_shardings=(shardings,), out_shardings=split)
        def f(m):
            m.w[...] *= 2
            return m.w[...] + m.n[...]

        m = self.counted()
        assert f(m).sharding == m.w[...].sharding == split
