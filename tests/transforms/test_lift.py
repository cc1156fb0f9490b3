"""`lift`: any transform from functions to functions, without a line for any of them."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import anabranch as ab
from anabranch import transforms
from anabranch.errors import CapturedWriteError, StructureError

X = jnp.array([0.5, 1.5])


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]))
        self.n = ab.Variable(jnp.zeros((), jnp.int32))
        self.table = jnp.ones(2)
        self.calls = 0

    def apply(self, x, *, scale=1.0):
        self.n.value = self.n + 1
        self.calls += 1
        return self.w * x * scale


# -- transforms as somebody else would write them ----------------------------------------------


def double_inputs(function):
    """Double every floating point input."""

    def double(x):
        return 2 * x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    def call(*args, **kwargs):
        return function(*jax.tree.map(double, args), **jax.tree.map(double, kwargs))

    return call


def logged(function, log):
    """Record the shapes that go in and come out."""

    def call(*args, **kwargs):
        log.append([jnp.shape(x) for x in jax.tree.leaves((args, kwargs))])
        out = function(*args, **kwargs)
        log.append([jnp.shape(x) for x in jax.tree.leaves(out)])
        return out

    return call


def taylor(function, order=2):
    """Return the value and its Taylor coefficients along a direction of ones."""

    def call(*args):
        primals, tree = jax.tree.flatten(args)
        series = [[jnp.ones_like(x), *[jnp.zeros_like(x)] * (order - 1)] for x in primals]
        return jet.jet(lambda *xs: function(*tree.unflatten(xs)), primals, series)

    return call


def staged(function):
    """Evaluate a jaxpr, as interpreters do."""

    def call(*args, **kwargs):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        out = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


def in_three_lanes(function):
    """Run three equal lanes."""

    def call(*args, **kwargs):
        run = functools.partial(function, **kwargs)
        return jax.vmap(run, in_axes=None, out_axes=None, axis_size=3)(*args)

    return call


ALIKE = {
    "named_call": jax.named_call,
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "staged": staged,
    "logged": functools.partial(logged, log=[]),
    "vmap": in_three_lanes,
    "identity": lambda function: function,
}
alike = pytest.mark.parametrize("transform", ALIKE.values(), ids=ALIKE)


@alike
class TestTransformsThatTreatLeavesAlike:
    """They equal the plain call."""

    def test_values_structure_and_identity(self, transform):
        def change(a, b, x, *, scale):
            y = a.apply(x, scale=scale)
            a.w, b.w = b.w, a.w
            a.new = a.alias = ab.Cache(y * 2)
            a.me = a
            del b.calls
            b.table = b.table + 1
            return b, [a.new, y]

        a, b = Model(), Model()
        a_w, b_w, table = a.w, b.w, a.table
        same, (new, y) = transforms.lift(transform)(change)(a, b, X, scale=2.0)
        assert same is b
        assert new is a.new is a.alias
        assert np.allclose(y, b.w * X * 2)
        assert np.allclose(new.value, y * 2)
        assert a.w is b_w
        assert b.w is a_w
        assert a.me is a
        assert int(a.n) == a.calls == 1
        assert a.table is table
        assert b.table.tolist() == [2.0, 2.0]
        assert not hasattr(b, "calls")

    def test_one_object_in_two_arguments_is_one(self, transform):
        def f(a, b, w):
            assert a is b
            assert a.w is w
            w.value = w * 3
            return a is b

        model = Model()
        assert transforms.lift(transform)(f)(model, model, model.w) is True
        assert model.w.value.tolist() == [3.0, 6.0]

    def test_bound_methods_callables_and_partials(self, transform):
        model = Model()
        call = transforms.lift(transform)(model.apply)
        for i in (1, 2):
            assert np.allclose(call(X), model.w * X)
            assert int(model.n) == model.calls == i
        assert np.allclose(
            transforms.lift(transform)(functools.partial(Model.apply, model, scale=2.0))(X),
            model.w * X * 2,
        )
        assert model.calls == 3

    def test_methods_in_a_class_body_keep_their_signature(self, transform):
        class Child(Model):
            @transforms.lift(transform)
            def step(self, x, *, scale=1.0):
                """Doc."""
                return self.apply(x, scale=scale)

        child = Child()
        assert np.allclose(child.step(X, scale=3.0), child.w * X * 3)
        assert child.calls == 1
        assert Child.step.__doc__ == "Doc."

    def test_failures_change_nothing(self, transform):
        def fails(model, x):
            model.apply(x)
            model.new = 1
            raise TypeError("mine")

        model = Model()
        before, n = dict(vars(model)), model.n.value
        with pytest.raises(TypeError, match=r"^mine"):
            transforms.lift(transform)(fails)(model, X)
        assert dict(vars(model)) == before
        assert model.n.value is n

    def test_captured_objects_are_written_and_kept(self, transform):
        """Also where the function runs in the trace of the caller."""
        outer, model = Model(), Model()

        def keep(model):
            model.kept = outer.w

        assert transforms.lift(transform)(lambda m: outer)(model) is outer
        assert transforms.lift(transform)(lambda m: [outer.n])(model)[0] is outer.n
        transforms.lift(transform)(keep)(model)
        assert model.kept is outer.w
        transforms.lift(transform)(lambda m: setattr(outer, "calls", 7))(model)
        assert outer.calls == 7

    def test_hidden_objects_are_neither_copied_nor_written(self, transform):
        hidden = types.SimpleNamespace(outer=Model())
        for f in (
            lambda m: hidden.outer,
            lambda m: setattr(m, "kept", hidden.outer),
            lambda m: setattr(hidden.outer, "calls", 7),
        ):
            with pytest.raises(CapturedWriteError):
                transforms.lift(transform)(f)(Model())
        assert hidden.outer.calls == 0
        hidden.outer.calls = 1  # and outside it can be written as before
        assert hidden.outer.calls == 1

    def test_new_objects_can_be_written_inside_and_afterwards(self, transform):
        def f(x):
            new = Model()
            new.apply(x)
            return transforms.jit(lambda m: (m.apply(x), m)[1])(new)

        new = transforms.lift(transform)(f)(X)
        assert new.calls == 2
        new.apply(X)
        assert new.calls == 3

    def test_nested_in_jit_grad_and_itself(self, transform):
        lifted = transforms.lift(transform)
        twice = lifted(lambda m, x: lifted(Model.apply)(m, lifted(Model.apply)(m, x)))
        model = Model()
        out = transforms.jit(twice)(model, X)
        assert np.allclose(out, model.w * model.w * X)
        assert int(model.n) == model.calls == 2
        grads = transforms.grad(lambda m, x: twice(m, x).sum())(model, X)
        assert np.allclose(grads["w"], 2 * model.w * X)
        assert int(model.n) == 4
        lanes = transforms.vmap(twice, in_axes=(None, 0))(model, jnp.stack([X, 2 * X]))
        assert np.allclose(lanes[1], model.w * model.w * X * 2)
        assert int(model.n) == 6

    def test_a_dropped_model_is_collected(self, transform):
        lifted = transforms.lift(transform)(Model.apply)
        model = Model()
        lifted(model, X)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


class TestCaching:
    @pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
    def test_a_transform_that_caches_still_does(self, transform):
        runs = []

        def f(model, x):
            runs.append(1)
            return model.apply(x)

        lifted = transforms.lift(transform)(f)
        model = Model()
        for _ in range(3):
            assert np.allclose(lifted(model, X), model.w * X)
            model.calls = 0  # a static value that changes is another structure
        lifted(Model(), 2 * X)
        assert len(runs) == 1

    def test_what_a_bound_object_holds_is_read_anew(self):
        model = Model()
        call = transforms.lift(jax.jit)(model.apply)
        call(X)
        model.w.value = jnp.array([10.0, 20.0])
        assert np.allclose(call(X), model.w * X)

    def test_options_and_decorators(self):
        named = transforms.lift(jax.named_call)
        text = jax.jit(named(lambda v: v * 2, name="abcde")).lower(1.0).as_text(debug_info=True)
        assert "abcde" in text
        text = jax.jit(named(name="fghij")(lambda v: v * 2)).lower(1.0).as_text(debug_info=True)
        assert "fghij" in text

        def klmno(v):
            return v * 2

        assert "klmno" in jax.jit(named(klmno)).lower(1.0).as_text(debug_info=True)

    def test_named_call_is_concrete_where_the_caller_is(self):
        def f(v):
            if v > 0:
                v.value = v - 1
            return float(v)

        assert transforms.lift(jax.named_call)(f)(ab.Variable(1.0)) == 0.0


class TestThirdParty:
    def test_inputs_are_doubled_and_the_rest_is_left_alone(self):
        def f(model, x, *, y):
            model.n.value = model.n + 1
            model.table = model.w + 0
            return model.w * x + y

        model = Model()
        w = model.w.value
        out = transforms.lift(double_inputs)(f)(model, X, y=1.0)
        assert np.allclose(out, 2 * w * 2 * X + 2.0)
        assert model.table.tolist() == [2.0, 4.0]
        assert model.w.value is w
        assert int(model.n) == 1

    def test_an_unchanged_array_beside_a_changed_one_does_not_pass_through(self):
        def f(model):
            model.calls = 5

        model = Model()
        table = model.table
        transforms.lift(double_inputs)(f)(model)
        assert model.calls == 5
        assert model.table is table

    def test_what_the_function_holds_is_closed_over(self):
        model = Model()
        out = transforms.lift(double_inputs)(model.apply)(X)
        assert np.allclose(out, model.w * 2 * X)
        assert int(model.n) == 1

    def test_every_array_is_seen_once(self):
        log = []
        model = Model()
        transforms.lift(logged)(Model.apply, log)(model, X)
        assert log == [[(2,), (), (2,), (2,)], [(), (2,)]]

    def test_a_taylor_series_beside_the_value(self):
        def f(v, x):
            v.value = v + 1
            return {"y": (jnp.sin(v.value * x),)}

        v = ab.Param(jnp.array(0.5))
        value, series = transforms.lift(taylor)(f)(v, jnp.array(2.0))
        theirs = taylor(lambda v, x: jnp.sin((v + 1) * x))(jnp.array(0.5), jnp.array(2.0))
        assert np.allclose(value["y"][0], theirs[0])
        assert np.allclose(series["y"][0], theirs[1])
        assert float(v) == 1.5
        with pytest.raises(StructureError, match="several times"):
            transforms.lift(taylor)(lambda v: v)(v)
        assert float(v) == 1.5

    def test_a_transform_that_drops_the_result_is_refused(self):
        def drop(function):
            return lambda *args: [function(*args), None][1]

        model = Model()
        with pytest.raises(StructureError, match="nothing of what its function returned"):
            transforms.lift(drop)(Model.apply)(model, X)
        assert int(model.n) == 0


class TestLanes:
    """`jax.vmap` without a line for it."""

    def test_axes_are_those_of_the_arguments(self):
        f = lambda m, x, scale: m.w * x * scale  # noqa: E731
        model = Model()
        xs = jnp.stack([X, 2 * X], axis=1)
        lanes = transforms.lift(functools.partial(jax.vmap, in_axes=(None, 1, None)))(f)
        assert np.allclose(lanes(model, xs, 3.0), (model.w * xs.T) * 3)
        out = transforms.lift(functools.partial(jax.vmap, in_axes=(None, 1, None), out_axes=1))(f)
        assert np.allclose(out(model, xs, 3.0), ((model.w * xs.T) * 3).T)

    def test_state_of_each_lane_is_written(self):
        def step(model, x):
            y = model.apply(x)
            model.w.value = model.w - y
            model.last = ab.Cache(y)
            return y

        models = transforms.vmap(lambda _: Model())(jnp.arange(3))
        w = models.w.value
        xs = jnp.arange(6.0).reshape(3, 2)
        y = transforms.lift(jax.vmap)(step)(models, xs)
        assert np.allclose(y, w * xs)
        assert np.allclose(models.w, w - y)
        assert models.n.value.tolist() == [1, 1, 1]
        assert np.allclose(models.last, y)
        assert models.calls == 1
        jitted = transforms.jit(transforms.lift(jax.vmap)(step))
        jitted(models, xs)
        assert models.n.value.tolist() == [2, 2, 2]

    def test_a_bound_self_is_broadcast_and_cannot_be_written(self):
        class Child(Model):
            def read(self, x):
                return self.w * x

        model = Child()
        assert np.allclose(transforms.lift(jax.vmap)(model.read)(X[:, None]), X[:, None] * model.w)
        with pytest.raises(StructureError, match=r"n.*was written.*\(2,\).*had shape \(\)"):
            transforms.lift(jax.vmap)(model.apply)(X[:, None])
        assert int(model.n) == 0
        assert model.calls == 0

    def test_what_is_broadcast_cannot_be_written(self):
        model = Model()
        lanes = transforms.lift(functools.partial(jax.vmap, in_axes=(None, 0)))
        with pytest.raises(StructureError, match=r"args\[0\]\['n'\] was written"):
            lanes(Model.apply)(model, X[:, None])
        assert int(model.n) == 0

    def test_another_axis_is_noticed_also_for_square_arrays(self):
        v = ab.Param(jnp.arange(4.0).reshape(2, 2))
        before = v.value

        def double(v):
            v.value = v * 2

        lanes = transforms.lift(functools.partial(jax.vmap, in_axes=1))(double)
        with pytest.raises(StructureError, match="another axis"):
            lanes(v)
        assert v.value is before
        lanes = transforms.lift(functools.partial(jax.vmap, in_axes=1, out_axes=1))(double)
        lanes(v)
        assert np.allclose(v, before * 2)

    def test_specifications_that_do_not_fit_are_our_errors(self):
        model = Model()
        vmap = jax.vmap
        with pytest.raises(StructureError, match="lifted transform failed"):
            transforms.lift(functools.partial(vmap, in_axes=(0, 0, 0)))(Model.apply)(model, X)
        with pytest.raises(StructureError, match="one value for all of it"):
            transforms.lift(functools.partial(vmap, in_axes=(None, 0), out_axes=(0, 1)))(
                lambda m, x: (x, x)
            )(model, X[:, None])
        with pytest.raises(StructureError, match="lifted transform failed"):
            transforms.lift(jax.grad)(Model.apply)(model, X)
        assert int(model.n) == 0
