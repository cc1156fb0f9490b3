"""`custom_jvp`: JAX's rules for tangents, of functions that read and write objects."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import anabranch as ab
from anabranch import transforms
from anabranch.errors import MissingRuleError, StructureError


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([2.0, 3.0]))
        self.stat = ab.BatchStat(jnp.zeros(()))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))

    def loss(self, x):
        self.count.value = self.count + 1
        return (self.w * x).sum()


X = jnp.array([5.0, 7.0])


def make_rule():
    """Return a rule that records a statistic and doubles tangents, and its trace counts."""
    traces = []

    @transforms.custom_jvp
    def loss(m, x):
        traces.append("f")
        return m.loss(x)

    @loss.defjvp
    def rule(primals, tangents):
        traces.append("rule")
        (m, x), (dm, dx) = primals, tangents
        assert dm.paths == (("w",), ("stat",))
        m.stat.value = m.stat + x.max()
        return m.loss(x), 2 * ((dm["w"] * x).sum() + (m.w * dx).sum())

    return loss, traces


class TestWrites:
    def test_of_the_function_when_it_is_called(self):
        loss, _ = make_rule()
        m = Layer()
        assert float(loss(m, X)) == 31.0
        assert (int(m.count.value), float(m.stat.value)) == (1, 0.0)

    @pytest.mark.parametrize("how", ["grad", "jit(grad)", "grad(jit)", "jvp", "grad(remat)"])
    def test_of_the_rule_when_it_is_differentiated(self, how):
        loss, _ = make_rule()
        m = Layer()
        if how == "jvp":
            _, tangent = transforms.jvp(loss, (m, X), (None, jnp.array([1.0, 0.0])))
            assert float(tangent) == 4.0
        else:
            grad = functools.partial(transforms.grad, argnums=(0, 1))
            call = {
                "grad": lambda: grad(loss),
                "jit(grad)": lambda: transforms.jit(grad(loss)),
                "grad(jit)": lambda: grad(transforms.jit(loss)),
                "grad(remat)": lambda: grad(transforms.remat(loss)),
            }[how]()
            grads = call(m, X)
            assert grads[0]["w"].tolist() == [10.0, 14.0]
            assert grads[1].tolist() == [4.0, 6.0]
        assert (int(m.count.value), float(m.stat.value)) == (1, 7.0)

    def test_written_state_has_no_tangent(self):
        f = transforms.custom_jvp(lambda v, x: setattr(v, "value", x * 3) or x * 2)
        f.defjvp(lambda p, t: (f(*p), t[1] * 10))

        def loss(v, x):
            return f(v, x) + v.value

        v = ab.Variable(jnp.zeros(()))
        assert float(transforms.grad(loss, argnums=1)(v, 1.0)) == 10.0
        assert float(v.value) == 3.0

    def test_failures_change_nothing(self):
        loss = transforms.custom_jvp(Layer.loss)

        @loss.defjvp
        def rule(primals, tangents):
            primals[0].stat.value = primals[1].max()
            raise RuntimeError("no")

        m = Layer()
        with pytest.raises(RuntimeError, match="no"):
            transforms.grad(loss)(m, X)
        assert (int(m.count.value), float(m.stat.value)) == (0, 0.0)


class TestRules:
    def test_equals_plain_jax_on_pytrees(self):
        def make(custom_jvp):
            f = custom_jvp(lambda p, x: {"y": p["a"] * x, "n": (3, p["b"])})

            def rule(primals, tangents):
                (p, x), (dp, dx) = primals, tangents
                zero = np.zeros((), jax.dtypes.float0)
                return f(p, x), {"y": dp["a"] * x + dx * 5, "n": (zero, dp["b"] * 7)}

            f.defjvp(rule)
            return f

        def loss(f, p, x):
            out = f(p, x)
            return (out["y"] * 2).sum() + out["n"][1] * 3

        p = {"a": jnp.array(1.5), "b": jnp.array(2.5)}
        theirs = jax.grad(functools.partial(loss, make(jax.custom_jvp)), argnums=(0, 1))(p, X)
        ours = jax.grad(functools.partial(loss, make(transforms.custom_jvp)), argnums=(0, 1))(p, X)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.allclose(a, b)

    def test_tangents_of_new_objects_and_none(self):
        f = transforms.custom_jvp(lambda x: (ab.Cache(x * 2), x))
        f.defjvp(lambda p, t: (f(*p), (ab.State.from_flat({(): t[0] * 10}), None)))

        def loss(x):
            v, y = f(x)
            return v.value + y * 100

        assert float(jax.grad(loss)(1.0)) == 10.0

    @pytest.mark.parametrize(
        ("result", "match"),
        [
            (lambda p, t: p[0], "pair"),
            (lambda p, t: (p[0], jnp.ones(3)), "shape"),
            (lambda p, t: ((p[0], p[0]), t[0]), "same structure"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, result, match):
        f = transforms.custom_jvp(lambda x: x * 1.0)
        f.defjvp(result)
        with pytest.raises(StructureError, match=match):
            jax.grad(f)(1.0)

    def test_defjvps(self):
        f = transforms.custom_jvp(lambda m, x, y: m.w.sum() * x * y)
        f.defjvps(
            lambda t, ans, m, x, y: t["w"].sum() * 10,
            lambda t, ans, m, x, y: t * ans * 100,
            None,
        )
        grads = transforms.grad(f, argnums=(0, 1, 2))(Layer(), 1.0, 2.0)
        assert grads[0]["w"].tolist() == [10.0, 10.0]
        assert (float(grads[1]), float(grads[2])) == (1000.0, 0.0)
        with pytest.raises(StructureError, match="nondiff"):
            transforms.custom_jvp(lambda x, n: x, nondiff_argnums=(1,)).defjvps(None)
        g = transforms.custom_jvp(lambda x, y: x)
        g.defjvps(None)
        with pytest.raises(StructureError, match="1 rules"):
            g(1.0, 2.0)

    def test_symbolic_zeros(self):
        seen = []
        f = transforms.custom_jvp(lambda x, y: x * y)

        def rule(primals, tangents):
            x, y = primals
            seen.append([type(t) is SymbolicZero for t in tangents])
            return x * y, tangents[0] * 100

        f.defjvp(rule, symbolic_zeros=True)
        assert float(jax.grad(f)(1.0, 2.0)) == 100.0
        assert seen[-1] == [False, True]

    def test_second_derivatives_use_the_rule_again(self):
        def make(custom_jvp):
            f = custom_jvp(lambda x: x * x)
            f.defjvp(lambda p, t: (f(*p), 3 * f(*p) * t[0]))
            return f

        ours = jax.grad(jax.grad(make(transforms.custom_jvp)))(2.0)
        assert float(ours) == float(jax.grad(jax.grad(make(jax.custom_jvp)))(2.0)) == 36.0

    def test_a_call_without_a_rule(self):
        f = transforms.custom_jvp(lambda x: x)
        with pytest.raises(MissingRuleError, match="defjvp"):
            jax.grad(f)(1.0)


class TestArguments:
    def test_nondiff_argnums(self):
        @functools.partial(transforms.custom_jvp, nondiff_argnums=(0,))
        def power(n, x):
            return x**n

        @power.defjvp
        def rule(n, primals, tangents):
            assert isinstance(n, int)
            return power(n, *primals), n * 100 * tangents[0]

        assert float(jax.grad(power, argnums=1)(3, 2.0)) == 300.0
        with pytest.raises(StructureError, match="nondiff_argnums"):
            g = transforms.custom_jvp(lambda x, y: x * y, nondiff_argnums=(1,))
            g.defjvp(lambda y, p, t: (p[0] * y, t[0] * y))
            jax.grad(g, argnums=1)(1.0, jnp.array(2.0))

    def test_methods_and_keywords(self):
        class Net(Layer):
            @transforms.custom_jvp
            def apply(self, x, scale=1.0):
                self.count.value = self.count + 1
                return self.w.sum() * x * scale

            @apply.defjvp
            def _rule(primals, tangents):
                m, x, scale = primals
                return m.apply(x, scale), tangents[1] * 100 * scale

        net = Net()
        assert float(net.apply(2.0)) == 10.0
        grad = transforms.grad(lambda n, x: n.apply(scale=2.0, x=x), argnums=1)
        assert float(grad(net, 1.0)) == 200.0
        assert int(net.count.value) == 2


class TestComposition:
    def test_inside_plain_jax(self):
        loss, _ = make_rule()

        def f(w, x):
            m = Layer()
            m.w.value = w
            return loss(m, x)

        w = jnp.array([2.0, 3.0])
        for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f)), jax.jacfwd(f)):
            assert g(w, X).tolist() == [10.0, 14.0]
        assert jax.grad(jax.checkpoint(f))(w, X).tolist() == [10.0, 14.0]
        assert jax.vmap(jax.grad(f), in_axes=(None, 0))(w, X[None]).tolist() == [[10.0, 14.0]]

    def test_vmap(self):
        loss, _ = make_rule()
        m = Layer()
        m.stat.value = jnp.zeros(2)
        per_lane = transforms.vmap(
            transforms.grad(loss, argnums=1),
            in_axes=(ab.StateAxes({ab.BatchStat: 0, ...: None}), 0),
        )
        assert per_lane(m, jnp.stack([X, 2 * X])).tolist() == [[4.0, 6.0], [4.0, 6.0]]
        assert m.stat.value.tolist() == [7.0, 14.0]

    def test_each_is_traced_once(self):
        loss, traces = make_rule()
        m = Layer()
        grad = transforms.grad(loss)
        for _ in range(3):
            loss(m, X)
            grad(m, X)
        assert traces == ["f", "rule"]

    def test_nothing_is_kept_alive(self):
        def run():
            held, m = Layer(), Layer()
            f = transforms.custom_jvp(lambda m, x: m.w.sum() * x)
            f.defjvp(lambda p, t: (f(*p), t[1] * held.w.sum()))
            transforms.grad(f, argnums=1)(m, 1.0)
            return [weakref.ref(x) for x in (held, m, f)]

        refs = run()
        for _ in range(3):  # what JAX's caches hold goes one after the other
            gc.collect()
        assert [ref() for ref in refs] == [None] * 3
