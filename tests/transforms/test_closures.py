"""A closure is one more way to an object: C1, C2, C3, C9, C21, and what a function can capture."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import CapturedWriteError, StaticValueError


class Layer(ab.Module):
    shared = ab.Variable(jnp.array(10.0))

    def __init__(self, value=2.0):
        self.w = ab.Param(jnp.array(value))
        self.n = ab.Variable(jnp.array(0))
        self.items: list[Any] = []

    def step(self, x):
        self.n.value += 1
        return self.w * x

    def __call__(self, x):
        return self.step(x)

    def loss(self, x):
        return self.step(x) ** 2


CONTAINERS: list[Any] = [
    lambda: [1, 2], lambda: {"a": 1}, lambda: deque([1]), lambda: {1, 2}, lambda: OrderedDict(a=1)
]  # fmt: skip
GLOBAL = Layer()
SHARED = Layer()


def put_shared(value):
    global SHARED
    SHARED = Layer(value)


def get_shared():
    return SHARED.w


def uses_global(x):
    return GLOBAL.step(x)


def uses_helper(x):
    return uses_global(x) + 1


def ping(depth, x):
    return GLOBAL.step(x) if depth == 0 else pong(depth - 1, x)


def pong(depth, x):
    return ping(depth, x)


def in_scan(f):
    return lambda x: transforms.scan(lambda c, x: (c, f(x)))(0.0, jnp.full(1, x))[1][0]


class TestReads:
    def test_are_fresh_without_a_new_trace(self):
        """C1."""
        layer, traces = Layer(), []

        @transforms.jit
        def f(x):
            traces.append(1)
            return layer.w * x

        assert float(f(1.0)) == 2.0
        layer.w[...] = jnp.array(100.0)
        assert float(f(1.0)) == 100.0
        layer.w = ab.Param(jnp.array(3.0))
        assert float(f(1.0)) == 3.0
        assert len(traces) == 1

    @pytest.mark.parametrize("f", [uses_global, uses_helper, functools.partial(ping, 2)])
    def test_globals_and_helpers_and_recursion(self, f):
        n = int(GLOBAL.n)
        traces = []

        def counted(x):
            traces.append(1)
            return f(x)

        run = transforms.jit(counted)
        expected = float(f(3.0))
        assert [float(run(3.0)), float(run(3.0))] == [expected] * 2
        assert int(GLOBAL.n) == n + 3
        assert len(traces) == 1

    def test_a_global_or_a_cell_that_is_bound_to_another_object(self, monkeypatch):
        layer = Layer(1.0)
        cell = transforms.jit(lambda x: layer.w * x)
        run = transforms.jit(uses_global)
        assert (float(cell(1.0)), float(run(1.0))) == (1.0, 2.0)
        other = layer = Layer(5.0)
        monkeypatch.setitem(globals(), "GLOBAL", Layer(7.0))
        assert (float(cell(1.0)), float(run(1.0))) == (5.0, 7.0)
        assert int(GLOBAL.n) == 1
        assert layer is other

    def test_defaults(self):
        layer, other = Layer(), Layer(3.0)

        def f(x, m=layer, *, k=other):
            m.n.value += 1
            k.n.value += 2
            return m.w * x + k.w

        assert [float(transforms.jit(f)(2.0)), float(transforms.vmap(f)(jnp.ones(2))[0])] == [7, 5]
        assert (int(layer.n), int(other.n)) == (2, 4)

    def test_class_attributes(self):
        value = float(Layer.shared)
        layer = Layer()

        def f(m, x):
            m.shared.value = m.shared + 1
            return m.shared * x

        assert float(transforms.jit(f)(layer, 2.0)) == (value + 1) * 2
        assert float(Layer.shared) == value + 1
        assert layer.shared is Layer.shared

    def test_containers_that_hold_objects(self):
        held: dict[str, Any] = {"layers": [Layer(), Layer(3.0)], "sum": 0.0}

        @transforms.jit
        def f(x):
            for layer in held["layers"]:
                x = layer.step(x)
            held["layers"].append(held["layers"].pop(0))
            return x

        first = held["layers"][0]
        assert float(f(1.0)) == 6.0
        assert held["layers"][1] is first
        assert [int(layer.n) for layer in held["layers"]] == [1, 1]


TARGETS = {
    "method": lambda layer: layer.step,
    "callable module": lambda layer: layer,
    "partial": lambda layer: functools.partial(Layer.step, layer),
    "partial of a method": lambda layer: functools.partial(layer.step),
    "closure": lambda layer: lambda x: layer.step(x) * 1,
    "wraps": lambda layer: functools.wraps(layer.step)(lambda x: layer.step(x) * 1),
    "plain vmap": lambda layer: jax.vmap(layer.step, axis_size=1, in_axes=None, out_axes=None),
    "our remat": lambda layer: transforms.remat(layer.step),
    "our jit of a closure": lambda layer: transforms.jit(lambda x: layer.step(x) * 1),
}


class TestTargets:
    """C3."""

    @pytest.mark.parametrize("name", [name for name in TARGETS if name != "plain vmap"])
    def test_state_comes_back(self, name):
        layer = Layer()
        target = TARGETS[name](layer)
        assert float(transforms.jit(target)(3.0)) == 6.0
        assert transforms.vmap(target)(jnp.arange(2.0)).tolist() == [0.0, 2.0]
        assert float(transforms.grad(target)(1.0)) == 2.0
        assert float(transforms.jit(transforms.vmap(target))(jnp.ones(2))[0]) == 2.0
        assert float(transforms.remat(target)(1.0)) == 2.0
        assert int(layer.n) == 5

    def test_a_plain_transform_of_jax_that_only_reads(self):
        layer = Layer()
        run = transforms.jit(jax.vmap(lambda x: layer.w * x))
        assert run(jnp.ones(2)).tolist() == [2.0, 2.0]
        layer.w.value = jnp.array(5.0)
        assert run(jnp.ones(2)).tolist() == [5.0, 5.0]


class TestIdentity:
    def test_captured_and_passed_is_one_object(self):
        layer = Layer()

        @transforms.jit
        def f(m, v):
            assert m is layer
            assert v is layer.w
            layer.extra = m
            return [layer, m, layer.w]

        found = f(layer, layer.w)
        assert found[0] is found[1] is layer
        assert found[2] is layer.w
        assert layer.extra is layer

    def test_hidden_and_passed_is_one_object(self):
        layer = Layer()
        hidden = types.SimpleNamespace(layer=layer)

        @transforms.jit
        def f(m):
            m.n.value += 1
            hidden.layer.n.value += 1
            return hidden.layer.n, hidden.layer

        n, whole = f(layer)
        assert n is layer.n
        assert whole is layer
        assert int(n) == 2

    @pytest.mark.parametrize("transform", [transforms.jit, transforms.remat])
    def test_hidden_and_passed_may_be_two_objects_in_the_next_call(self, transform):
        def run(transform):
            layer, other = Layer(), Layer()
            hidden = types.SimpleNamespace(layer=layer)

            def f(m):
                m.n.value += 1
                hidden.layer.n.value *= 3
                return m.n.value

            f = transform(f)
            results = [int(f(m)) for m in (layer, layer, other, layer, other)]
            return results, int(layer.n), int(other.n)

        assert run(transform) == run(lambda f: f)

    @pytest.mark.parametrize("name", ["n", None])
    def test_what_is_hidden_is_never_taken_for_an_argument(self, name):
        layer, other = Layer(), Layer()
        hidden = types.SimpleNamespace(layer=layer)

        @transforms.jit
        def f(m):
            m.kept = hidden.layer if name is None else getattr(hidden.layer, name)
            return m.kept

        expected = layer if name is None else layer.n
        for m in (layer, layer, other, other):
            assert f(m) is expected
            assert m.kept is expected

    @pytest.mark.parametrize("wrap", [transforms.jit, transforms.remat, in_scan])
    @pytest.mark.parametrize("as_class", [False, True])
    def test_what_is_hidden_may_be_another_object_in_the_next_call(self, wrap, as_class):
        first, second = Layer(1.0), Layer(50.0)

        class Holder:
            layer = first

        hidden: Any = Holder if as_class else types.SimpleNamespace(layer=first)

        def f(x):
            return hidden.layer.step(x)

        g = wrap(f)
        for _ in range(3):
            assert float(g(1.0)) == 1.0
        hidden.layer = second
        for _ in range(3):
            assert float(g(1.0)) == 50.0
        hidden.layer = first
        assert float(g(1.0)) == 1.0
        assert (int(first.n), int(second.n)) == (4, 3)

    def test_what_is_captured_too_may_be_another_object_where_it_is_hidden(self):
        layer, other = Layer(1.0), Layer(50.0)
        hidden = types.SimpleNamespace(layer=layer)

        @transforms.jit
        def f(x):
            return layer.step(x) + hidden.layer.w

        assert [float(f(1.0)) for _ in range(3)] == [2.0] * 3
        hidden.layer = other
        assert [float(f(1.0)) for _ in range(3)] == [51.0] * 3
        layer = other
        assert [float(f(1.0)) for _ in range(3)] == [100.0] * 3

    def test_alternating_hidden_objects_take_no_further_traces(self):
        hidden, traces = types.SimpleNamespace(layer=None), []
        layers = [Layer(1.0), Layer(2.0)]

        @transforms.jit
        def f(x):
            traces.append(1)
            return hidden.layer.step(x)

        for hidden.layer in layers * 2:
            f(1.0)
        count = len(traces)
        for hidden.layer in layers * 3:
            assert float(f(1.0)) == float(hidden.layer.w)
        assert len(traces) == count
        assert [int(layer.n) for layer in layers] == [5, 5]

    def test_a_hidden_list_is_never_taken_for_an_argument(self):
        hidden = types.SimpleNamespace(list=[ab.Variable(0)])
        f = transforms.jit(lambda x: [hidden.list])
        with pytest.raises(CapturedWriteError):
            f(hidden.list)

    def test_what_is_captured_and_hidden_may_be_two_objects_in_the_next_call(self):
        layer, other = Layer(), Layer()
        hidden = types.SimpleNamespace(layer=layer)
        held = layer

        @transforms.jit
        def f():
            hidden.layer.n.value += 1
            return held.n.value

        assert [int(f()), int(f())] == [1, 2]
        held = other
        assert [int(f()), int(f())] == [0, 0]
        assert int(layer.n) == 4

    @pytest.mark.parametrize("wrap", [transforms.jit, transforms.remat])
    def test_functions_by_type_find_those_of_the_caller_afterwards(self, wrap):
        layer = Layer(3.0)

        @functools.singledispatch
        def scale(of, x):
            return x

        @scale.register
        def _(of: Layer, x):
            layer.n.value += 1
            return layer.w * x

        @scale.register
        def _(of: list, x):
            return scale(of[0], x) + 1

        for function in (wrap(scale), wrap(lambda of, x: scale(of, x) * 1)):
            for call in (function, scale, function):
                assert float(call(layer, 2.0)) == 6.0
                assert float(call([layer], 2.0)) == 7.0
                assert float(call((layer,), 2.0)) == 2.0
        assert int(layer.n) == 12

    @pytest.mark.parametrize("how", ["a closure", "a default", "a result"])
    @pytest.mark.parametrize("make", CONTAINERS)
    @pytest.mark.parametrize("wrap", [transforms.jit, transforms.remat])
    def test_a_new_function_around_a_container_holds_that_of_the_caller(self, wrap, make, how):
        layer = Layer()
        layer.held = make()

        def around(m):
            held = m.held
            if how == "a default":
                m.get = lambda held=held: held
            elif how == "a closure":
                m.get = lambda: held
            else:
                return lambda: held

        wrapped, before = wrap(around), layer.held.copy()
        for _ in range(3):
            get = wrapped(layer) or layer.get
            assert get() is layer.held
            assert layer.held == before

    def test_a_function_that_is_returned_closes_over_the_callers_objects(self):
        layer = Layer()

        @transforms.jit
        def make(m):
            def use(x):
                return m.step(x)

            return use

        use = make(layer)
        assert float(use(4.0)) == 8.0
        layer.w.value = jnp.array(3.0)
        assert float(use(4.0)) == 12.0
        assert float(make(layer)(1.0)) == 3.0
        assert int(layer.n) == 3

    def test_a_function_in_an_attribute(self):
        layer, other = Layer(), Layer(5.0)
        layer.hook = lambda x: other.step(x) * 1
        hook = layer.hook

        @transforms.jit
        def f(m, x):
            return m.hook(x)

        assert float(f(layer, 2.0)) == 10.0
        assert int(other.n) == 1
        assert layer.hook is hook


class TestWrites:
    def test_a_variable_of_the_enclosing_function_is_bound_anew(self):
        layer, other = Layer(1.0), Layer(2.0)
        first = layer

        @transforms.jit
        def swap():
            nonlocal layer, other
            layer, other = other, layer

        swap()
        assert other is first
        assert float(layer.w) == 2.0
        layer = Layer(9.0)

        @transforms.jit
        def replace():
            nonlocal layer
            layer = Layer(3.0)

        replace()
        assert float(layer.w) == 3.0
        layer.w.value = layer.w + 1  # it is an object of the caller

    def test_functions_that_share_a_variable_share_it_inside(self):
        layer, given = Layer(1.0), Layer(2.0)

        def put(value):
            nonlocal layer
            layer = value

        def get():
            return layer

        @transforms.jit
        def f(m):
            before = get().w * 1
            put(m)
            assert get() is m
            return before, get().w * 1

        assert [float(x) for x in f(given)] == [1.0, 2.0]
        assert layer is given
        assert get() is given

    def test_functions_that_share_a_global_share_it_inside(self):
        first = SHARED

        @transforms.jit
        def f():
            put_shared(9.0)
            return get_shared() * 1

        assert float(f()) == 9.0
        assert SHARED is not first
        assert float(get_shared()) == 9.0

    def test_functions_that_are_returned_share_a_variable(self):
        def make(m):
            kept = m

            def put(value):
                nonlocal kept
                kept = value

            def get():
                return kept

            return get, put

        layer = Layer()
        f = transforms.jit(make)
        get, put = f(layer)
        assert get() is layer
        put("other")
        assert get() == "other"
        assert f(layer)[0]() is layer

    @pytest.mark.parametrize("captures", [False, True])
    def test_a_function_with_a_state_of_its_own_is_not_returned(self, captures):
        def make(m):
            count = 0

            def tick():
                nonlocal count
                count += 1
                return (count, m) if captures else count

            return tick

        with pytest.raises(StaticValueError, match=r"tick\) that binds a variable .*\(count\)"):
            transforms.jit(make)(Layer())

    def test_counters_at_trace_time_go_on(self):
        layer, calls = Layer(), 0

        @transforms.jit
        def f(x):
            nonlocal calls
            global TRACES
            calls += 1
            TRACES += 1
            return layer.step(x)

        before = TRACES
        f(1.0)
        f(2.0)
        assert (calls, TRACES - before, int(layer.n)) == (1, 1, 2)

    @pytest.mark.parametrize("hidden", [False, True])
    def test_loops_carry_what_they_capture(self, hidden):
        layer, xs = Layer(), jnp.arange(4.0)
        held = types.SimpleNamespace(layer=layer)

        def step(total, x):
            target = held.layer if hidden else layer
            target.n.value += 1
            target.w.value = target.w + x
            return total + target.w, target.w * 1

        def run(xs):
            return transforms.scan(step)(0.0, xs)

        for times, f in enumerate((run, transforms.jit(run), transforms.jit(run)), 1):
            w, total = float(layer.w), 0.0
            for x in range(4):
                w += x
                total += w
            found, _ = f(xs)
            assert float(found) == total
            assert float(layer.w) == w
            assert int(layer.n) == 4 * times

    def test_gradients_do_not_see_what_is_captured_as_an_argument(self):
        layer = Layer()
        grads = transforms.grad(lambda x: layer.loss(x) * 1)(3.0)
        assert float(grads) == 24.0
        assert int(layer.n) == 1

    def test_a_failed_call_changes_nothing(self):
        layer, held = Layer(), types.SimpleNamespace(layer=Layer())

        @transforms.jit
        def f(x):
            layer.n.value += 1
            layer.new = x
            held.layer.n.value += 1
            raise KeyError("mine")

        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                f(1.0)
        assert (int(layer.n), int(held.layer.n)) == (0, 0)
        assert not hasattr(layer, "new")


TRACES = 0


PLAIN = {
    "jit": lambda f: jax.jit(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(1.0),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c), None), 1.0, jnp.ones(2)),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
}


class TestPlainJax:
    """A read is allowed, a write raises."""

    @pytest.mark.parametrize("name", PLAIN)
    def test_writes_raise_and_reads_do_not(self, name):
        layer = Layer()
        before = dict(vars(layer))

        def write(x):
            layer.w.value = layer.w * x
            return x

        def set_attribute(x):
            layer.new = x
            return x

        def delete(x):
            del layer.n
            return x

        for f, what in ((write, "value"), (set_attribute, "'new'"), (delete, "'n'")):
            with pytest.raises(CapturedWriteError, match=f"(?s){what}.*transform"):
                PLAIN[name](f)
        assert dict(vars(layer)) == before
        assert float(layer.w) == 2.0
        PLAIN[name](lambda x: layer.w * x)

    def test_the_message_says_how_the_object_is_reached(self):
        held = types.SimpleNamespace(layers=[Layer(), Layer()])

        def write(x):
            held.layers[1].n.value += 1

        def set_attribute(x):
            target = GLOBAL
            target.new = x

        def write_shared(x):
            Layer.shared.value = x

        for f, name in (
            (write, r"held\.layers\[1\]\.n"),
            (set_attribute, "GLOBAL"),
            (write_shared, r"Layer\.shared"),
        ):
            with pytest.raises(CapturedWriteError, match=rf"\({name}\).*jit of"):
                jax.jit(f)(1.0)

    @pytest.mark.parametrize("name", PLAIN)
    def test_our_jit_inside_that_only_reads(self, name):
        """C9."""

        class Reader(ab.Module):
            def __init__(self):
                self.w = ab.Param(jnp.array(2.0))

            @transforms.jit
            def read(self, x):
                return self.w * x

        reader = Reader()
        PLAIN[name](reader.read)
        assert list(vars(reader)) == ["w"]
        assert float(reader.read(3.0)) == 6.0


class TestTraces:
    def test_direct_calls_are_not_traced_again(self):
        layer, traces = Layer(), []

        def body(i, x):
            traces.append(1)
            return layer.step(x)

        for _ in range(4):
            transforms.fori_loop(0, 2, body, 1.0)
        assert len(traces) == 1
        assert int(layer.n) == 8

    def test_what_is_found_by_its_use_is_remembered(self):
        held, traces = types.SimpleNamespace(layer=Layer()), []

        @transforms.jit
        def f(x):
            traces.append(1)
            return held.layer.step(x)

        for _ in range(4):
            f(1.0)
        assert len(traces) == 2  # one of them in vain
        f(jnp.ones(2))
        assert len(traces) == 3
        assert int(held.layer.n) == 5

    def test_many_that_are_found_take_one_more_call(self):
        held = types.SimpleNamespace(layers=[Layer() for _ in range(20)])
        traces = []

        @transforms.jit
        def f(xs):
            def body(x, _):
                traces.append(1)
                for layer in held.layers:
                    x = layer.w * x
                return x, None

            return transforms.scan(body)(xs, jnp.arange(3))[0]

        f(1.0)
        assert len(traces) <= 6
        held.layers[0].w.value = jnp.array(0.0)
        assert float(f(1.0)) == 0.0

    def test_inside_a_function_that_jax_keeps(self):
        held = types.SimpleNamespace(layer=Layer())
        kept = jax.jit(lambda x: held.layer.w * x)

        @transforms.jit
        def f(x):
            return kept(x)

        assert float(f(3.0)) == 6.0
        held.layer.w.value = jnp.array(7.0)
        assert float(f(3.0)) == 21.0
        assert f(jnp.ones(2)).tolist() == [7.0, 7.0]

    def test_nothing_is_kept_alive(self):
        layer, held = Layer(), types.SimpleNamespace(layer=Layer())

        def f(x):
            return layer.step(x) + held.layer.step(x)

        run = transforms.jit(f)
        run(1.0)
        transforms.cond(True, f, f, 1.0)
        transforms.remat(f)(1.0)
        refs = [weakref.ref(x) for x in (layer, held.layer, f, run)]
        layer = held = f = run = None
        gc.collect()
        assert [ref() for ref in refs] == [None] * 4
