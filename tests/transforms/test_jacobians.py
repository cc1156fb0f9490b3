"""`jacfwd`, `jacrev`, `hessian`: equal to JAX on the split function; writes come back once: C15."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import FilterError, StructureError

BOTH = pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
ALL = pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
X = jnp.array([0.3, 0.7, 0.2])
W, B = jnp.array([1.0, 2.0, 0.5]), jnp.array(0.5)


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(W)
        self.b = ab.Param(B)
        self.stat = ab.BatchStat(jnp.array(3.0))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.calls = 0

    def apply(self, x):
        self.count.value = self.count + 1
        self.calls += 1
        self.stat.value = self.stat + self.w.sum()
        return jnp.sin(self.w * x)[:2] * self.stat + self.b**2


def pure(w, b, x):
    return jnp.sin(w * x)[:2] * (3.0 + w.sum()) + b**2


def written_once(model):
    return int(model.count) == 1 and model.calls == 1 and float(model.stat) == 6.5


@BOTH
class TestJacobian:
    def test_equals_jax_on_the_split_function(self, name):
        model = Model()
        ours = getattr(transforms, name)(Model.apply)(model, X)
        w, b = getattr(jax, name)(pure, argnums=(0, 1))(W, B, X)
        assert written_once(model)
        assert isinstance(ours, ab.State)
        assert ours.paths == (("w",), ("b",))
        assert ours["w"].shape == (2, 3)
        assert np.allclose(ours["w"], w)
        assert np.allclose(ours["b"], b)

    def test_several_argnums_aux_and_form_of_the_output(self, name):
        def f(m, x):
            y = m.apply(x)
            return {"y": y, "s": (y.sum(),)}, m

        model = Model()
        jac, same = getattr(transforms, name)(f, argnums=(0, 1), has_aux=True)(model, X)
        w, b, x = getattr(jax, name)(pure, argnums=(0, 1, 2))(W, B, X)
        assert same is model
        assert written_once(model)
        assert np.allclose(jac["y"][0]["w"], w)
        assert np.allclose(jac["y"][1], x)
        assert np.allclose(jac["s"][0][0]["b"], b.sum(0))
        assert np.allclose(jac["s"][0][1], x.sum(0))

    def test_decorator_with_options_on_a_method_and_kwargs(self, name):
        transform = getattr(transforms, name)

        class Child(Model):
            @transform(argnums=1)
            def slope(self, x, *, scale=1.0):
                return self.apply(x) * scale

        model = Child()
        jac = model.slope(X, scale=2.0)
        assert np.allclose(jac, 2 * getattr(jax, name)(pure, argnums=2)(W, B, X), rtol=1e-5)
        assert written_once(model)
        assert Child.slope.__name__ == "slope"

    def test_bound_methods_are_differentiated_by_their_arguments(self, name):
        model = Model()
        jac = getattr(transforms, name)(model.apply)(X)
        assert np.allclose(jac, getattr(jax, name)(pure, argnums=2)(W, B, X), rtol=1e-5)
        assert written_once(model)

    def test_chosen_by_filter(self, name):
        jac = getattr(transforms, name)(Model.apply, argnums=ab.DiffState(0, ab.BatchStat))
        assert np.allclose(jac(Model(), X)["stat"], jnp.sin(W * X)[:2])
        with pytest.raises(FilterError, match=r"args\[0\]"):
            getattr(transforms, name)(Model.apply, argnums=ab.DiffState(0, ab.Cache))(Model(), X)

    def test_holomorphic(self, name):
        z = jnp.array([1.0 + 2.0j, 0.5j])
        ours = getattr(transforms, name)(lambda z: z**2, holomorphic=True)(z)
        assert np.allclose(ours, jnp.diag(2 * z))

    def test_containers_keep_their_form(self, name):
        x = {"a": jnp.ones(2), "n": 3, "m": [ab.Param(jnp.array(2.0))]}
        jac = getattr(transforms, name)(lambda t: t["a"] * t["m"][0] * t["n"])(x)
        assert jac["n"] is None
        assert jac["a"].tolist() == [[6.0, 0.0], [0.0, 6.0]]
        assert jac["m"][0][()].tolist() == [3.0, 3.0]


class TestHessian:
    def test_is_a_state_of_states(self):
        model = Model()
        ours = transforms.hessian(lambda m, x: m.apply(x).sum())(model, X)
        theirs = jax.hessian(lambda w, b: pure(w, b, X).sum(), argnums=(0, 1))(W, B)
        assert written_once(model)
        assert isinstance(ours, ab.State)
        for i, a in enumerate("wb"):
            assert isinstance(ours[a], ab.State)
            for j, b in enumerate("wb"):
                assert np.allclose(ours[a][b], theirs[i][j], rtol=1e-4, atol=1e-6)

    def test_several_argnums_and_aux(self):
        def f(m, x):
            return m.apply(x).sum(), {"m": m}

        model = Model()
        ours, aux = transforms.hessian(f, argnums=(0, 1), has_aux=True)(model, X)
        theirs = jax.hessian(lambda w, b, x: pure(w, b, x).sum(), argnums=(0, 2))(W, B, X)
        assert aux["m"] is model
        assert written_once(model)
        assert np.allclose(ours[0]["w"][0]["w"], theirs[0][0], rtol=1e-4, atol=1e-6)
        assert np.allclose(ours[0]["w"][1], theirs[0][1], rtol=1e-4, atol=1e-6)
        assert np.allclose(ours[1][0]["w"], theirs[1][0], rtol=1e-4, atol=1e-6)
        assert np.allclose(ours[1][1], theirs[1][1], rtol=1e-4, atol=1e-6)

    def test_equals_jax_on_plain_arrays(self):
        f = lambda x: jnp.sin(x).prod()  # noqa: E731
        assert np.allclose(transforms.hessian(f)(X), jax.hessian(f)(X), rtol=1e-5)

    def test_bound_methods_and_callable_modules(self):
        class Child(Model):
            def total(self, x):
                return self.apply(x).sum()

            def __call__(self, x):
                return self.total(x)

        theirs = jax.hessian(lambda x: pure(W, B, x).sum())(X)
        for method in (Child.total, Child.__call__, None):
            model = Child()
            bound = model if method is None else method.__get__(model)
            assert np.allclose(transforms.hessian(bound)(X), theirs, rtol=1e-4, atol=1e-6)
            assert written_once(model)

    def test_integers_are_accepted_on_request(self):
        n = ab.Variable(jnp.array(2))
        jac = transforms.jacrev(
            lambda v, x: v * x, argnums=(ab.DiffState(0, ...), 1), allow_int=True
        )(n, 3.0)
        theirs = jax.jacrev(lambda n, x: n * x, argnums=(0, 1), allow_int=True)(2, 3.0)
        assert jac[0][()].dtype == theirs[0].dtype
        assert float(jac[1]) == float(theirs[1]) == 2.0


@ALL
class TestContract:
    def test_structure_changes_come_back(self, name):
        def f(m, x):
            m.w, m.b = m.b, m.w
            m.me = m
            m.extra = [ab.Cache(x * 2)]
            m.calls = "text"
            return (m.w * x).sum()

        model = Model()
        w, b = model.w, model.b
        getattr(transforms, name)(f)(model, X)
        assert model.w is b
        assert model.b is w
        assert model.me is model
        assert model.calls == "text"
        assert model.extra[0].value.tolist() == (X * 2).tolist()

    def test_failures_change_nothing(self, name):
        def f(m, x):
            m.apply(x)
            m.new = 1
            return m.apply(x), "text"

        model = Model()
        before, stat = dict(vars(model)), model.stat.value
        with pytest.raises(StructureError, match=r"return value\[1\]"):
            getattr(transforms, name)(f)(model, X)
        assert dict(vars(model)) == before
        assert model.stat.value is stat

    def test_the_function_runs_once(self, name):
        runs = []

        def f(m, x):
            runs.append(1)
            return m.apply(x)

        getattr(transforms, name)(f)(Model(), X)
        assert len(runs) == 1

    def test_nested_in_jit_and_vmap(self, name):
        def f(m, x):
            return getattr(transforms, name)(lambda m, x: m.apply(x).sum())(m, x)

        model = Model()
        out = transforms.jit(f)(model, X)
        assert written_once(model)
        again = f(Model(), X)
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True):
            assert np.allclose(a, b, rtol=1e-4, atol=1e-6)
        model = Model()
        lanes = transforms.vmap(f, in_axes=(None, 0))(model, jnp.stack([X * 2, X]))
        assert written_once(model)
        for a, b in zip(jax.tree.leaves(lanes), jax.tree.leaves(again), strict=True):
            assert np.allclose(a[1], b, rtol=1e-4, atol=1e-6)
