"""`grad` and `value_and_grad`: what is differentiated, and what comes back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anabranch as ab
from anabranch import transforms


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]))
        self.stat = ab.BatchStat(jnp.zeros(()))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.rngs = ab.Rngs(0)
        self.table = jnp.ones(2)

    def loss(self, x):
        self.count.value = self.count + 1
        self.stat.value = self.w.value.sum()
        return (self.w * x).sum() * self.stat


class TestWhatIsDifferentiated:
    def test_params_of_a_module_by_default(self):
        """C12."""
        model = Model()
        grads = transforms.grad(Model.loss)(model, jnp.array([3.0, 4.0]))
        assert isinstance(grads, ab.State)
        assert grads.paths == (("w",),)
        # d/dw [(w . x) sum(w)] = x sum(w) + (w . x)
        assert grads["w"].tolist() == [3.0 * 3 + 11, 4.0 * 3 + 11]
        assert int(model.count.value) == 1
        assert float(model.stat.value) == 3.0

    def test_inexact_arrays_of_plain_containers(self):
        grads = transforms.grad(lambda t: t["a"] ** 2 + t["b"][0].sum())(
            {"a": 3.0, "b": [jnp.ones(2), 1], "n": 5}
        )
        assert float(grads["a"]) == 6.0
        assert grads["b"][0].tolist() == [1.0, 1.0]
        assert grads["b"][1] is None
        assert grads["n"] is None

    def test_nothing_is_an_error_that_lists_the_kinds(self):
        """C13."""
        model = Model()
        with pytest.raises(ab.errors.FilterError, match=r"BatchStat.*Param.*RngCount"):
            transforms.grad(Model.loss, argnums=ab.DiffState(0, ab.Cache))(model, 1.0)
        with pytest.raises(ab.errors.FilterError, match="args\\[0\\]"):
            transforms.grad(lambda n: n * 1.0)(3)

    def test_integers_are_an_error_by_path(self):
        with pytest.raises(ab.errors.FilterError, match="int32"):
            transforms.grad(Model.loss, argnums=ab.DiffState(0, ab.Variable))(Model(), 1.0)

    def test_chosen_by_filter_for_each_argument(self):
        a, b = Model(), Model()
        b.w.set_metadata(tag="tuned")

        def loss(a, x, b):
            return (a.w * b.w).sum() * x + a.stat * 5

        grads = transforms.grad(
            loss, argnums=(ab.DiffState(0, ab.BatchStat), ab.DiffState(2, "tuned"), 1)
        )(a, 2.0, b)
        assert grads[0].flat() == {("stat",): 5.0}
        assert grads[1]["w"].tolist() == [2.0, 4.0]
        assert float(grads[2]) == 5.0

    def test_containers_of_modules_keep_their_form(self):
        grads = transforms.grad(lambda t: (t[0].w * t[1]["m"].w).sum())([Model(), {"m": Model()}])
        assert grads[0]["w"].tolist() == [1.0, 2.0]
        assert grads[1]["m"]["w"].tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("result", ["text", (1.0, 2.0), None, jnp.ones(2)], ids=repr)
    def test_only_scalars_have_gradients(self, result):
        with pytest.raises(ab.errors.StructureError, match="scalar"):
            transforms.grad(lambda x: result)(1.0)

    def test_functions_that_hold_arrays_have_a_state(self):
        scale = functools.partial(lambda x, k: x * k, k=jnp.array(3.0))
        grads = transforms.grad(lambda d, x: d["f"](x) + d["y"])({"f": scale, "y": 1.0}, 2.0)
        assert grads["f"].flat() == {("k",): 2.0}
        assert float(grads["y"]) == 1.0

    def test_argnums_must_exist(self):
        with pytest.raises(ab.errors.StructureError, match="argnums has 1"):
            transforms.grad(lambda x: x, argnums=1)(1.0)
        with pytest.raises(ab.errors.StructureError, match="argnums holds"):
            transforms.grad(lambda x: x, argnums=1.5)(1.0)


class TestSharing:
    def test_a_shared_param_counts_once_with_the_summed_gradient(self):
        model = Model()
        model.tied = model.w
        grads = transforms.grad(lambda m: (m.w * 2 + m.tied * 3).sum())(model)
        assert grads.paths == (("w",),)
        assert grads["w"].tolist() == [5.0, 5.0]

    def test_in_two_differentiated_arguments_it_belongs_to_the_first(self):
        model = Model()
        first, second = transforms.grad(lambda a, b: (a.w + b.w * 2).sum(), argnums=(0, 1))(
            model, model
        )
        assert first["w"].tolist() == [3.0, 3.0]
        assert second.paths == ()

    def test_a_shared_container_counts_once(self):
        x = [jnp.ones(2)]
        first, second = transforms.grad(lambda a, b: (a[0] * b[0]).sum(), argnums=(0, 1))(x, x)
        assert first[0].tolist() == [2.0, 2.0]
        assert second == [None]
        shared = [3.0]
        both = {"a": shared, "b": shared}
        grads = transforms.grad(lambda d: d["a"][0] * d["b"][0])(both)
        assert grads["a"] is grads["b"]
        assert float(grads["a"][0]) == 6.0

    def test_cyclic_and_deep_containers_keep_their_form(self):
        cycle = [ab.Param(jnp.array(3.0))]
        cycle.append(cycle)
        grads = transforms.grad(lambda x: x[0][...] ** 2)(cycle)
        assert grads[1] is grads
        assert float(grads[0][()]) == 6.0
        deep = inner = []
        for _ in range(5_000):
            inner.append([])
            inner = inner[0]
        inner.append(jnp.array(2.0))
        grads = transforms.grad(lambda deep, inner: inner[0] ** 2)(deep, inner)
        while len(grads) == 1 and isinstance(grads[0], list):
            grads = grads[0]
        assert float(grads[0]) == 4.0

    def test_in_another_argument_it_is_the_same_variable(self):
        model = Model()

        def loss(m, w):
            assert m.w is w
            return (m.w * w).sum()

        grads = transforms.grad(loss)(model, model.w)
        assert grads["w"].tolist() == [2.0, 4.0]


class TestWrites:
    def test_a_replaced_param_has_the_gradient_of_its_entry_value(self):
        def loss(m):
            old = m.w
            m.w = ab.Param(jnp.zeros(2))
            old.value = old * 2
            return (old.value**2).sum()

        model = Model()
        w = model.w
        grads = transforms.grad(loss)(model)
        assert grads["w"].tolist() == [8.0, 16.0]
        assert model.w is not w
        assert w.value.tolist() == [2.0, 4.0]

    def test_an_unused_param_has_a_gradient_of_zero(self):
        grads = transforms.grad(lambda m: m.stat * 1.0)(Model())
        assert grads["w"].tolist() == [0.0, 0.0]

    def test_structure_changes_and_new_objects_in_aux(self):
        def loss(m):
            m.seen = True
            m.me = m
            return m.w.value.sum(), (m, ab.Cache(m.w * 2))

        model = Model()
        (value, (same, cache)), grads = transforms.value_and_grad(loss, has_aux=True)(model)
        assert float(value) == 3.0
        assert same is model is model.me
        assert model.seen is True
        assert cache.value.tolist() == [2.0, 4.0]
        assert grads["w"].tolist() == [1.0, 1.0]
        grads, (same, _) = transforms.grad(loss, has_aux=True)(model)
        assert same is model

    def test_failures_change_nothing(self):
        def loss(m):
            m.w.value = m.w * 2
            m.new = 1
            return m.w.value  # no scalar

        model = Model()
        w = model.w.value
        with pytest.raises(ab.errors.StructureError, match="scalar"):
            transforms.grad(loss)(model)
        assert model.w.value is w
        assert not hasattr(model, "new")


class TestComposition:
    def test_gradients_feed_optax_and_update(self):
        model = Model()
        tx = optax.sgd(0.5)
        params = ab.state(model, ab.Param)
        opt_state = tx.init(params)
        grads = transforms.grad(lambda m: (m.w * 2).sum())(model)
        updates, opt_state = tx.update(grads, opt_state, params)
        ab.update(model, optax.apply_updates(params, updates))
        assert model.w.value.tolist() == [0.0, 1.0]

    def test_inside_jit_and_of_itself(self):
        @transforms.jit
        def step(m, x):
            grads = transforms.grad(Model.loss)(m, x)
            m.w.value = m.w - 0.5 * grads["w"]

        model = Model()
        step(model, jnp.array([3.0, 4.0]))
        assert model.w.value.tolist() == [1.0 - 10, 2.0 - 11.5]
        assert int(model.count.value) == 1
        second = transforms.grad(lambda v: transforms.grad(lambda u: u**3)(v)[()])(ab.Param(2.0))
        assert float(second[()]) == 12.0

    def test_of_methods_and_callable_modules(self):
        """C3."""
        model = Model()
        grad = transforms.grad(model.loss)(jnp.array([3.0, 4.0]))
        assert grad.tolist() == [3.0, 6.0]
        assert int(model.count.value) == 1

    def test_equals_plain_jax_on_plain_arrays(self):
        x = jnp.linspace(0.1, 1.0, 5)
        f = lambda x, y: (jnp.sin(x) * y).sum()  # noqa: E731 (one line is clearer)
        ours = transforms.value_and_grad(f, argnums=(0, 1))(x, 2.0)
        theirs = jax.value_and_grad(f, argnums=(0, 1))(x, 2.0)
        assert np.allclose(ours[0], theirs[0])
        assert all(np.allclose(a, b) for a, b in zip(ours[1], theirs[1], strict=True))

    def test_a_variable_can_be_the_loss(self):
        v = ab.Param(3.0)
        value, grads = transforms.value_and_grad(lambda v: v)(v)
        assert value is v
        assert float(grads[()]) == 1.0

    def test_holomorphic(self):
        grads = transforms.grad(lambda z: z * z, holomorphic=True)(1.0 + 2.0j)
        assert grads == 2.0 + 4.0j
