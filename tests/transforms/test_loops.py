"""`fori_loop` and `while_loop`: equal to those of JAX, and with objects to the Python loops."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab


class Counter(ab.Module):
    def __init__(self, n=0):
        self.n = ab.Variable(jnp.array(n, jnp.int32))
        self.log = {"last": jnp.array(-1, jnp.int32)}
        self.rngs = ab.Rngs(noise=3)

    def add(self, i):
        self.n.value = self.n + i
        self.log["last"] = self.n * 1


def python_fori(lower, upper, body, value):
    for i in range(lower, upper):
        value = body(i, value)
    return value


def python_while(cond, body, value):
    while cond(value):
        value = body(value)
    return value


def bounds(kind, lower, upper):
    if kind == "array":
        return jnp.int32(lower), jnp.int32(upper)
    if kind == "numpy":
        return np.int64(lower), np.array(upper)
    return (lower, jnp.int32(upper)) if kind == "mixed" else (lower, upper)


BOUNDS = pytest.mark.parametrize("kind", ["int", "array", "numpy", "mixed"])


class TestFori:
    @BOUNDS
    def test_arrays_and_containers_give_what_jax_gives(self, kind):
        lower, upper = bounds(kind, 2, 6)
        for body, init in (
            (lambda i, x: x * i, 1),
            (lambda i, x: x * i, 1.0),
            (lambda i, x: {"a": x["a"] + i, "b": (x["a"], x["b"][0] * 2)}, {"a": 0, "b": (0, 1)}),
            (lambda i, x: [x[1], x[0] + i], [jnp.ones(2), jnp.ones(2)]),
            (lambda i, x: (), ()),
        ):
            ours = ab.fori_loop(lower, upper, body, init)
            theirs = jax.lax.fori_loop(lower, upper, body, init)
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
            assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, theirs)

    @BOUNDS
    def test_objects_are_written_as_in_the_loop(self, kind):
        def body(i, state):
            m, x = state
            m.add(i)
            return m, x + jax.random.uniform(m.rngs.noise())

        one, other = Counter(), Counter()
        inside = [one.n, one.log, one.rngs.noise.count]
        m, x = ab.fori_loop(*bounds(kind, 1, 5), body, (one, 0.0))
        _, expected = python_fori(1, 5, body, (other, 0.0))
        assert m is one
        assert all(a is b for a, b in zip(inside, [m.n, m.log, m.rngs.noise.count], strict=True))
        assert int(m.n) == int(other.n) == int(m.log["last"]) == 10
        assert int(m.rngs.noise.count) == 4
        np.testing.assert_allclose(x, expected, rtol=1e-6)

    def test_no_steps_change_nothing(self):
        """C6."""
        a, b = Counter(1), Counter(2)
        init = (a, b)
        values = [a.n.value, b.n.value]
        assert ab.fori_loop(0, 0, lambda i, pair: (pair[1], pair[0]), init) is init
        assert ab.fori_loop(3, 1, lambda i, pair: (pair[1], pair[0]), init) is init
        ab.fori_loop(jnp.int32(0), 0, lambda i, pair: (pair[0].add(i), pair)[1], init)
        assert [int(a.n), int(b.n)] == [1, 2]
        assert [a.n.value, b.n.value] == values
        with pytest.raises(ab.errors.StructureError, match=r"init_val\[0\] is a Counter") as error:
            ab.fori_loop(0, 1, lambda i, pair: (pair[1], pair[0]), init)
        assert "another Counter" in str(error.value)
        assert [int(a.n), int(b.n)] == [1, 2]

    def test_values_may_be_swapped(self):
        def body(i, pair):
            a, b = pair
            a.n.value, b.n.value = b.n.value, a.n.value
            return pair

        a, b = Counter(1), Counter(2)
        ab.fori_loop(0, 3, body, (a, b))
        assert [int(a.n), int(b.n)] == [2, 1]

    @BOUNDS
    def test_eager_calls_trace_once(self, kind):
        """C7."""
        traces = [0]

        def body(i, m):
            traces[0] += 1
            m.add(i)
            return m

        for _ in range(4):
            m = Counter()
            ab.fori_loop(*bounds(kind, 0, 3), body, m)
            assert int(m.n) == 3
        assert traces == [1]
        if kind != "int":
            return
        ab.fori_loop(0, 4, body, Counter())
        assert traces == [2]

    def test_reverse_mode(self):
        """C38."""
        w = 1.0

        def body(i, x):
            return x * w + i

        def loss(v, fori, lower=0):
            nonlocal w
            before, w = w, v
            try:
                return fori(lower, 3, body, 1.0)
            finally:
                w = before  # what is left there is refused

        assert float(ab.fori_loop(0, 3, body, 1.0)) == 4
        for lower in (0, jnp.int32(0), np.int32(0)):
            for v in (2.0, 3.0):
                expected = jax.grad(loss)(v, python_fori, int(lower))
                assert float(jax.grad(loss)(v, ab.fori_loop, lower)) == float(expected)
                assert float(ab.grad(loss)(v, ab.fori_loop, lower)) == float(expected)

    def test_gradients_through_objects(self):
        def loss(m, fori):
            def body(i, state):
                m, x = state
                m["state"].value = m["state"] * m["w"] + i
                return m, x + m["state"]

            return fori(0, 4, body, (m, 0.0))[1]

        grads = []
        for fori in (ab.fori_loop, python_fori):
            m = {"w": ab.Param(0.7), "state": ab.Variable(1.0)}
            grads.append((float(ab.grad(loss)(m, fori)["w"][()]), float(m["state"])))
        np.testing.assert_allclose(*grads, rtol=1e-6)

    def test_under_jit_and_vmap_with_traced_bounds(self):
        def f(m, n):
            ab.fori_loop(0, n, lambda i, m: (m.add(i), m)[1], m)

        m = Counter()
        ab.jit(f)(m, 5)
        assert int(m.n) == 10
        v = ab.Variable(jnp.zeros(3, jnp.int32))
        out = ab.vmap(lambda v, n: ab.fori_loop(0, n, count, v))(v, jnp.array([1, 2, 3]))
        assert out is v
        assert v.value.tolist() == [1, 2, 3]

    def test_bounds_are_checked(self):
        for lower, upper in ((0, 1.5), (0, jnp.zeros(2, jnp.int32)), ("a", 2), (False, 2)):
            with pytest.raises(ab.errors.StructureError, match=r"fori_loop: (lower|upper) is"):
                ab.fori_loop(lower, upper, lambda i, x: x, 0)
        with pytest.raises(ab.errors.StructureError, match="int32, but upper is uint8"):
            ab.fori_loop(jnp.int32(0), jnp.uint8(1), lambda i, x: x, 0)
        with pytest.raises(ab.errors.StructureError, match="unroll"):
            ab.fori_loop(jnp.int32(0), 3, lambda i, x: x, 0, unroll=2)
        assert int(ab.fori_loop(0, 5, lambda i, x: x + i, 0, unroll=2)) == 10

    def test_bodies_that_are_methods(self):
        class Sum(ab.Module):
            def __init__(self):
                self.total = ab.Variable(0)

            def body(self, i, x):
                self.total.value += i
                return x + self.total

        one, other = Sum(), Sum()
        for _ in range(2):
            x = ab.fori_loop(0, 4, one.body, 0)
            assert int(x) == int(python_fori(0, 4, other.body, 0))
        assert int(one.total) == int(other.total) == 12


def count(i, v):
    v.value = v + 1
    return v


class TestWhile:
    def test_arrays_and_containers_give_what_jax_gives(self):
        for cond, body, init in (
            (lambda x: x < 100, lambda x: x * 2, 1),
            (
                lambda x: x["a"] < 5,
                lambda x: {"a": x["a"] + 1, "b": x["b"] * 2.5},
                {"a": 0, "b": 1},
            ),
            (lambda x: x[0].sum() < 5, lambda x: [x[0] + 1, x[0]], [jnp.ones(2), jnp.ones(2)]),
        ):
            ours, theirs = (f(cond, body, init) for f in (ab.while_loop, jax.lax.while_loop))
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
            assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, theirs)

    @pytest.mark.parametrize("start", [0, 7, 30])
    def test_objects_are_written_as_in_the_loop(self, start):
        def body(m):
            m.add(3)
            return m

        one, other = Counter(start), Counter(start)
        n, log = one.n, one.log
        assert ab.while_loop(lambda m: m.n < 20, body, one) is one
        python_while(lambda m: m.n < 20, body, other)
        assert one.n is n
        assert one.log is log
        assert int(n) == int(other.n)
        assert int(log["last"]) == int(other.log["last"])

    @pytest.mark.parametrize("start", [0, 30])
    def test_what_the_condition_writes_counts_once_more(self, start):
        def cond(state):
            state["m"].log["last"] = state["m"].log["last"] + 1
            state["draws"].value = jax.random.uniform(state["m"].rngs.noise())
            return ab.Variable(state["m"].n < 20)

        def plain(state):
            return bool(cond(state).value)

        def body(state):
            state["m"].n.value = state["m"].n + 3
            return state

        states = []
        for loop, condition in ((ab.while_loop, cond), (python_while, plain)):
            state = {"m": Counter(start), "draws": ab.Variable(0.0)}
            assert loop(condition, body, state) is state
            m = state["m"]
            states.append([int(m.n), int(m.log["last"]), int(m.rngs.noise.count)])
            states[-1].append(round(float(state["draws"]), 5))
        assert states[0] == states[1]
        assert states[0][1] == (7 if start == 0 else 0)

    def test_a_sampler_that_owns_its_stream(self):
        def body(m):
            m.n.value = m.n + jax.random.randint(m.rngs.noise(), (), 0, 3)
            return m

        one, other = Counter(), Counter()
        assert ab.jit(lambda m: ab.while_loop(lambda m: m.n < 9, body, m))(one) is one
        python_while(lambda m: m.n < 9, body, other)
        assert int(one.n) == int(other.n)
        assert int(one.rngs.noise.count) == int(other.rngs.noise.count) > 3

    def test_eager_calls_trace_the_condition_and_the_body_once(self):
        """C7."""
        traces = {"cond": 0, "body": 0}

        def cond(m):
            traces["cond"] += 1
            return m.n < 9

        def body(m):
            traces["body"] += 1
            m.add(2)
            return m

        for _ in range(4):
            m = Counter()
            ab.while_loop(cond, body, m)
            assert int(m.n) == 10
        assert traces == {"cond": 1, "body": 1}

    def test_conditions_and_bodies_that_are_methods_of_one_object(self):
        class Bisection(ab.Module):
            def __init__(self):
                self.low, self.high = ab.Variable(0.0), ab.Variable(2.0)
                self.steps = ab.Variable(0)

            def wide(self, x):
                return self.high - self.low > 1e-3

            def halve(self, x):
                middle = (self.low + self.high) / 2
                below = middle**2 < 2
                self.low.value = jnp.where(below, middle, self.low.value)
                self.high.value = jnp.where(below, self.high.value, middle)
                self.steps.value += 1
                return middle

        one, other = Bisection(), Bisection()
        x = ab.while_loop(one.wide, one.halve, 0.0)
        assert float(x) == float(python_while(other.wide, other.halve, 0.0))
        assert int(one.steps) == int(other.steps) == 11
        assert float(one.low) == float(other.low)

    def test_forward_mode_and_vmap(self):
        def f(x, loop):
            v = {"x": ab.Variable(x)}

            def body(v):
                v["x"].value = v["x"] * v["x"]
                return v

            return loop(lambda v: v["x"] < 10.0, body, v)["x"].value

        expected = jax.jvp(lambda x: f(x, python_while_array), (1.5,), (1.0,))
        np.testing.assert_allclose(
            jax.jvp(lambda x: f(x, ab.while_loop), (1.5,), (1.0,)), expected, rtol=1e-6
        )
        xs = jnp.array([1.5, 3.0, 20.0])
        rows = [float(f(x, python_while)) for x in xs]
        np.testing.assert_allclose(jax.vmap(lambda x: f(x, ab.while_loop))(xs), rows, rtol=1e-6)

    def test_errors_leave_everything(self):
        def new(m):
            m.add(1)
            m.other = ab.Variable(0)
            return m

        def dtype(m):
            m.n.value = m.n * 1.5
            return m

        for cond, body, match in (
            (lambda m: m.n < 5, new, r"init_val has no \.other before the step"),
            (lambda m: m.n < 5, dtype, r"init_val\.n is int32\[\] before"),
            (lambda m: m.n < 5, lambda m: Counter(), "a new Counter"),
            (lambda m: m.n, lambda m: m, "cond_fun returned int32"),
            (lambda m: m, lambda m: m, "cond_fun returned a Counter"),
            (lambda m: setattr(m, "other", 1) or m.n < 5, lambda m: m, r"no \.other before"),
        ):
            m = Counter()
            value = m.n.value
            with pytest.raises(ab.errors.StructureError, match=match):
                ab.while_loop(cond, body, m)
            assert m.n.value is value
            assert not hasattr(m, "other")

    def test_a_step_that_undoes_what_the_condition_writes(self):
        def swap(pair):
            pair[0].n.value, pair[1].n.value = pair[1].n.value, pair[0].n.value

        def cond(pair):
            swap(pair)
            return pair[2] < 3

        def body(pair):
            swap(pair)
            return [pair[0], pair[1], pair[2] + 1]

        with pytest.raises(ab.errors.StructureError, match="cond_fun writes what a step"):
            ab.while_loop(cond, body, [Counter(1), Counter(2), 0])

    def test_no_model_is_kept_alive(self):
        m = Counter()
        refs = [weakref.ref(m), weakref.ref(m.n)]
        ab.while_loop(lambda m: m.n < 9, lambda m: (m.add(1), m)[1], m)
        ab.fori_loop(0, 2, lambda i, m: (m.add(1), m)[1], m)
        del m
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


def python_while_array(cond, body, value):
    for _ in range(3):
        value = body(value)
    return value
