"""`scan`: equal to `jax.lax.scan`, and with objects to the Python loop."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import Carry

XS = jnp.array([1.0, 2.0, 4.0])


class Stats(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]))
        self.mean = ab.BatchStat(jnp.zeros(()))
        self.count = ab.Variable(jnp.zeros((), jnp.int32))
        self.cells = [jnp.zeros(()), {"last": jnp.zeros(())}]
        self.me = self

    def step(self, total, x):
        self.mean.value = 0.5 * self.mean + 0.5 * x
        self.count.value += 1
        self.cells[0] = self.cells[0] + x
        self.cells[1]["last"] = x * 1
        return total + x * self.w.sum(), self.mean * 2


def contents(m: Stats) -> list[float]:
    arrays = [m.w.value, m.mean.value, m.count.value, m.cells[0], m.cells[1]["last"]]
    return [float(jnp.sum(x)) for x in arrays]


def python_loop(f, carry, xs, *rest):
    ys = []
    for x in xs:
        carry, y = f(carry, x, *rest)
        ys.append(y)
    return carry, ys


def count(v):
    v.value = v + 1


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


class TestLikeJax:
    @pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}])
    @pytest.mark.parametrize(
        ("f", "init"),
        [
            (lambda c, x: (c + x, c), 0.0),
            (lambda c, x: (c + x, (c, {"x": x})), jnp.zeros(())),
            (lambda c, x: ({"a": c["a"] * x, "b": c["a"]}, c), {"a": 1.0, "b": 0.0}),
            (lambda c, x: ((c[1], c[0] + x), None), (1.0, 2.0)),
            (lambda c, x: (c, c), [1.0, jnp.ones(2)]),
            (lambda c, x: ([c[1], c[0]], x), [1.0, 2.0]),
            (lambda c, x: (None, x * 2), None),
        ],
    )
    def test_arrays_and_containers_give_what_lax_scan_gives(self, f, init, options):
        equal(ab.scan(f, **options)(init, XS), jax.lax.scan(f, init, XS, **options))

    def test_a_new_container_that_is_carried_and_stacked_is_two(self):
        def f(c, x):
            c = {"a": c["a"] + x, "t": (c["a"], [x])}
            return c, c

        init = {"a": jnp.zeros(()), "t": (jnp.zeros(()), [jnp.zeros(())])}
        (carry, ys), expected = ab.scan(f)(init, XS), jax.lax.scan(f, init, XS)
        equal((carry, ys), expected)
        assert carry is not ys
        assert carry["t"][1] is not ys["t"][1]
        assert float(init["a"]) == 0

    def test_length_without_slices(self):
        out = ab.scan(lambda c, _: (c * 2, c), length=3)(1.0, None)
        equal(out, jax.lax.scan(lambda c, _: (c * 2, c), 1.0, None, length=3))

    def test_weak_types_settle_as_in_jax(self):
        for init, xs in ((0, XS), (0.0, XS.astype(jnp.bfloat16)), (True, XS), (1, jnp.arange(3))):
            calls = [0, 0]

            def f(c, x, at, calls=calls):
                calls[at] += 1
                return c * x, c

            if init is True:
                with pytest.raises(ab.errors.StructureError, match="args"):
                    ab.scan(functools.partial(f, at=0))(init, xs)
                continue
            ours = ab.scan(functools.partial(f, at=0))(init, xs)
            theirs = jax.lax.scan(functools.partial(f, at=1), init, xs)
            equal(ours, theirs)
            assert ours[0].dtype == theirs[0].dtype
            assert calls[0] == calls[1]

    def test_keys_of_dicts_come_in_any_order(self):
        carry, _ = ab.scan(lambda c, x: ({"b": c["b"] + x, "a": c["a"]}, None))(
            {"a": 1.0, "b": 2.0}, XS
        )
        assert {k: float(v) for k, v in carry.items()} == {"a": 1.0, "b": 9.0}


class TestLikeTheLoop:
    @pytest.mark.parametrize("wrapper", [lambda f: f, ab.jit], ids=["eager", "jit"])
    def test_a_carried_module(self, wrapper):
        def f(m, x):
            return m, m.step(0.0, x)[1]

        one, other = Stats(), Stats()
        before = [one.w, one.mean, one.count, one.cells, one.cells[1]]
        w = one.w.value
        m, ys = wrapper(ab.scan(f))(one, XS)
        _, expected = python_loop(f, other, XS)
        assert m is one
        after = [one.w, one.mean, one.count, one.cells, one.cells[1]]
        assert all(a is b for a, b in zip(before, after, strict=True))
        assert one.w.value is w
        assert one.me is one
        assert contents(one) == contents(other)
        assert ys.tolist() == [float(y) for y in expected]

    def test_running_statistics_of_a_broadcast_argument(self):
        """C5."""

        def f(total, x, m):
            return m.step(total, x)

        one, other = Stats(), Stats()
        out = ab.scan(f, in_axes=(Carry, 0, None))(0.0, XS, one)
        total, ys = python_loop(f, 0.0, XS, other)
        assert contents(one) == contents(other)
        assert contents(one)[1] > 0
        equal(out, (total, jnp.stack(ys)))

    def test_a_bound_method_a_partial_and_a_callable_module(self):
        class Callable(Stats):
            def __call__(self, total, x):
                return self.step(total, x)

        expected = Stats()
        python_loop(expected.step, 0.0, XS)
        bound, called, part = Stats(), Callable(), Stats()
        for function, m in (
            (bound.step, bound),
            (called, called),
            (functools.partial(Stats.step, part), part),
        ):
            for _ in range(2):
                ab.scan(function)(0.0, XS)
            python_loop(m.step, 0.0, XS)
        for m in (bound, called, part):
            assert int(m.count) == 9
            assert float(m.cells[0]) == 3 * float(expected.cells[0])

    def test_a_method_in_a_class_body(self):
        class Model(ab.Module):
            def __init__(self):
                self.n = ab.Variable(jnp.zeros(()))

            @ab.scan(in_axes=(None, Carry, 0))
            def run(self, carry, x):
                """Add."""
                self.n.value = self.n + x
                return carry + self.n, self.n * 1

        m = Model()
        carry, ys = m.run(0.0, XS)
        assert float(m.n) == 7
        assert float(carry) == 1 + 3 + 7
        assert ys.tolist() == [1, 3, 7]
        assert Model.run.__doc__ == "Add."

    def test_slices_of_modules_keep_their_own_state(self):
        """Layers stacked along an axis, each with its running statistic."""

        def make(n):
            m = Stats()
            m.w.value = jnp.arange(2.0 * n).reshape(2, n)
            m.mean.value = jnp.arange(float(n))
            m.count.value = jnp.zeros(n, jnp.int32)
            del m.cells, m.me
            return m

        def f(h, layer):
            layer.mean.value = layer.mean + h.sum()
            layer.count.value += 1
            return h + layer.w, layer.mean * 1

        axes = ab.StateAxes({ab.Param: -1, ...: 0})
        m = make(3)
        mean, count = m.mean, m.count
        h, ys = ab.scan(f, in_axes=(Carry, axes))(jnp.ones(2), m)
        expected, means = jnp.ones(2), []
        w = make(3).w.value
        for i in range(3):
            means.append(float(i + expected.sum()))
            expected = expected + w[:, i]
        assert h.tolist() == expected.tolist()
        assert ys.tolist() == means
        assert m.mean is mean
        assert mean.value.tolist() == means
        assert count.value.tolist() == [1, 1, 1]

    def test_some_variables_are_sliced_and_others_shared(self):
        def f(h, m):
            m.count.value += 1
            m.cells[0] = m.cells[0] + m.w
            return h * m.w, None

        m = Stats()
        axes = ab.StateAxes({ab.Param: 0, ab.BatchStat: None, ...: Carry})
        h, _ = ab.scan(f, in_axes=(Carry, axes))(3.0, m)
        assert float(h) == 6
        assert int(m.count) == 2
        assert float(m.cells[0]) == 3

    def test_objects_of_slices_may_change_their_structure(self):
        def f(c, layer):
            layer["new"] = ab.Variable(layer["w"] * 2)
            del layer["old"]
            layer["static"] = "x"
            return c, None

        layers = {"w": ab.Param(XS), "old": ab.Param(XS)}
        ab.scan(f)(0.0, layers)
        assert list(layers) == ["w", "new", "static"]
        assert layers["new"].value.tolist() == [2, 4, 8]

    def test_new_objects_in_the_outputs_are_stacked_by_kind(self):
        def f(c, x, m):
            new = Stats()
            new.w.value = new.w * x
            new.cells, new.me = m, new
            return c, (new, [ab.Variable(x), m.w])

        m = Stats()
        axes = ab.StateAxes({ab.Param: 1, ...: 0})
        _, (new, (v, w)) = ab.scan(f, in_axes=(Carry, 0, None), out_axes=(Carry, (axes, 0)))(
            0.0, XS, m
        )
        assert new.w.value.tolist() == [[1, 2, 4], [2, 4, 8]]
        assert new.count.value.tolist() == [0, 0, 0]
        assert v.value.tolist() == XS.tolist()
        assert new.cells is m
        assert new.me is new
        assert w is m.w

    def test_axes_of_arrays_and_outputs(self):
        xs = jnp.arange(24.0).reshape(2, 3, 4)
        for axis in (0, 1, 2, -1, -3):
            _, ys = ab.scan(
                lambda c, x: (c, (x, x * 1)), in_axes=(Carry, axis), out_axes=(Carry, 1)
            )(0.0, xs)
            expected = jnp.moveaxis(xs, axis, 1)
            equal(ys, (expected, expected))
        _, y = ab.scan(lambda c, x: (c, x), in_axes=(Carry, 1), out_axes=(Carry, -1))(0.0, xs)
        equal(y, jnp.moveaxis(xs, 1, -1))

    def test_a_random_stream_gives_new_numbers_in_each_step(self):
        def f(c, x, rngs):
            return c, x + jax.random.normal(rngs.noise())

        one, other = ab.Rngs(noise=7), ab.Rngs(noise=7)
        _, ys = ab.scan(f, in_axes=(Carry, 0, None))(0.0, XS, one)
        _, expected = python_loop(f, 0.0, XS, other)
        np.testing.assert_allclose(ys, jnp.stack(expected), rtol=1e-6)
        assert int(one.noise.count) == int(other.noise.count) == 3
        assert len({float(y - x) for x, y in zip(XS, ys, strict=True)}) == 3

    def test_aliases_between_carry_slices_function_and_broadcast(self):
        class Holder(ab.Module):
            def __init__(self, v):
                self.v = v

            def step(self, carry, x, also):
                assert carry["v"] is self.v
                assert also is self.v
                also.value = also + x
                return {"v": self.v, "n": carry["n"] + 1}, None

        v = ab.Variable(0.0)
        init = {"v": v, "n": 0}
        out, _ = ab.scan(Holder(v).step, in_axes=(Carry, 0, None))(init, XS, v)
        assert out["v"] is v
        assert out is not init
        assert (float(v), int(out["n"]), init["n"]) == (7, 3, 0)

    def test_two_carries_and_nested_places(self):
        def f(state, x, m):
            (a, _), b = state, x[1]
            m.value = m + a
            return (a + b, x[0]), m

        m = ab.Variable(0.0)
        (a, ys), out = ab.scan(
            f, in_axes=((Carry, None), (0, 0), Carry), out_axes=((Carry, 0), Carry)
        )((1.0, 5.0), (XS, XS), m)
        assert out is m
        assert (float(a), float(m)) == (8, 1 + 2 + 4)
        assert ys.tolist() == XS.tolist()

    def test_keyword_arguments_axes_by_name_and_defaults(self):
        """C11."""

        def f(c, x, *, scale=2.0, m, ys):
            m.value = m + ys
            return c + x * scale, None

        m = ab.Variable(0.0)
        axes = {"c": Carry, "x": 0, "ys": 0}
        carry, _ = ab.scan(f, in_axes=axes)(0.0, x=XS, m=m, ys=XS)
        assert float(carry) == 14
        assert float(m) == 7
        carry, _ = ab.scan(lambda c, x, k=1.0: (c + x * k, None))(0.0, x=XS, k=3.0)
        assert float(carry) == 21

    def test_no_steps_change_nothing(self):
        def f(m, x):
            m.count.value += 1
            m.cells[0] = x.sum()
            return m, (x, ab.Variable(m.w * x))

        m = Stats()
        values = [m.count.value, m.cells[0]]
        out, (y, v) = ab.scan(f)(m, jnp.zeros((0, 2)))
        assert out is m
        assert [m.count.value, m.cells[0]] == values
        assert m.count.value is values[0]
        assert m.cells[0] is values[1]
        assert y.shape == v.value.shape == (0, 2)
        init = {"a": 1.0}
        assert ab.scan(lambda c, x: ({"a": c["a"] + x}, x))(init, jnp.zeros(0))[0] is init

    def test_what_is_put_back_in_one_step_is_no_change(self):
        def f(pair, x):
            pair[0], pair[1] = pair[1], pair[0]
            pair[0].value = pair[0] + x
            pair[0], pair[1] = pair[1], pair[0]
            return pair, None

        a, b = ab.Variable(0.0), ab.Variable(0.0)
        pair = [a, b]
        ab.scan(f)(pair, XS)
        assert pair[0] is a
        assert pair[1] is b
        assert (float(a), float(b)) == (0, 7)

    def test_containers_and_dataclasses_may_be_new_each_time(self):
        @dataclasses.dataclass
        class State:
            total: Any
            more: Any

        def f(state, x, m):
            m.cells = [m.cells[0] + x, m.cells[1]]
            return State(state.total + x, {"k": state.more["k"] * 2}), state

        m, init = Stats(), State(jnp.zeros(()), {"k": jnp.ones(())})
        cells, last = m.cells, m.cells[1]
        out, states = ab.scan(f, in_axes=(Carry, 0, None))(init, XS, m)
        assert (float(out.total), float(out.more["k"])) == (7, 8)
        assert (states.total.tolist(), states.more["k"].tolist()) == ([0, 1, 3], [1, 2, 4])
        assert (float(init.total), float(init.more["k"])) == (0, 1)
        assert m.cells is not cells
        assert m.cells[1] is last
        assert (float(cells[0]), float(m.cells[0])) == (0, 7)

    def test_sharding_names_follow_the_rank(self):
        def f(c, layer):
            assert layer.get_metadata()["sharding"] == ("in",)
            layer.value = layer + 1
            return c, ab.Param(layer * 1, sharding=("out",))

        w = ab.Param(jnp.zeros((3, 2)), sharding=("layers", "in"))
        _, new = ab.scan(f)(0.0, w)
        assert w.get_metadata()["sharding"] == ("layers", "in")
        assert new.get_metadata()["sharding"] == (None, "out")
        assert w.value.tolist() == [[1, 1]] * 3


class TestTracing:
    def test_eager_calls_trace_once(self):
        """C7."""
        traces = [0]

        def f(m, x):
            traces[0] += 1
            return m, m.step(0.0, x)[1]

        for _ in range(4):
            ab.scan(f)(Stats(), XS)
        assert traces == [1]
        ab.scan(f)(Stats(), jnp.ones(5))
        assert traces == [2]

    def test_a_decorated_function_traces_once(self):
        traces = [0]

        @ab.scan(in_axes=(Carry, 0, None))
        def f(c, x, m):
            traces[0] += 1
            return m.step(c, x)

        m = Stats()
        for _ in range(4):
            f(0.0, XS, m)
        assert traces == [1]
        assert int(m.count) == 12

    def test_larger_programs_trace_it_once(self):
        """As `lax.scan` does, which keeps the trace of a body."""
        traces = [0]

        def f(m, x):
            traces[0] += 1
            return m, m.step(0.0, x)[1]

        def twice(m):
            ab.scan(f)(m, XS)
            return ab.scan(f)(m, XS)[1]

        m, plain = Stats(), Stats()
        means = ab.jit(twice)(m)
        ab.jit(ab.grad(lambda m: twice(m).sum()))(Stats())
        assert traces == [1]
        expected = [f(plain, x)[1] for x in [*XS, *XS]][3:]
        np.testing.assert_allclose(means, jnp.stack(expected))
        np.testing.assert_allclose(contents(m), contents(plain))

    def test_what_a_body_captures_of_a_larger_program_is_no_constant(self):
        factor: Any = None

        def f(c, x):
            return c * factor, x * factor

        def run(a, b):
            nonlocal factor
            factor = a
            first = ab.scan(f)(1.0, XS)
            factor = b
            second = ab.scan(f)(1.0, XS)
            factor = None
            return first, second

        for _ in range(2):
            (a, xs), (b, ys) = ab.jit(run)(2.0, 3.0)
            assert (float(a), float(b), xs.tolist(), ys.tolist()) == (
                8.0,
                27.0,
                [2.0, 4.0, 8.0],
                [3.0, 6.0, 12.0],
            )

    def test_refs_of_a_larger_program_are_those_of_the_call(self):
        def f(ref, x):
            ref[...] += x

        def run(a, b):
            ab.scan(f, in_axes=(None, 0), out_axes=None)(a, XS)
            ab.scan(f, in_axes=(None, 0), out_axes=None)(b, 2 * XS)

        a, b = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))
        ab.jit(run)(a, b)
        assert (float(a[...]), float(b[...])) == (7.0, 14.0)

    def test_a_changed_closure_is_seen(self):
        """C38."""
        factor = 1.0

        def f(c, x):
            return c * factor, None

        def loss(w):
            nonlocal factor
            factor = w
            return ab.scan(f)(1.0, XS)[0]

        assert float(ab.scan(f)(1.0, XS)[0]) == 1
        assert float(jax.grad(loss)(2.0)) == 12
        assert float(jax.grad(loss)(3.0)) == 27
        factor = jnp.array(2.0)
        assert float(ab.scan(f)(1.0, XS)[0]) == 8

    def test_no_model_is_kept_alive(self):
        m = Stats()
        refs = [weakref.ref(m), weakref.ref(m.w)]
        ab.scan(lambda m, x: (m, m.step(0.0, x)[1]))(m, XS)
        ab.scan(m.step)(0.0, XS)
        del m
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


class TestNested:
    def loss(self, scan, m, w, xs):
        def inner(c, x, m):
            m.mean.value = m.mean * 0.5 + x
            return c * m.w.sum() + x, m.mean * 1

        def outer(c, row, m):
            c, ys = scan(inner, in_axes=(Carry, 0, None))(c, row, m)
            m.count.value += 1
            return c + ys.sum() * w, None

        c, _ = scan(outer, in_axes=(Carry, 0, None))(w, xs, m)
        return c

    @staticmethod
    def loop(f, in_axes):
        def run(c, xs, *rest):
            c, ys = python_loop(f, c, xs, *rest)
            return c, None if ys[0] is None else jnp.stack(ys)

        return run

    def test_nested_scans_under_grad_jit_and_vmap_equal_the_loops(self):
        xs = jnp.arange(6.0).reshape(2, 3) / 10
        one, other = Stats(), Stats()
        expected, grads = ab.value_and_grad(lambda m, w: self.loss(self.loop, m, w, xs))(other, 0.5)
        traces = [0]

        @ab.jit
        def step(m, w):
            traces[0] += 1
            return ab.value_and_grad(lambda m, w: self.loss(ab.scan, m, w, xs))(m, w)

        value, found = step(one, 0.5)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(found["w"], grads["w"], rtol=1e-5)
        np.testing.assert_allclose(one.mean.value, other.mean.value, rtol=1e-6)
        assert int(one.count) == 2
        step(one, 0.25)
        assert traces == [1]

        ws = jnp.array([0.5, 0.25])
        lanes = ab.vmap(
            lambda m, w: ab.grad(lambda m: self.loss(ab.scan, m, w, xs))(m)["w"],
            in_axes=(ab.StateAxes({ab.Param: None, ...: 0}), 0),
        )
        mapped = Stats()
        mapped.mean.value, mapped.count.value = jnp.zeros(2), jnp.zeros(2, jnp.int32)
        mapped.cells, mapped.me = None, None
        rows = lanes(mapped, ws)
        np.testing.assert_allclose(rows[0], grads["w"], rtol=1e-5)
        assert mapped.count.value.tolist() == [2, 2]

    def test_inside_transforms_of_jax(self):
        m = Stats()

        def f(w):
            return ab.scan(lambda c, x: (c * x + w * m.w.sum(), c))(0.0, XS)[0]

        def g(w):
            return jax.lax.scan(lambda c, x: (c * x + w * m.w.sum(), c), 0.0, XS)[0]

        for transform in (jax.jit, jax.grad, jax.hessian):
            np.testing.assert_allclose(transform(f)(2.0), transform(g)(2.0), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(f)(XS), jax.vmap(g)(XS), rtol=1e-6)

    def test_read_only_weights_are_no_residuals(self):
        n, d = 7, 5
        m = {"w": ab.Param(jnp.eye(d)), "n": ab.Variable(0.0)}

        def f(h, x, m):
            m["n"].value = m["n"] + 1.0
            return jnp.tanh(m["w"].value @ h + x), None

        def loss(w, xs):
            m = {"w": ab.Param(w), "n": ab.Variable(0.0)}
            return ab.scan(f, in_axes=(Carry, 0, None))(jnp.ones(d), xs, m)[0].sum()

        def stacks(w, xs):  # the control: here the weights do change
            def f(state, x):
                h, w = state
                return (jnp.tanh(w @ h + x), w * 0.9), None

            return ab.scan(f)((jnp.ones(d), w), xs)[0][0].sum()

        xs = jnp.ones((n, d))
        text = str(jax.make_jaxpr(jax.grad(loss))(m["w"].value, xs))
        assert f"[{n},{d},{d}]" not in text
        assert f"[{n},{d},{d}]" in str(jax.make_jaxpr(jax.grad(stacks))(m["w"].value, xs))

    def test_only_what_is_written_comes_out(self):
        def f(c, x, m):
            return m.step(c, x)

        def run(c, xs, m):
            return ab.scan(f, in_axes=(Carry, 0, None))(c, xs, m)

        outputs = ab.jit(run).trace(0.0, XS, Stats()).jaxpr.outvars
        assert len(outputs) == 6  # the carry, the stacked means, four written cells

    def test_a_disabled_jit_gives_the_same(self):
        one, other = Stats(), Stats()
        with jax.disable_jit():
            out = ab.scan(lambda m, x: (m, m.step(0.0, x)[1]))(one, XS)
            assert int(ab.fori_loop(0, 3, lambda i, x: x + i, 0)) == 3
            v = ab.Variable(0)
            assert ab.while_loop(lambda v: v < 3, lambda v: (count(v), v)[1], v) is v
            assert int(v) == 3
        python_loop(lambda m, x: (m, m.step(0.0, x)[1]), other, XS)
        assert out[0] is one
        assert contents(one) == contents(other)


class TestErrors:
    def check(self, f, *args, match, **options):
        m = Stats()
        before = [*vars(m).items()], contents(m), m.mean.value
        with pytest.raises(ab.errors.StructureError, match=match) as caught:
            ab.scan(f, **options)(m, XS, *args)
        assert [*vars(m).items()] == before[0]
        assert contents(m) == before[1]
        assert m.mean.value is before[2]
        assert len(str(caught.value)) < 4000
        return str(caught.value)

    def test_structures_that_are_no_fixed_point(self):
        def added(m, x):
            m.mean.value = m.mean + x
            m.new = ab.Variable(x)
            return m, None

        def removed(m, x):
            del m.count
            return m, None

        def repointed(m, x):
            m.count = m.mean
            return m, None

        def static(m, x):
            m.k = getattr(m, "k", 0) + 1
            return m, None

        def longer(m, x):
            m.cells.append(x)
            return m, None

        def metadata(m, x):
            m.mean.set_metadata(tag="new")
            return m, None

        def kind(m, x):
            m.cells = tuple(m.cells)
            return m, None

        self.check(added, match=r"args\[0\] has no \.new before the step, and \.new after")
        self.check(removed, match=r"args\[0\] has \.count before")
        self.check(repointed, match=r"args\[0\]\.count is a Variable before.*another BatchStat")
        self.check(static, match=r"args\[0\] has no \.k")
        self.check(longer, match=r"args\[0\]\.cells has no \[2\]")
        self.check(kind, match=r"args\[0\]\.cells is a list before the step, and a .*tuple")
        if hasattr(ab.Variable, "set_metadata"):
            self.check(metadata, match=r"args\[0\]\.mean has the metadata .* before")

    def test_a_number_that_changes_per_step_names_both_values(self):
        def f(m, x):
            m["k"] += 1
            return m, None

        class Holder(ab.Module):
            def __init__(self):
                self.k = 41

        def g(m, x):
            m.k += 1
            return m, None

        with pytest.raises(ab.errors.StructureError, match=r"args\[0\]\.k is 41 .* and 42 after"):
            ab.scan(g)(Holder(), XS)
        assert int(ab.scan(f)({"k": 1}, XS)[0]["k"]) == 4  # in a container it is an array

    def test_another_object_in_the_place_of_the_carry(self):
        self.check(lambda m, x: (Stats(), None), match="is a Stats before .* a new Stats after")
        self.check(lambda m, x: (m.w, None), match="is a Stats before .* another Param")
        self.check(lambda m, x: (x, None), match="is a Stats before .* an array after")
        self.check(lambda m, x: (None, None), match="is a Stats before .* None after")

    def test_results_without_a_carry(self):
        self.check(lambda m, x: m, match="the return value.*Stats")
        self.check(lambda m, x: None, match="the return value")
        self.check(lambda m, x: (m, None, None), match="the return value.*2 entries")
        self.check(
            lambda m, x: (m, x), match="the return value.* axis is None", out_axes=(Carry, None)
        )

    def test_types_that_change_name_the_path(self):
        def dtype(m, x):
            m.count.value = m.count + 0.5
            return m, None

        def shape(m, x):
            m.cells[1]["last"] = jnp.ones(3)
            return m, None

        text = self.check(dtype, match=r"args\[0\]\.count is int32\[\] before")
        assert "float32[] after" in text
        self.check(shape, match=r"args\[0\]\.cells\[1\]\['last'\] is float32\[\] before")

    def test_a_container_that_is_written_and_replaced(self):
        def f(c, x):
            c["a"] = c["a"] + x
            return {"a": c["a"]}, None

        init = {"a": jnp.zeros(())}
        with pytest.raises(ab.errors.StructureError, match="written in place and also replaced"):
            ab.scan(f)(init, XS)
        assert float(init["a"]) == 0

    def test_messages_about_large_models_are_short(self):
        """C20."""

        class Layer(ab.Module):
            def __init__(self, i):
                self.name, self.w = f"layer number {i} " * 20, ab.Param(jnp.zeros(3))

        model = [Layer(i) for i in range(30)]

        def f(model, x):
            for layer in model:
                layer.extra = ab.Variable(x)
                layer.name = layer.name + "!"
            return model, None

        with pytest.raises(
            ab.errors.StructureError, match=r"args\[0\]\[0\] has no \.extra"
        ) as error:
            ab.scan(f)(model, XS)
        assert "and 25 more" in str(error.value)
        assert len(str(error.value)) < 4000

    def test_axes(self):
        self.check(lambda m, x: (m, None), match="nothing is mapped", in_axes=(Carry, None))
        self.check(lambda m, x: (m, None), match="out of range", in_axes=(Carry, 1))
        self.check(lambda m, x: (m, None), match="sizes", length=4)
        self.check(lambda m, x, y: (m, None), XS, match="entries")
        self.check(lambda m, x: (m, None), match="Carry", out_axes=0)
        self.check(lambda m, x: (m, None), match="Carry", in_axes=(None, 0))
        with pytest.raises(ab.errors.AliasError, match="args"):
            v = ab.Variable(XS)
            ab.scan(lambda c, x, v: (c, None), in_axes=(Carry, 0, None))(0.0, v, v)

    def test_an_error_in_the_function_leaves_everything(self):
        def f(m, x):
            m.step(0.0, x)
            raise KeyError("mine")

        m = Stats()
        with pytest.raises(KeyError, match="mine"):
            ab.scan(f)(m, XS)
        assert contents(m) == contents(Stats())
        m.step(0.0, 1.0)

    def test_a_captured_write_is_carried(self):
        v = ab.Variable(0.0)

        def f(c, x):
            v.value = v + x
            return c + v, None

        total, _ = ab.scan(f)(0.0, jnp.arange(4.0))
        assert (float(total), float(v)) == (10.0, 6.0)


class TestCaptures:
    """What a body captures is compared, so that a kept trace is never stale (C38)."""

    def check(self, body, change):
        assert float(ab.scan(body)(0.0, jnp.ones(1))[0]) == 1.0
        change()
        assert float(ab.scan(body)(0.0, jnp.ones(1))[0]) == 5.0

    def test_behind_a_decorator(self):
        held = {"k": 1.0}

        def decorate(function):
            @functools.wraps(function)
            def wrapper(carry, x):
                return function(carry, x * held["k"])

            return wrapper

        body = decorate(lambda carry, x: (carry + x, None))
        self.check(body, lambda: held.update(k=5.0))

    def test_behind_many_helpers(self):
        held = {"k": 1.0}

        def calling(inner):
            def helper():
                return inner()

            return helper

        helper = calling(lambda: held["k"])
        for _ in range(8):
            helper = calling(helper)
        self.check(lambda carry, x: (carry + helper(), None), lambda: held.update(k=5.0))

    def test_in_long_containers(self):
        held = [1.0] * 500
        self.check(lambda carry, x: (carry + held[400], None), lambda: held.__setitem__(400, 5.0))

    def test_in_numpy_arrays_that_are_changed_in_place(self):
        held = np.ones(3)
        self.check(lambda carry, x: (carry + held[1], None), lambda: held.fill(5.0))


@pytest.mark.parametrize("wrong", [-1, "a", 2.0])
def test_the_length_is_a_number_that_is_not_negative(wrong):
    with pytest.raises(ab.errors.StructureError, match="length is a number"):
        ab.scan(lambda c, x: (c, None), length=wrong)(0.0, None)
