"""`vjp`, `jvp`, `linearize`: equal to JAX on the split function; writes come back once (C15)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import AliasError, FilterError, StructureError


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]))
        self.b = ab.Param(jnp.array(0.5))
        self.stat = ab.BatchStat(jnp.array(3.0))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.calls = 0

    def apply(self, x):
        self.count.value = self.count + 1
        self.calls += 1
        self.stat.value = self.stat + self.w.sum()
        return jnp.sin(self.w * x) * self.stat + self.b


def pure(w, b, stat, x):
    return jnp.sin(w * x) * (stat + w.sum()) + b


X = jnp.array([0.3, 0.7])
ENTRY = (jnp.array([1.0, 2.0]), jnp.array(0.5), jnp.array(3.0), X)


def written_once(model):
    return int(model.count) == 1 and model.calls == 1 and float(model.stat) == 6.0


def params(w, b):
    return ab.State.from_flat({("w",): jnp.asarray(w), ("b",): jnp.asarray(b)}, kinds=ab.Param)


class TestVjp:
    def test_equals_jax_on_the_split_function(self):
        model = Model()
        out, pullback = transforms.vjp(Model.apply, model, X)
        expected, pull = jax.vjp(pure, *ENTRY)
        assert written_once(model)
        assert np.allclose(out, expected)
        for cotangent in (jnp.array([1.0, 0.0]), jnp.array([2.0, -1.0])):
            grads, dx = pullback(cotangent)
            w, b, _, x = pull(cotangent)
            assert grads.paths == (("w",), ("b",))
            assert np.allclose(grads["w"], w)
            assert np.allclose(grads["b"], b)
            assert np.allclose(dx, x)
        assert written_once(model)

    def test_aux_can_hold_objects(self):
        model = Model()

        def f(m, x):
            new = ab.Cache(m.w * 2)
            m.new = new
            return m.apply(x), (m, new)

        _, pullback, (same, new) = transforms.vjp(f, model, X, has_aux=True)
        assert same is model
        assert new is model.new
        assert new.value.tolist() == [2.0, 4.0]
        assert pullback(jnp.ones(2))[1].shape == (2,)

    def test_what_is_differentiated_is_chosen_with_argnums(self):
        model = Model()
        _, pullback = transforms.vjp(
            Model.apply, model, X, argnums=(ab.DiffState(0, ab.BatchStat),)
        )
        (grads,) = pullback(jnp.ones(2))
        assert grads.paths == (("stat",),)
        assert np.allclose(grads["stat"], jax.grad(lambda s: pure(*ENTRY[:2], s, X).sum())(3.0))
        with pytest.raises(FilterError, match="nothing is selected"):
            transforms.vjp(Model.apply, model, X, argnums=(ab.DiffState(0, ab.Cache),))
        with pytest.raises(FilterError, match=r"args\[0\]"):
            transforms.vjp(lambda n: n, 3)

    def test_integers_beside_have_no_gradient(self):
        out, pullback = transforms.vjp(lambda n, t: t["x"] ** n, 3, {"x": 2.0, "n": 1})
        assert float(out) == 8.0
        n, grads = pullback(1.0)
        assert n is None
        assert grads["n"] is None
        assert float(grads["x"]) == 12.0

    def test_the_output_keeps_its_form(self):
        f = lambda v, x: {"a": [v * x, None], "b": (x, 2.0)}  # noqa: E731
        x = jnp.array(5.0)
        out, pullback = transforms.vjp(f, ab.Param(jnp.array(3.0)), x)
        assert out["b"] == (x, 2.0)
        assert out["b"][0] is x
        zero = jnp.zeros(())
        grads, dx = pullback({"a": [jnp.ones(()), None], "b": (jnp.ones(()), zero)})
        assert float(grads[()]) == 5.0
        assert float(dx) == 4.0

    def test_objects_in_the_output_are_refused(self):
        model = Model()
        with pytest.raises(StructureError, match=r"the return value\[1\].*Model.*has_aux"):
            transforms.vjp(lambda m: (m.w.sum(), m), model)
        with pytest.raises(StructureError, match=r"\['w'\]: this is a Param"):
            transforms.vjp(lambda m: {"w": m.w}, model)
        with pytest.raises(StructureError, match="str"):
            transforms.vjp(lambda m: ["text", m.w.value], model)
        with pytest.raises(StructureError, match="pair"):
            transforms.vjp(lambda m: m.w.value, model, has_aux=True)

    def test_a_shared_variable_has_the_summed_gradient_once(self):
        model = Model()
        _, pullback = transforms.vjp(lambda m, w: (m.w * w).sum(), model, model.w)
        first, second = pullback(1.0)
        assert first["w"].tolist() == [2.0, 4.0]
        assert second.paths == ()

    def test_bound_methods_and_partials(self):
        model = Model()
        _, pullback = transforms.vjp(model.apply, X)
        (dx,) = pullback(jnp.ones(2))
        assert np.allclose(dx, jax.vjp(pure, *ENTRY)[1](jnp.ones(2))[3])
        assert written_once(model)
        other = Model()
        out, _ = transforms.vjp(functools.partial(Model.apply, other), X)
        assert np.allclose(out, pure(*ENTRY))
        assert written_once(other)

    def test_the_pullback_can_leave_jit(self):
        model = Model()
        out, pullback = transforms.jit(lambda m, x: transforms.vjp(Model.apply, m, x))(model, X)
        grads, _ = pullback(jnp.ones(2))
        assert written_once(model)
        assert np.allclose(out, pure(*ENTRY))
        assert np.allclose(grads["w"], jax.vjp(pure, *ENTRY)[1](jnp.ones(2))[0])


class TestJvp:
    def test_equals_jax_on_the_split_function(self):
        model = Model()
        tangent = params([1.0, -1.0], 2.0)
        out, change = transforms.jvp(Model.apply, (model, X), (tangent, jnp.array([0.1, 0.2])))
        zero = jnp.zeros(())
        expected = jax.jvp(pure, ENTRY, (tangent["w"], tangent["b"], zero, jnp.array([0.1, 0.2])))
        assert written_once(model)
        assert np.allclose(out, expected[0])
        assert np.allclose(change, expected[1])

    def test_a_missing_leaf_is_zero_and_any_kind_can_be_given(self):
        model = Model()
        tangent = ab.State.from_flat({("stat",): jnp.array(1.0)})
        _, change = transforms.jvp(Model.apply, (model, X), (tangent, None))
        assert np.allclose(change, np.sin(ENTRY[0] * X))
        _, change = transforms.jvp(Model.apply, (model, X), (None, None))
        assert change.tolist() == [0.0, 0.0]

    def test_aux_and_containers(self):
        f = lambda t, m: (t["a"][0] * t["b"], m)  # noqa: E731
        model = Model()
        args = ({"a": [2.0], "b": jnp.array(3.0), "n": 1}, model)
        tangents = ({"b": None, "a": (1.0,), "n": None}, None)
        with pytest.raises(StructureError, match=r"tangents\[0\]\['a'\].*list.*tuple"):
            transforms.jvp(f, args, tangents, has_aux=True)
        tangents[0]["a"] = [1.0]
        out, change, same = transforms.jvp(f, args, tangents, has_aux=True)
        assert (float(out), float(change)) == (6.0, 3.0)
        assert same is model

    @pytest.mark.parametrize(
        ("tangent", "message"),
        [
            (ab.State.from_flat({("v",): jnp.ones(2)}), r"no leaves at\n.*\['v'\]"),
            (ab.State.from_flat({("w",): jnp.ones(3)}), r"\['w'\].*shape \(3,\).*shape \(2,\)"),
            (ab.State.from_flat({("w",): jnp.ones(2, int)}), r"\['w'\].*int32.*float32"),
            (ab.State.from_flat({("count",): 1.0}), r"\['count'\].*int32 has no tangent"),
            ({"w": jnp.ones(2)}, "tangent of a Model is a State"),
        ],
    )
    def test_wrong_tangents_are_errors_by_path(self, tangent, message):
        model = Model()
        with pytest.raises(StructureError, match=message):
            transforms.jvp(Model.apply, (model, X), (tangent, None))
        assert int(model.count) == 0

    def test_one_leaf_has_one_tangent(self):
        model = Model()
        tangent = ab.State.from_flat({("w",): jnp.ones(2)})
        own = ab.State.from_flat({(): jnp.ones(2)})
        f = lambda m, w: (m.w * w).sum()  # noqa: E731
        _, change = transforms.jvp(f, (model, model.w), (tangent, None))
        assert float(change) == 6.0
        _, change = transforms.jvp(f, (model, model.w), (None, own))
        assert float(change) == 6.0
        with pytest.raises(AliasError, match=r"tangents\[1\]"):
            transforms.jvp(f, (model, model.w), (tangent, own))

    def test_the_numbers_of_tangents_and_arguments_agree(self):
        with pytest.raises(StructureError, match="2 arguments, but 1 tangents"):
            transforms.jvp(lambda x, y: x, (1.0, 2.0), (1.0,))
        with pytest.raises(StructureError, match="tuple or list"):
            transforms.jvp(lambda x: x, 1.0, 1.0)


class TestLinearize:
    def test_equals_jax_on_the_split_function(self):
        model = Model()
        out, push = transforms.linearize(Model.apply, model, X)
        assert written_once(model)
        assert np.allclose(out, pure(*ENTRY))
        _, theirs = jax.linearize(pure, *ENTRY)
        for w, b in (([1.0, 0.0], 0.0), ([0.5, -2.0], 3.0)):
            ours = push(params(w, b), None)
            expected = theirs(jnp.array(w), jnp.asarray(b), jnp.zeros(()), jnp.zeros(2))
            assert np.allclose(ours, expected)
        partly = push(ab.State.from_flat({("b",): jnp.array(2.0)}), jnp.zeros(2))
        assert partly.tolist() == [2.0, 2.0]
        assert written_once(model)

    def test_only_what_was_chosen_has_tangents(self):
        model = Model()
        _, push = transforms.linearize(Model.apply, model, X)
        with pytest.raises(StructureError, match=r"not linearized.*\n.*stat.*BatchStat"):
            push(ab.State.from_flat({("stat",): jnp.array(1.0)}), None)
        with pytest.raises(StructureError, match="2 arguments, but 1"):
            push(None)
        _, push = transforms.linearize(
            Model.apply, Model(), X, argnums=ab.DiffState(0, ab.BatchStat)
        )
        assert np.allclose(
            push(ab.State.from_flat({("stat",): jnp.array(1.0)})), np.sin(ENTRY[0] * X)
        )

    def test_aux(self):
        model = Model()
        out, push, same = transforms.linearize(lambda m: (m.w * m.w, m), model, has_aux=True)
        assert same is model
        assert out.tolist() == [1.0, 4.0]
        assert push(params([1.0, 1.0], 0.0)).tolist() == [2.0, 4.0]


def _vjp(f, m, x):
    return transforms.vjp(f, m, x)


def _jvp(f, m, x):
    return transforms.jvp(f, (m, x), (params([1.0, 1.0], 1.0), jnp.zeros_like(x)))


def _linearize(f, m, x):
    return transforms.linearize(f, m, x)


ALL = pytest.mark.parametrize("transform", [_vjp, _jvp, _linearize])


@ALL
class TestContract:
    def test_structure_changes_come_back(self, transform):
        def f(m, x):
            m.w, m.b = m.b, m.w
            m.me = m
            m.extra = [ab.Cache(x * 2)]
            del m.calls
            return (m.w * x).sum()

        model = Model()
        w, b = model.w, model.b
        transform(f, model, X)
        assert model.w is b
        assert model.b is w
        assert model.me is model
        assert not hasattr(model, "calls")
        assert np.allclose(model.extra[0].value, X * 2)

    def test_failures_change_nothing(self, transform):
        def f(m, x):
            m.apply(x)
            m.new = 1
            raise KeyError("no")

        def g(m, x):
            m.apply(x)
            return m

        model = Model()
        before = dict(vars(model))
        values = [model.w.value, model.stat.value, model.count.value]
        with pytest.raises(KeyError):
            transform(f, model, X)
        with pytest.raises(StructureError):
            transform(g, model, X)
        assert dict(vars(model)) == before
        now = [model.w.value, model.stat.value, model.count.value]
        assert all(a is b for a, b in zip(values, now, strict=True))

    def test_the_function_runs_once(self, transform):
        runs = []

        def f(m, x):
            runs.append(1)
            return m.apply(x)

        transform(f, Model(), X)
        assert len(runs) == 1

    def test_captured_objects_are_written_and_kept(self, transform):
        outer = ab.Variable(jnp.zeros(()))

        def write(m, x):
            outer.value = x.sum()
            return x

        def keep(m, x):
            m.kept = outer
            return x

        model = Model()
        for f in (write, keep):
            transform(f, model, X)
        assert float(outer) == float(X.sum())
        assert model.kept is outer

    def test_inside_jit_vmap_and_grad(self, transform):
        """C9."""

        def inner(m, x):
            return transform(Model.apply, m, x)[0]

        model = Model()
        out = transforms.jit(inner)(model, X)
        assert written_once(model)
        assert np.allclose(out, pure(*ENTRY))

        model = Model()
        batch = jnp.stack([X, 2 * X])
        out = transforms.vmap(inner, in_axes=(None, 0))(model, batch)
        assert written_once(model)
        assert np.allclose(out[1], pure(*ENTRY[:3], 2 * X))

        model = Model()
        grads = transforms.grad(lambda m, x: inner(m, x).sum())(model, X)
        assert written_once(model)
        assert np.allclose(grads["w"], jax.grad(lambda w: pure(w, *ENTRY[1:]).sum())(ENTRY[0]))


def test_second_derivatives_through_the_tangent():
    model = Model()

    def slope(m, x):
        return transforms.jvp(Model.apply, (m, x), (None, jnp.ones(2)))[1].sum()

    grads = transforms.grad(slope)(model, X)
    expected = jax.grad(
        lambda w: jax.jvp(lambda x: pure(w, *ENTRY[1:3], x), (X,), (jnp.ones(2),))[1].sum()
    )(ENTRY[0])
    assert np.allclose(grads["w"], expected, rtol=1e-5)
    assert written_once(model)


def test_a_cotangent_of_another_form_is_refused():
    out, pullback = ab.vjp(lambda x: {str(i): x * i for i in range(300)}, 2.0)
    for wrong in (1.0, {**out, "0": jnp.ones(2)}, {"0": 1.0}):
        with pytest.raises(ab.errors.StructureError, match="form of the output") as caught:
            pullback(wrong)
        assert len(str(caught.value)) < 4_000
    assert float(pullback(dict.fromkeys(out, 1.0))[0]) == sum(range(300))
