"""`custom_vjp`: JAX's rules, for functions and rules that read and write objects (C14)."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

import anabranch as ab
from anabranch import transforms
from anabranch.errors import (
    AliasError,
    CapturedWriteError,
    MissingRuleError,
    NodeTypeError,
    StructureError,
)


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([2.0, 3.0]))
        self.stat = ab.BatchStat(jnp.zeros(()))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.rngs = ab.Rngs(0)

    def loss(self, x):
        self.count.value = self.count + 1
        return (self.w * x).sum()


def weights(ct):
    return ab.State.from_flat({("w",): ct})


def make_rule():
    """Return a rule that records a statistic and doubles all gradients, and its trace counts."""
    traces = []

    @transforms.custom_vjp
    def loss(m, x):
        traces.append("f")
        return m.loss(x)

    def fwd(m, x):
        traces.append("fwd")
        m.stat.value = m.stat + x.max()
        return m.loss(x), (m.w.value, x)

    def bwd(residuals, ct):
        traces.append("bwd")
        w, x = residuals
        return weights(2 * ct * x), 2 * ct * w

    loss.defvjp(fwd, bwd)
    return loss, traces


X = jnp.array([5.0, 7.0])


class TestWrites:
    """C14."""

    def test_of_the_function_when_it_is_called(self):
        loss, _ = make_rule()
        m = Layer()
        assert float(loss(m, X)) == 31.0
        assert (int(m.count.value), float(m.stat.value)) == (1, 0.0)

    @pytest.mark.parametrize("how", ["grad", "jit(grad)", "grad(jit)", "vjp", "grad(remat)"])
    def test_of_the_forward_rule_when_it_is_differentiated(self, how):
        loss, _ = make_rule()
        m = Layer()
        if how == "grad(jit)":
            grads = transforms.grad(transforms.jit(loss), argnums=(0, 1))(m, X)
        elif how == "grad(remat)":
            grads = transforms.grad(transforms.remat(loss), argnums=(0, 1))(m, X)
        elif how == "vjp":
            value, vjp = transforms.vjp(loss, m, X)
            assert float(value) == 31.0
            grads = vjp(jnp.array(1.0))
        else:
            grad = transforms.grad(loss, argnums=(0, 1))
            grads = (transforms.jit(grad) if how == "jit(grad)" else grad)(m, X)
        assert grads[0]["w"].tolist() == [10.0, 14.0]
        assert grads[1].tolist() == [4.0, 6.0]
        assert (int(m.count.value), float(m.stat.value)) == (1, 7.0)

    def test_written_state_has_no_gradient(self):
        @transforms.custom_vjp
        def f(v, x):
            v.value = x * 3
            return x * 2

        f.defvjp(lambda v, x: (f(v, x), None), lambda _, ct: (None, ct * 10))

        def loss(v, x):
            return f(v, x) + v.value

        v = ab.Variable(jnp.array(0.0))
        assert float(transforms.grad(loss, argnums=1)(v, 1.0)) == 10.0
        assert float(v.value) == 3.0

    def test_new_attributes_must_be_made_by_both(self):
        @transforms.custom_vjp
        def f(m, x):
            return x * 1.0

        def fwd(m, x):
            m.extra = ab.Cache(x)
            return x, None

        f.defvjp(fwd, lambda _, ct: (None, ct))
        with pytest.raises(StructureError, match=r"has also \.extra after its forward rule"):
            f(Layer(), 1.0)

    def test_writes_of_the_backward_rule_are_refused(self):
        outside = ab.Variable(jnp.array(0.0))

        def write_residual(v, ct):
            v.value = ct
            return (ct,)

        def write_outside(v, ct):
            outside.value = ct
            return (ct,)

        for bwd, match in ((write_residual, "backward rule of"), (write_outside, "backward rule")):
            f = transforms.custom_vjp(lambda x: x * 1.0)
            f.defvjp(lambda x: (x, ab.Variable(x)), bwd)
            with pytest.raises(CapturedWriteError, match=match):
                transforms.grad(f)(1.0)
        assert float(outside.value) == 0.0

    def test_failures_change_nothing(self):
        def fail(m, x):
            m.stat.value = x.max()
            m.extra = 1
            raise RuntimeError("no")

        loss = transforms.custom_vjp(Layer.loss)
        loss.defvjp(fail, lambda residuals, ct: (None, None))
        m = Layer()
        with pytest.raises(RuntimeError, match="no"):
            transforms.grad(loss)(m, X)

        def bad_bwd(residuals, ct):
            raise RuntimeError("no")

        loss = transforms.custom_vjp(Layer.loss)
        loss.defvjp(lambda m, x: (m.loss(x), None), bad_bwd)
        with pytest.raises(RuntimeError, match="no"):
            transforms.grad(loss)(m, X)
        assert (int(m.count.value), float(m.stat.value)) == (0, 0.0)
        assert not hasattr(m, "extra")


class TestResults:
    def test_equals_plain_jax_on_pytrees(self):
        def make(custom_vjp):
            f = custom_vjp(lambda p, x: {"y": p["a"] * x, "z": (x.sum(), p["b"])})

            def bwd(res, ct):
                _, x = res
                return {"a": ct["y"].sum() * x[0], "b": ct["z"][1] * 5}, ct["z"][0] + x

            f.defvjp(lambda p, x: (f(p, x), (p, x)), bwd)
            return f

        def loss(f, p, x):
            out = f(p, x)
            return (out["y"] * 2).sum() + out["z"][0] * 3 + out["z"][1] * 7

        p = {"a": jnp.array(1.5), "b": jnp.array(2.5)}
        ours = transforms.grad(functools.partial(loss, make(transforms.custom_vjp)), argnums=(0, 1))
        theirs = jax.grad(functools.partial(loss, make(jax.custom_vjp)), (0, 1))
        for a, b in zip(jax.tree.leaves(ours(p, X)), jax.tree.leaves(theirs(p, X)), strict=True):
            assert np.allclose(a, b)

    @pytest.mark.parametrize("make", [lambda x: x, lambda x: [x], lambda x: {"a": (x,)}])
    def test_an_argument_that_is_returned_goes_through_the_rule(self, make):
        clip = transforms.custom_vjp(lambda tree: tree)
        clip.defvjp(
            lambda tree: (tree, None),
            lambda _, ct: (jax.tree.map(lambda g: jnp.clip(g, -1, 1), ct),),
        )

        def loss(x):
            tree = make(x)
            clipped = clip(tree)
            if isinstance(tree, (list, dict)):
                assert clipped is tree  # what comes back is the caller's
            return sum(leaf.sum() * 100 for leaf in jax.tree.leaves(clipped))

        assert jax.grad(loss)(X).tolist() == [1.0, 1.0]

    def test_a_returned_module_goes_through_the_rule(self):
        clip = transforms.custom_vjp(lambda m: m)
        clip.defvjp(
            lambda m: (m, None),
            lambda _, ct: (ct.filter(ab.Param).map(lambda _, g: jnp.clip(g, -1, 1)),),
        )

        def loss(m):
            same = clip(m)
            assert same is m
            return (m.w * 100).sum()

        m = Layer()
        assert transforms.grad(loss)(m)["w"].tolist() == [1.0, 1.0]
        assert m.w.value.tolist() == [2.0, 3.0]

    def test_new_objects_have_states_as_cotangents(self):
        seen = []
        f = transforms.custom_vjp(lambda x: {"v": ab.Cache(x * 2), "n": 3})

        def bwd(_, ct):
            seen.append(ct)
            return (ct["v"][()] * 10,)

        f.defvjp(lambda x: (f(x), None), bwd)

        def loss(x):
            out = f(x)
            assert out["n"] == 3
            return out["v"].value * 5

        assert float(jax.grad(loss)(1.0)) == 50.0
        assert isinstance(seen[0]["v"], ab.State)
        assert seen[0]["n"] is None

    def test_the_same_array_twice_has_two_cotangents(self):
        f = transforms.custom_vjp(lambda x: (x, x))
        f.defvjp(lambda x: ((x, x), None), lambda _, ct: (ct[0] * 10 + ct[1],))

        def loss(x):
            a, b = f(x)
            return a * 2 + b * 3

        assert float(jax.grad(loss)(1.0)) == 23.0

    def test_integers_have_no_cotangents(self):
        f = transforms.custom_vjp(lambda n, x: (n + 1, n * x))
        f.defvjp(lambda n, x: (f(n, x), n), lambda n, ct: (None, ct[1] * n * 10))
        assert float(jax.grad(lambda x: f(3, x)[1])(1.0)) == 30.0


class TestCotangents:
    def of(self, cotangent, argument=None):
        f = transforms.custom_vjp(lambda m, x: x.sum())
        f.defvjp(lambda m, x: (x.sum(), None), lambda _, ct: cotangent)
        return transforms.grad(lambda m, x: f(m, x) + m.w.sum(), argnums=(0, 1))(
            argument or Layer(), X
        )

    def test_missing_paths_and_none_are_zero(self):
        grads = self.of((None, None))
        assert grads[0]["w"].tolist() == [1.0, 1.0]
        assert grads[1].tolist() == [0.0, 0.0]
        assert self.of((weights(X), X))[0]["w"].tolist() == [6.0, 8.0]
        assert self.of((ab.State.from_flat({}), X))[0]["w"].tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        ("cotangent", "match"),
        [
            ((ab.State.from_flat({("v",): X}), X), r"args\[0\].*\n.*\['v'\]"),
            ((ab.State.from_flat({("count",): jnp.array(1)}), X), "int32"),
            ((X, X), "State with its paths"),
            ((None, jnp.ones(3)), r"args\[1\].*shape"),
            ((None,), "one cotangent for each of 2"),
            (X[0], "one cotangent for each of 2"),
            (None, "returned NoneType"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, cotangent, match):
        with pytest.raises(StructureError, match=match):
            self.of(cotangent)

    def test_a_gradient_as_grad_gives_it(self):
        f = transforms.custom_vjp(Layer.loss)

        def fwd(m, x):
            value, grads = transforms.value_and_grad(Layer.loss)(m, x)
            return value, grads

        f.defvjp(fwd, lambda grads, ct: (jax.tree.map(lambda g: g * ct, grads), None))
        m = Layer()
        assert transforms.grad(f)(m, X)["w"].tolist() == X.tolist()
        assert int(m.count.value) == 1

    def test_a_shared_object_has_one(self):
        f = transforms.custom_vjp(lambda a, b: (a.w * b.w).sum())
        f.defvjp(
            lambda a, b: (f(a, b), (a.w.value, b.w.value)),
            lambda res, ct: (weights(ct * 2 * res[0]), None),
        )
        m = Layer()
        grads = transforms.grad(lambda m: f(m, m))(m)
        assert grads["w"].tolist() == [4.0, 6.0]
        g = transforms.custom_vjp(lambda a, b: (a.w * b.w).sum())
        g.defvjp(lambda a, b: (g(a, b), None), lambda res, ct: (weights(X), weights(2 * X)))
        with pytest.raises(AliasError, match="reached more than once"):
            transforms.grad(lambda m: g(m, m))(m)


class TestArguments:
    def test_nondiff_argnums_come_first_and_are_static(self):
        @functools.partial(transforms.custom_vjp, nondiff_argnums=(0, 2))
        def power(function, x, n):
            return function(x) ** n

        def bwd(function, n, x, ct):
            assert isinstance(n, int)
            assert function is jnp.sin
            return (ct * n * 100,)

        power.defvjp(lambda function, x, n: (power(function, x, n), x), bwd)
        assert float(jax.grad(power, argnums=1)(jnp.sin, 1.0, 3)) == 300.0
        assert np.allclose(power(jnp.sin, 1.0, 3), np.sin(1.0) ** 3)

    def test_nondiff_objects_are_given_as_copies(self):
        @transforms.custom_vjp(nondiff_argnames="m")
        def f(x, m):
            m.count.value = m.count + 1
            return x * m.w.sum()

        def bwd(m, x, ct):
            return (ct * m.w.sum() * 10,)

        f.defvjp(lambda x, m: (f(x, m), x), bwd)
        m = Layer()
        assert float(transforms.grad(f)(1.0, m)) == 50.0
        assert int(m.count.value) == 1

    def test_what_has_no_place_in_a_rule_is_not_differentiated(self):
        f = transforms.custom_vjp(lambda x, y: x * y, nondiff_argnums=(1,))
        f.defvjp(lambda x, y: (x * y, y), lambda y, res, ct: (ct * y,))
        assert float(jax.grad(f)(1.0, jnp.array(5.0))) == 5.0
        with pytest.raises(StructureError, match=r"args.*nondiff_argnums"):
            jax.grad(f, argnums=1)(1.0, jnp.array(5.0))
        m = Layer()
        g = transforms.custom_vjp(m.loss)
        g.defvjp(lambda x: (m.loss(x), None), lambda _, ct: (ct * X,))
        assert transforms.grad(g)(X).tolist() == X.tolist()

    def test_keywords_and_defaults(self):
        @transforms.custom_vjp
        def f(x, y=2.0, *, scale=1):
            return x * y * scale

        def fwd(x, y, *, scale):
            return f(x, y, scale=scale), (x, y)

        f.defvjp(fwd, lambda res, ct: (ct * res[1], ct * res[0] * 100))
        assert float(f(3.0)) == 6.0
        assert float(f(y=4.0, x=3.0, scale=2)) == 24.0
        assert float(jax.grad(lambda y: f(y=y, x=3.0))(1.0)) == 300.0
        assert float(jax.grad(lambda x: f(x, scale=2))(1.0)) == 2.0
        with pytest.raises(StructureError, match="keyword-only"):
            jax.grad(lambda s: f(1.0, scale=s))(1.0)
        with pytest.raises(TypeError):
            f(1.0, z=3.0)

    def test_methods(self):
        class Net(ab.Module):
            def __init__(self):
                self.w = ab.Param(jnp.array(3.0))
                self.seen = ab.Variable(jnp.array(0.0))

            @transforms.custom_vjp
            def apply(self, x):
                """Docs."""
                return self.w * x

            def _fwd(self, x):
                self.seen.value = x
                return self.apply(x), (self.w.value, x)

            def _bwd(residuals, ct):
                w, x = residuals
                return weights(ct * x * 10), ct * w

            apply.defvjp(_fwd, _bwd)

        assert Net.apply.__doc__ == "Docs."
        net = Net()
        assert float(net.apply(2.0)) == 6.0
        grads = transforms.grad(lambda n, x: n.apply(x), argnums=(0, 1))(net, 2.0)
        assert (float(grads[0]["w"]), float(grads[1])) == (20.0, 3.0)
        assert float(net.seen.value) == 2.0
        bound = transforms.grad(net.apply)(5.0)
        assert float(bound) == 3.0
        assert float(net.seen.value) == 5.0

    def test_a_call_without_rules(self):
        f = transforms.custom_vjp(lambda x: x)
        for call in (f, jax.grad(f), transforms.grad(f)):
            with pytest.raises(MissingRuleError, match="defvjp"):
                call(1.0)

    def test_forward_rules_return_pairs(self):
        f = transforms.custom_vjp(lambda x: x)
        f.defvjp(lambda x: x, lambda res, ct: (ct,))
        with pytest.raises(StructureError, match="pair"):
            f(1.0)


class TestResiduals:
    def test_objects_are_copies_of_what_they_were(self):
        f = transforms.custom_vjp(lambda m, x: m.w.sum() * x)

        def fwd(m, x):
            held = {"m": m, "again": m, "mode": "fast", "n": 3}
            result = m.w.sum() * x
            return result, held

        def bwd(held, ct):
            assert held["m"] is held["again"]
            assert isinstance(held["m"], Layer)
            assert (held["mode"], held["n"]) == ("fast", 3)
            return None, ct * held["m"].w.sum() * 2

        f.defvjp(fwd, bwd)

        def loss(m, x):
            y = f(m, x)
            m.w.value = m.w * 100  # after the forward rule
            return y

        assert float(transforms.grad(loss, argnums=1)(Layer(), 1.0)) == 10.0

    def test_vjp_functions(self):
        f = transforms.custom_vjp(lambda x: jnp.sin(x))  # noqa: PLW0108 (a function of its own)
        f.defvjp(lambda x: jax.vjp(jnp.sin, x), lambda vjp, ct: vjp(ct * 2))
        assert np.allclose(jax.grad(f)(1.0), 2 * np.cos(1.0))

    def test_what_cannot_be_held(self):
        class Odd:
            def __init__(self):
                self.x = 1

        f = transforms.custom_vjp(lambda x: x)
        f.defvjp(lambda x: (x, Odd()), lambda res, ct: (ct,))
        with pytest.raises(NodeTypeError, match="the residuals of"):
            f(1.0)


class TestSymbolicZeros:
    def test_primals_and_cotangents(self):
        seen = {}
        f = transforms.custom_vjp(lambda x, y: (x * 2, y * 3))

        def fwd(x, y):
            assert isinstance(x, CustomVJPPrimal)
            seen["perturbed"] = (x.perturbed, y.perturbed)
            return (x.value * 2, y.value * 3), None

        def bwd(_, ct):
            seen["zero"] = [type(c) is SymbolicZero for c in ct]
            return ct[0] * 100, None

        f.defvjp(fwd, bwd, symbolic_zeros=True)
        assert float(jax.grad(lambda x: f(x, 1.0)[0])(1.0)) == 100.0
        assert seen == {"perturbed": (True, False), "zero": [False, True]}
        assert float(f(1.0, 2.0)[1]) == 6.0

    def test_objects_hold_plain_arrays(self):
        f = transforms.custom_vjp(lambda m, t: m.w.sum() * t[0])

        def fwd(m, t):
            m.stat.value = t[0].value
            return m.w.sum() * t[0].value, m.w.value

        f.defvjp(fwd, lambda w, ct: (None, (ct * w.sum(),)), symbolic_zeros=True)
        m = Layer()
        assert float(transforms.grad(f, argnums=1)(m, (3.0,))[0]) == 5.0
        assert float(m.stat.value) == 3.0


class TestComposition:
    def test_vmap(self):
        loss, _ = make_rule()
        m = Layer()
        xs = jnp.stack([X, 2 * X])
        per_lane = transforms.vmap(
            transforms.grad(loss, argnums=1),
            in_axes=(ab.StateAxes({ab.BatchStat: 0, ...: None}), 0),
        )
        m.stat.value = jnp.zeros(2)
        assert per_lane(m, xs).tolist() == [[4.0, 6.0], [4.0, 6.0]]
        assert m.stat.value.tolist() == [7.0, 14.0]
        assert int(m.count.value) == 1

    def test_inside_plain_jax(self):
        loss, _ = make_rule()

        def f(w, x):
            m = Layer()
            m.w.value = w
            return loss(m, x)

        w = jnp.array([2.0, 3.0])
        for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
            assert g(w, X).tolist() == [10.0, 14.0]
        assert jax.grad(jax.checkpoint(f))(w, X).tolist() == [10.0, 14.0]
        assert jax.vmap(jax.grad(f), in_axes=(None, 0))(w, X[None]).tolist() == [[10.0, 14.0]]

        def step(w, x):
            return w - 0 * jax.grad(f)(w, x), f(w, x)

        assert jax.lax.scan(step, w, X[None])[1].tolist() == [31.0]

    def test_second_derivatives_use_the_rule_again(self):
        square = transforms.custom_vjp(lambda x: x * x)
        square.defvjp(lambda x: (square(x), x), lambda x, ct: (ct * 3 * square(x),))
        plain = jax.custom_vjp(lambda x: x * x)
        plain.defvjp(lambda x: (plain(x), x), lambda x, ct: (ct * 3 * plain(x),))
        ours, theirs = jax.grad(jax.grad(square)), jax.grad(jax.grad(plain))
        assert float(ours(2.0)) == float(theirs(2.0)) == 36.0
        assert float(jax.jit(ours)(2.0)) == 36.0

    def test_optimize_remat(self):
        f = transforms.custom_vjp(lambda m, x: m.w.sum() * x)
        f.defvjp(
            lambda m, x: (m.w.sum() * x, m.w.value),
            lambda w, ct: (None, ct * w.sum() * 10),
            optimize_remat=True,
        )
        grad = transforms.grad(lambda m, x: f(m, x), argnums=1)  # noqa: PLW0108 (not a method)
        assert float(grad(Layer(), 1.0)) == 50.0
        assert float(transforms.jit(grad)(Layer(), 1.0)) == 50.0


class TestTraces:
    def test_each_is_traced_once(self):
        loss, traces = make_rule()
        m = Layer()
        for _ in range(3):
            loss(m, X)
        assert traces == ["f", "fwd"]
        grad = transforms.grad(loss)
        for _ in range(3):
            grad(m, X)
        assert sorted(traces) == ["bwd", "f", "fwd"]
        loss(m, X)
        grad(Layer(), X)
        assert sorted(traces) == ["bwd", "f", "fwd"]

    def test_what_is_captured_is_fresh(self):
        scale = jnp.array(1.0)
        f = transforms.custom_vjp(lambda x: x * scale)
        f.defvjp(lambda x: (x * scale, None), lambda _, ct: (ct * scale * 10,))
        assert (float(f(2.0)), float(jax.grad(f)(2.0))) == (2.0, 10.0)
        scale = jnp.array(5.0)
        assert (float(f(2.0)), float(jax.grad(f)(2.0))) == (10.0, 50.0)

    def test_nothing_is_kept_alive(self):
        def run():
            held, m = Layer(), Layer()
            f = transforms.custom_vjp(lambda m, x: m.w.sum() * x)
            f.defvjp(lambda m, x: (f(m, x), held.w.value), lambda w, ct: (None, ct * w.sum()))
            transforms.grad(f, argnums=1)(m, 1.0)
            return [weakref.ref(x) for x in (held, m, f)]

        refs = run()
        for _ in range(3):  # what JAX's caches hold goes one after the other
            gc.collect()
        assert [ref() for ref in refs] == [None] * 3

    def test_a_vjp_function_may_outlive_everything(self):
        def make(x):
            f = transforms.custom_vjp(lambda x: x * 2)
            f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * x * 10,))
            return f(x)

        _, vjp = jax.vjp(make, 3.0)
        gc.collect()
        assert float(vjp(1.0)[0]) == 30.0
