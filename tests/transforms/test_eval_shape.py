"""`eval_shape` and `make_jaxpr`: what a call would do, without doing it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms


class Model(ab.Module):
    def __init__(self, key=None, size=3) -> None:
        key = jax.random.key(0) if key is None else key
        self.w = ab.Param(jax.random.normal(key, (size, size)))
        self.tied = self.w
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.calls = 0

    def __call__(self, x, *, scale=1.0):
        self.count.value = self.count + 1
        self.calls += 1
        self.cache = ab.Cache(x @ self.w)
        return self.cache * scale


def unchanged(model):
    return list(vars(model)) == ["w", "tied", "count", "calls"] and int(model.count) == 0


class TestEvalShape:
    def test_results_are_shapes_and_nothing_is_changed(self):
        model = Model()
        out = transforms.eval_shape(model, jnp.ones((2, 3)), scale=2.0)
        assert (out.shape, out.dtype) == ((2, 3), jnp.float32)
        assert type(out) is jax.ShapeDtypeStruct
        assert unchanged(model)

    def test_arguments_come_back_as_copies_as_the_call_would_leave_them(self):
        def f(model, x):
            model(x)
            model.w, model.count = model.count, model.w
            return model, [model.w, model.tied], x

        model = Model()
        shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        copy, (w, tied), x = transforms.eval_shape(f, model, shape)
        assert unchanged(model)
        assert copy is not model
        assert type(copy) is Model
        assert copy.w is w
        assert copy.tied is copy.count is tied
        assert tied is not model.w
        assert (w.value.shape, w.value.dtype) == ((), jnp.int32)
        assert tied.value.shape == (3, 3)
        assert copy.cache.value.shape == (2, 3)
        assert copy.calls == 1
        assert x.shape == (2, 3)

    def test_a_model_of_shapes_goes_in_and_out(self):
        abstract = transforms.eval_shape(functools.partial(Model, size=3), jax.random.key(1))
        assert abstract.tied is abstract.w
        assert type(abstract.w.value) is jax.ShapeDtypeStruct
        before = abstract.w.value
        out = transforms.eval_shape(Model.__call__, abstract, jnp.ones((5, 3)))
        assert out.shape == (5, 3)
        assert abstract.w.value is before
        assert not hasattr(abstract, "cache")
        with pytest.raises(TypeError):
            transforms.eval_shape(Model.__call__, abstract, jnp.ones((5, 4)))

    def test_equals_jax_and_the_method_of_jit(self):
        model, x = Model(), jnp.ones((2, 3))
        ours = transforms.eval_shape(Model.__call__, model, x)
        theirs = jax.eval_shape(lambda w, x: x @ w, model.w.value, x)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        staged = transforms.jit(Model.__call__).eval_shape(model, x)
        assert (staged.shape, staged.dtype) == (ours.shape, ours.dtype)

    def test_a_changed_closure_is_seen(self):
        size = 3

        def f():
            return jnp.ones(size)

        assert transforms.eval_shape(f).shape == (3,)
        size = 4
        assert transforms.eval_shape(f).shape == (4,)

    def test_numbers_keys_and_weak_types(self):
        out = transforms.eval_shape(lambda n, k, v: (n, k, v), 1, jax.random.key(0), ab.Param(2.0))
        n, key, v = out
        theirs = jax.eval_shape(lambda n, k: (n, k), 1, jax.random.key(0))
        assert (n.dtype, n.weak_type) == (theirs[0].dtype, True)
        assert key.dtype == theirs[1].dtype
        assert v.value.shape == ()

    def test_inside_jit_and_after_failures(self):
        model = Model()

        def f(model, x):
            return jnp.zeros(transforms.eval_shape(Model.__call__, model, x).shape)

        assert transforms.jit(f)(model, jnp.ones((2, 3))).shape == (2, 3)

        def fails(model):
            model.calls = 5
            raise KeyError("no")

        with pytest.raises(KeyError):
            transforms.eval_shape(fails, model)
        shown = transforms.eval_shape(lambda: model)
        assert shown is not model
        assert isinstance(shown.w.value, jax.ShapeDtypeStruct)
        assert unchanged(model)


class TestMakeJaxpr:
    def test_inputs_are_leaves_and_outputs_what_is_written_or_returned(self):
        model = Model()
        jaxpr = transforms.make_jaxpr(Model.__call__)(model, jnp.ones((2, 3)))
        assert [a.shape for a in jaxpr.in_avals] == [(3, 3), (), (2, 3)]
        assert sorted(a.shape for a in jaxpr.out_avals) == [(), (2, 3), (2, 3)]
        assert unchanged(model)
        assert " dot_general" in str(jaxpr)

    def test_static_arguments_and_shapes(self):
        def f(model, flag):
            return (model, model.w * 2) if flag else model.count.value

        model = Model()
        make = transforms.make_jaxpr(f, static_argnums=1, return_shape=True)
        jaxpr, (copy, double) = make(model, True)
        assert double.shape == (3, 3)
        assert type(copy) is Model
        assert copy is not model
        assert len(jaxpr.eqns) == 1
        jaxpr, count = make(model, False)
        assert count.shape == ()
        assert jaxpr.out_avals == []  # it is passed on as it is

    def test_is_what_jax_stages_for_the_split_function(self):
        model = Model()
        ours = transforms.make_jaxpr(lambda m, x: jnp.sin(x @ m.w).sum())(model, jnp.ones((2, 3)))
        theirs = jax.make_jaxpr(lambda w, n, x: jnp.sin(x @ w).sum())(
            model.w.value, model.count.value, jnp.ones((2, 3))
        )
        assert [e.primitive.name for e in ours.eqns] == [e.primitive.name for e in theirs.eqns]

    def test_a_changed_closure_is_seen(self):
        """C38."""
        factor = 2.0

        def f(v):
            return v * factor

        make = transforms.make_jaxpr(f)
        v = ab.Param(jnp.ones(()))
        assert "2.0" in str(make(v))
        factor = 7.0
        assert "7.0" in str(make(v))

    def test_axis_env_and_methods(self):
        class Child(Model):
            def total(self, x):
                return jax.lax.psum(x, "i")

        model = Child()
        jaxpr = transforms.make_jaxpr(model.total, axis_env=[("i", 4)])(jnp.ones(2))
        assert "psum" in str(jaxpr)
        assert unchanged(model)
