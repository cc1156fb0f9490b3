"""C11: keyword arguments, keyword-only arguments, defaults; axes and argnums by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab

LANES = 8
X = jnp.arange(float(LANES))
BOTH = pytest.mark.parametrize("lanes", [ab.vmap, ab.pmap], ids=["vmap", "pmap"])


def affine(model, x, *, shift, scale=2.0):
    model["calls"].value = model["calls"] + 1
    return (model["w"] * x + shift) * scale


def make():
    return {"w": ab.Param(3.0), "calls": ab.Variable(0)}


def expected(shift, scale=2.0):
    return ((3.0 * X + shift) * scale).tolist()


@BOTH
class TestAxes:
    def test_by_name_however_the_argument_is_passed(self, lanes):
        model = make()
        f = lanes(affine, in_axes={"model": None, "shift": None})
        assert f(model, X, shift=1.0).tolist() == expected(1.0)
        assert f(shift=1.0, x=X, model=model).tolist() == expected(1.0)
        assert int(model["calls"].value) == 2

    def test_defaults_are_no_arguments(self, lanes):
        model = make()
        axes = {"model": None, "shift": 0, "scale": None}
        f = lanes(affine, in_axes=axes)
        assert f(model, X, shift=X).tolist() == expected(X)
        assert f(model, X, shift=X, scale=4.0).tolist() == expected(X, 4.0)

    def test_a_position_counts_for_what_is_passed_by_keyword(self, lanes):
        def f(model, x, scale=2.0):
            return model["w"] * x * scale

        mapped = lanes(f, in_axes=(None, 0, None))
        model = make()
        assert mapped(model, X).tolist() == (6.0 * X).tolist()
        assert mapped(model, x=X, scale=1.0).tolist() == (3.0 * X).tolist()
        assert mapped(x=X, model=model).tolist() == (6.0 * X).tolist()

    def test_containers_and_filters_by_name(self, lanes):
        axes = {
            "model": ab.StateAxes({ab.Param: 0, ...: None}),
            "batch": {"x": 0, "y": None},
        }

        def f(model, batch):
            return model["w"] * batch["x"] + batch["y"]

        model = {"w": ab.Param(X), "calls": ab.Variable(0)}
        out = lanes(f, in_axes=axes)(model, batch={"x": X, "y": 1.0})
        assert out.tolist() == (X * X + 1).tolist()

    def test_variadic_arguments_have_their_own_names(self, lanes):
        def f(x, *rest, **more):
            return x + sum(rest) + sum(more.values())

        mapped = lanes(f, in_axes={"rest": None, "more": None})
        assert mapped(X, 1.0, 2.0, a=3.0).tolist() == (X + 6).tolist()

    def test_methods_partials_and_callable_modules(self, lanes):
        class Scale(ab.Module):
            def __init__(self):
                self.w = ab.Param(2.0)

            def __call__(self, x, *, by):
                return self.w * x * by

            run = __call__

        scale = Scale()
        for target in (scale, scale.run, functools.partial(Scale.run, scale)):
            assert lanes(target, in_axes={"by": None})(X, by=3.0).tolist() == (6 * X).tolist()

    def test_names_that_there_are_not(self, lanes):
        with pytest.raises(ab.errors.StructureError, match=r"'y'.*affine.*'shift'"):
            lanes(affine, in_axes={"y": 0})(make(), X, shift=1.0)
        with pytest.raises(ab.errors.StructureError, match="specification has 3 entries"):
            lanes(lambda x: x, in_axes=(0, 0, 0))(X)


class TestArgnums:
    def loss(self, model, x, *, w=1.0, b):
        return (model["w"] * x * w + b).sum()

    def test_by_name_however_the_argument_is_passed(self):
        def f(a, b=2.0, *, c):
            return a * b * c

        for args, kwargs in (((3.0, 5.0), {}), ((3.0,), {"b": 5.0}), ((), {"a": 3.0, "b": 5.0})):
            grad = ab.grad(f, argnums="b")(*args, c=7.0, **kwargs)
            assert float(grad) == 21.0
            ga, gc = ab.grad(f, argnums=("a", "c"))(*args, c=7.0, **kwargs)
            assert (float(ga), float(gc)) == (35.0, 15.0)
            assert float(ab.grad(f, argnums=1)(*args, c=7.0, **kwargs)) == 21.0

    def test_part_of_an_argument_by_name(self):
        model = {"w": ab.Param(3.0), "s": ab.BatchStat(2.0)}

        def f(x, *, model):
            return model["w"] * model["s"] * x

        value, grads = ab.value_and_grad(f, argnums="model")(5.0, model=model)
        assert float(value) == 30.0
        assert grads["w"].flat() == {(): 10.0}
        assert not grads["s"].leaves
        (by_kind,) = ab.grad(f, argnums=(ab.DiffState("model", ab.BatchStat),))(5.0, model=model)
        assert by_kind["s"].flat() == {(): 15.0}

    def test_jacobians_by_name(self):
        x = jnp.arange(3.0)
        for jacobian in (ab.jacfwd, ab.jacrev):
            found = jacobian(lambda a, *, x: a * x**2, argnums="x")(2.0, x=x)
            assert found.tolist() == jnp.diag(4 * x).tolist()
        assert float(ab.hessian(lambda a, *, x: a * x**3, argnums="x")(2.0, x=1.0)) == 12.0

    def test_what_is_not_passed_cannot_be_differentiated(self):
        def f(a, b=2.0):
            return a * b

        for argnums in ("b", 1, "c"):
            with pytest.raises(ab.errors.StructureError, match=f"{argnums!r}.*defaults"):
                ab.grad(f, argnums=argnums)(1.0)
        with pytest.raises(ab.errors.StructureError, match="positions, names"):
            ab.grad(f, argnums=1.5)(1.0)


class TestShardingNames:
    """Metadata that name axes follow the rank."""

    def test_a_lane_sees_no_name_for_its_axis(self):
        seen = []

        def f(v, w):
            seen.append((v.sharding, w.sharding))
            v.value = v * 2
            return v + w

        v = ab.Param(jnp.ones((3, 4)), sharding=("layers", "model"))
        w = ab.Param(jnp.ones((4, 3)), sharding=jax.sharding.PartitionSpec("model"))
        before = ab.graphdef([v, w])
        ab.vmap(f, in_axes=(0, 1))(v, w)
        assert seen == [(("model",), jax.sharding.PartitionSpec("model"))]
        assert ab.graphdef([v, w]) is before
        assert v.value.tolist() == [[2.0] * 4] * 3

    def test_a_new_variable_gets_a_name_for_its_axis(self):
        def create(x):
            return ab.Param(x, sharding=("model",)), ab.Param(x.sum(), sharding=())

        x = jnp.ones((3, 4))
        out, scalar = ab.vmap(create, sharding_name="layers")(x)
        assert out.sharding == ("layers", "model")
        assert scalar.sharding == ("layers",)
        out, _ = ab.vmap(create, out_axes=(1, 0), sharding_name="layers")(x)
        assert out.value.shape == (4, 3)
        assert out.sharding == ("model", "layers")
        out, _ = ab.vmap(create)(x)
        assert out.sharding == (None, "model")

    def test_nested_lanes_and_attributes(self):
        class Model(ab.Module):
            def __init__(self, x):
                self.w = ab.Param(x, sharding=("model",))

        x = jnp.ones((2, 3, 4))
        make = ab.vmap(ab.vmap(Model, sharding_name="inner"), sharding_name="outer")
        model = make(x)
        assert model.w.sharding == ("outer", "inner", "model")

        def extend(model):
            assert model.w.sharding == ("model",)
            model.b = model.w.replace(model.w.value.sum(), sharding=())

        ab.vmap(ab.vmap(extend, sharding_name="inner"), sharding_name="outer")(model)
        assert model.b.sharding == ("outer", "inner")
        assert model.w.sharding == ("outer", "inner", "model")

    def test_names_that_are_set_inside_come_back_with_the_axis(self):
        def f(v):
            v.set_metadata(sharding=("data",))

        v = ab.Param(jnp.ones((3, 4)), sharding=("layers", "model"))
        ab.vmap(f, sharding_name="layers")(v)
        assert v.sharding == ("layers", "data")

    def test_broadcast_variables_and_short_names_stay(self):
        def f(v, w, x):
            assert v.sharding == ("a", "b")
            assert w.sharding == ("a",)
            v.value = v + 1
            return x

        v = ab.Param(jnp.ones((3, 4)), sharding=("a", "b"))
        w = ab.Param(jnp.ones((3, 4)), sharding=("a",))  # the second axis has no name
        ab.vmap(f, in_axes=(None, 1, 0))(v, w, jnp.ones(4))
        assert v.sharding == ("a", "b")
        assert w.sharding == ("a",)
