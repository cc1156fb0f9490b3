"""`cond` and `switch`: equal to the Python branch, the union of what branches write comes back."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import ArgumentError, BroadcastWriteError, StructureError
from anabranch.transforms import _runners


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]))
        self.stat = ab.BatchStat(jnp.array(3.0))
        self.count = ab.Variable(jnp.array(0))
        self.rngs = ab.Rngs(0)
        self.table = jnp.ones(2)
        self.scale = 2

    def double(self, x):
        self.w.value = self.w * 2
        return self.w.sum() * x

    def tick(self, x):
        self.count.value = self.count + 1
        self.table = self.table + x
        return x * 1.0

    def __call__(self, x):
        return self.double(x)


def python_cond(pred, true_fun, false_fun, *operands):
    return true_fun(*operands) if pred else false_fun(*operands)


def python_switch(index, branches, *operands):
    return branches[min(max(index, 0), len(branches) - 1)](*operands)


def values(model):
    arrays = ab.state(model, ab.Not(ab.RngKey)).flat()
    return {path: x.tolist() for path, x in arrays.items()}


def both(pred, true_fun, false_fun, x=2.0):
    """Run the branches by `cond` and by Python; return what they return."""
    ours, theirs = Model(), Model()
    found = transforms.cond(pred, true_fun, false_fun, ours, x)
    expected = python_cond(pred, true_fun, false_fun, theirs, x)
    assert values(ours) == values(theirs)
    return found, expected


class TestEqualToThePythonBranch:
    @pytest.mark.parametrize("pred", [True, False])
    def test_different_writes_are_united(self, pred):
        found, expected = both(pred, Model.double, Model.tick)
        assert float(found) == float(expected)

    @pytest.mark.parametrize("index", [-1, 0, 1, 2, 5])
    def test_switch_clamps(self, index):
        branches = [Model.double, Model.tick, lambda m, x: x * 10.0]
        ours, theirs = Model(), Model()
        found = transforms.switch(index, branches, ours, 2.0)
        expected = python_switch(index, branches, theirs, 2.0)
        assert float(found) == float(expected)
        assert values(ours) == values(theirs)

    @pytest.mark.parametrize("pred", [0, 2, 0.5, jnp.array(True), ab.Variable(jnp.array(0))])
    def test_predicates_are_scalars(self, pred):
        found = transforms.cond(pred, lambda x: x + 1, lambda x: x - 1, 5.0)
        assert float(found) == (6.0 if bool(pred) else 4.0)

    def test_only_what_the_chosen_branch_writes_changes(self):
        model = Model()
        w = model.w.value
        transforms.cond(False, Model.double, Model.tick, model, 1.0)
        assert model.w.value.tolist() == w.tolist()
        assert int(model.count.value) == 1

    def test_what_no_branch_writes_is_the_same_array(self):
        model = Model()
        stat, key = model.stat.value, model.rngs
        transforms.cond(True, Model.double, Model.tick, model, 1.0)
        assert model.stat.value is stat
        assert model.rngs is key

    @pytest.mark.parametrize("pred", [True, False])
    def test_random_draws_in_one_branch(self, pred):
        def draw(m):
            return jax.random.normal(m.rngs.default())

        ours, theirs = Model(), Model()
        found = transforms.cond(pred, draw, lambda m: jnp.zeros(()), ours)
        expected = python_cond(pred, draw, lambda m: jnp.zeros(()), theirs)
        assert float(found) == float(expected)
        assert int(ours.rngs.default.count.value) == int(pred)

    def test_swapped_in_one_branch_by_value(self):
        def swap(m):
            m["a"].value, m["b"].value = m["b"].value, m["a"].value

        m = {"a": ab.Param(1.0), "b": ab.Param(2.0)}
        transforms.cond(False, swap, lambda m: None, m)
        assert [float(m["a"]), float(m["b"])] == [1.0, 2.0]
        transforms.cond(True, swap, lambda m: None, m)
        assert [float(m["a"]), float(m["b"])] == [2.0, 1.0]

    def test_bound_methods_partials_and_callable_modules(self):
        """C3."""
        a, b = Model(), Model()
        found = transforms.cond(True, a.double, functools.partial(Model.tick, b), 2.0)
        assert float(found) == 12.0
        assert a.w.value.tolist() == [2.0, 4.0]
        assert int(b.count.value) == 0
        transforms.switch(1, [a, b], 1.0)
        assert b.w.value.tolist() == [2.0, 4.0]

    def test_operand_by_keyword(self):
        assert float(transforms.cond(True, lambda x: x + 1, lambda x: x, operand=1.0)) == 2.0
        assert transforms.cond(True, lambda x: x, lambda x: x, operand=None) is None
        with pytest.raises(StructureError, match="not both"):
            transforms.cond(True, lambda x: x, lambda x: x, 1.0, operand=1.0)

    def test_one_branch(self):
        v = ab.Variable(1)

        def inc(v):
            v.value += 1

        transforms.switch(7, [inc], v)
        assert int(v) == 2


class TestIdentity:
    def test_returned_inputs_are_the_callers(self):
        model = Model()
        same, w = transforms.cond(True, lambda m, n: (m, n.w), lambda m, n: (n, m.w), model, model)
        assert same is model
        assert w is model.w

    def test_the_same_new_object_twice(self):
        def make(x):
            v = ab.Cache(x)
            return [v, {"again": v}]

        first, second = transforms.cond(True, make, lambda x: make(x * 2), 3.0)
        assert second["again"] is first
        assert float(first) == 3.0

    def test_aliases_of_new_objects_must_agree(self):
        def two(x):
            return ab.Cache(x), ab.Cache(x)

        def one(x):
            v = ab.Cache(x)
            return v, v

        for f, g in ((one, two), (two, one)):
            with pytest.raises(StructureError, match="alias"):
                transforms.cond(True, f, g, 1.0)

    @pytest.mark.parametrize("pred", [True, False])
    def test_both_add_the_same_attributes(self, pred):
        def add(m, x):
            m.cache = ab.Cache(x)
            m.layers = [m.cache, m]
            m.mode = "on"

        model = Model()
        transforms.cond(pred, add, lambda m, x: add(m, x * 2), model, 3.0)
        assert float(model.cache.value) == (3.0 if pred else 6.0)
        assert model.layers[0] is model.cache
        assert model.layers[1] is model
        assert model.mode == "on"

    def test_both_repoint_to_the_same_object(self):
        m = {"a": ab.Param(1.0), "b": ab.Param(2.0)}
        a = m["a"]

        def swap(m):
            m["a"], m["b"] = m["b"], m["a"]

        transforms.cond(False, swap, functools.partial(swap), m)
        assert m["b"] is a

    def test_cycles(self):
        m = {"v": ab.Param(1.0)}
        m["me"] = m

        def write(m):
            m["me"]["v"].value *= 5
            return m

        assert transforms.cond(True, write, lambda m: m, m) is m
        assert float(m["v"]) == 5.0

    def test_immutable_values_in_one_branch(self):
        model = Model()
        model.pair = (jnp.ones(()), "text", ab.Param(1.0))

        def write(m):
            m.pair = (m.pair[0] + 1, "text", m.pair[2])

        param = model.pair[2]
        transforms.cond(True, write, lambda m: None, model)
        assert float(model.pair[0]) == 2.0
        assert model.pair[2] is param
        transforms.cond(False, write, lambda m: None, model)
        assert float(model.pair[0]) == 2.0


class TestResults:
    def test_numbers_that_differ_become_arrays(self):
        found = transforms.cond(False, lambda: (1.0, 1), lambda: (2.0, 1))
        assert float(found[0]) == 2.0
        assert found[1] == 1
        assert float(transforms.cond(True, lambda x: 0.0, lambda x: x, 5.0)) == 0.0
        first, second = transforms.cond(False, lambda x: (0, 0), lambda x: (x, x + 1), 5)
        assert (int(first), int(second)) == (5, 6)

    def test_numbers_written_to_variables(self):
        v = ab.Variable(jnp.array(7))

        def reset(v):
            v.value = 0

        transforms.cond(False, reset, lambda v: None, v)
        assert int(v) == 7
        transforms.cond(True, reset, lambda v: None, v)
        assert int(v) == 0

    def test_statics_that_agree_come_back_as_themselves(self):
        assert transforms.cond(True, lambda: "a", lambda: "a") == "a"


class TestDisagreement:
    def test_names_both_branches_and_the_attribute(self):
        def add(m):
            m.extra = jnp.ones(())

        model = Model()
        with pytest.raises(StructureError, match=r"args\[0\].*has also \.extra.*true_fun.*add"):
            transforms.cond(True, add, lambda m: None, model)
        assert not hasattr(model, "extra")

    def test_static_values_are_shown(self):
        def set_to(value, m):
            m.scale = value

        model = Model()
        with pytest.raises(StructureError, match=r"scale.*is 7.*is 8"):
            transforms.cond(True, functools.partial(set_to, 7), functools.partial(set_to, 8), model)
        with pytest.raises(StructureError, match=r"scale.*is 7.*is 2"):
            transforms.cond(True, functools.partial(set_to, 7), lambda m: None, model)
        with pytest.raises(StructureError, match=r"is True.*is 1"):
            transforms.cond(
                True, functools.partial(set_to, True), functools.partial(set_to, 1), model
            )
        assert model.scale == 2

    @pytest.mark.parametrize(
        ("f", "g", "match"),
        [
            (lambda x: (x, x), lambda x: [x, x], "tuple.*list"),
            (lambda x: {"a": x}, lambda x: {"b": x}, r"\['a'\].*\['b'\]"),
            (lambda x: [ab.Param(x)], lambda x: [ab.Cache(x)], "Param.*Cache"),
            (lambda x: x, lambda x: None, "array.*None"),
            (lambda x: ab.Param(x, tag="a"), lambda x: ab.Param(x, tag="b"), "metadata"),
            (lambda x: x, lambda x: jnp.ones(2), r"float32\[\].*float32\[2\]"),
            (lambda x: x, lambda x: 1, r"float32\[\].*int32\[\]"),
            (lambda x: [x], lambda x: [x, x], "entries|also"),
        ],
    )
    def test_results_of_different_structure(self, f, g, match):
        with pytest.raises(StructureError, match=match):
            transforms.cond(True, f, g, 1.0)

    def test_an_input_and_a_new_object(self):
        with pytest.raises(StructureError, match=r"came in as args\[0\].*new Param"):
            transforms.cond(True, lambda v: v, lambda v: ab.Param(v.value), ab.Param(1.0))

    def test_different_inputs(self):
        with pytest.raises(StructureError, match=r"args\[0\].*args\[1\]"):
            transforms.cond(True, lambda a, b: a, lambda a, b: b, ab.Param(1.0), ab.Param(2.0))

    def test_written_dtypes_by_path(self):
        def write(m):
            m.count.value = m.count * 1.5

        with pytest.raises(StructureError, match=r"args\[0\]\.count.*float32.*int32"):
            transforms.cond(True, write, lambda m: None, Model())

    def test_messages_are_bounded(self):
        def many(m):
            for i in range(5000):
                setattr(m, f"attribute_{i}", i)

        with pytest.raises(StructureError) as error:
            transforms.cond(True, many, lambda m: None, Model())
        assert len(str(error.value)) < 4000

    def test_bad_calls(self):
        for bad in ("text", jnp.ones(2), None):
            with pytest.raises(StructureError, match="pred"):
                transforms.cond(bad, lambda: 1, lambda: 2)
        with pytest.raises(ArgumentError, match="true_fun is of type int"):
            transforms.cond(True, 1, lambda: 2)
        with pytest.raises(StructureError, match="no branches"):
            transforms.switch(0, [])
        with pytest.raises(StructureError, match="not an integer"):
            transforms.switch(1.0, [lambda: 1, lambda: 2])
        with pytest.raises(ArgumentError, match="branches is of type function"):
            transforms.switch(0, lambda: 1)
        with pytest.raises(ArgumentError, match=r"branches\[1\] is of type int"):
            transforms.switch(1, [lambda: 1, 2])

    def test_failures_change_nothing(self):
        def fail(m):
            m.w.value = m.w * 2
            m.new = 1
            raise RuntimeError("no")

        model = Model()
        w = model.w.value
        for pred in (True, False):  # both branches are traced (S1d)
            with pytest.raises(RuntimeError, match="no"):
                transforms.cond(pred, fail, lambda m: None, model)
        assert model.w.value is w
        assert not hasattr(model, "new")

    def test_captured_objects_are_written_by_the_branch_that_runs(self):
        v, w = ab.Variable(1), ab.Variable(1)

        def write(v):
            v.value = 2

        for pred in (True, False):
            transforms.cond(pred, lambda: write(v), lambda: write(w))
            assert (int(v), int(w)) == ((2, 1) if pred else (2, 2))


class TestTraceCounts:
    def test_two_traces_in_four_calls(self):
        """C7."""
        traces = []

        def f(m, x):
            traces.append("f")
            return m.double(x)

        def g(m, x):
            traces.append("g")
            return m.tick(x)

        model, other = Model(), Model()
        for pred in (True, False, True, False):
            transforms.cond(pred, f, g, model, 1.0)
        assert traces == ["f", "g"]
        transforms.cond(True, f, g, other, 1.0)  # another object of the same structure
        assert traces == ["f", "g"]
        assert model.w.value.tolist() == [4.0, 8.0]
        assert other.w.value.tolist() == [2.0, 4.0]

    def test_one_trace_a_branch_of_switch(self):
        traces = [0, 0, 0]

        def branch(i, v):
            traces[i] += 1
            v.value = v + i

        branches = [functools.partial(branch, i) for i in range(3)]
        v = ab.Variable(0)
        for index in (0, 1, 2, 2):
            transforms.switch(index, branches, v)
        assert traces == [1, 1, 1]
        assert int(v) == 5

    def test_a_counter_in_the_closure_does_not_retrace(self):
        count = 0

        def f(x):
            nonlocal count
            count += 1
            return x

        def g(x):
            nonlocal count
            count += 1
            return x + 1

        for _ in range(4):
            transforms.cond(True, f, g, 1.0)
        assert count == 2

    def test_once_under_jit_and_grad(self):
        traces = []

        def f(v):
            traces.append(1)
            return v**2

        def g(v):
            traces.append(1)
            return v * 1.0

        loss = lambda v, p: transforms.cond(p, f, g, v)  # noqa: E731 (one line is clearer)
        step = transforms.jit(transforms.grad(loss))
        for _ in range(3):
            step(ab.Param(3.0), True)
        assert len(traces) == 2

    def test_nothing_is_kept_alive(self):
        def run():
            model = Model()
            held = Model()

            def f(m, x):
                return m.double(x) * held.scale

            def g(m, x):
                return m.tick(x)

            traces = ab.Param(jnp.ones(3))

            def h(x):
                return x

            transforms.cond(True, f, g, model, 1.0)
            transforms.cond(True, functools.partial(g, model), h, 1.0)
            transforms.switch(0, [h, h], traces)
            return [weakref.ref(x) for x in (model, held, f, g, h, traces)]

        gc.collect()  # what other tests have left
        before = len(_runners.DIRECT)
        refs = run()
        gc.collect()
        assert [ref() for ref in refs] == [None] * len(refs)
        assert len(_runners.DIRECT) == before


class TestCaptures:
    def test_a_changed_closure_is_seen_under_grad(self):
        """C38."""
        scale = jnp.array(1.0)

        def f(x):
            return x * scale

        def g(x):
            return x

        assert float(transforms.cond(True, f, g, 2.0)) == 2.0
        scale = jnp.array(5.0)
        assert float(transforms.cond(True, f, g, 2.0)) == 10.0

        def loss(w):
            nonlocal scale
            before, scale = scale, w
            try:
                return transforms.cond(True, f, g, 2.0)
            finally:
                scale = before  # what is left there is refused

        for _ in range(2):
            assert float(jax.grad(loss)(3.0)) == 2.0
            assert float(transforms.grad(loss)(3.0)) == 2.0
        scale = 7.0
        assert float(transforms.cond(True, f, g, 2.0)) == 14.0

    def test_containers_and_namespaces_that_hold_arrays(self):
        box = {"w": jnp.array(1.0)}
        space = types.SimpleNamespace(w=jnp.array(1.0))

        def f(x):
            return x * box["w"] * space.w

        def loss(w):
            box["w"] = space.w = w
            return transforms.cond(True, f, lambda x: x, 2.0)

        assert float(transforms.cond(True, f, lambda x: x, 2.0)) == 2.0
        for _ in range(2):
            assert float(jax.grad(loss)(3.0)) == 12.0

    def test_captured_modules_are_read_afresh(self):
        model = Model()

        def f(x):
            return model.w.sum() * x

        assert float(transforms.cond(True, f, lambda x: x, 1.0)) == 3.0
        model.w.value = jnp.array([10.0, 20.0])
        assert float(transforms.cond(True, f, lambda x: x, 1.0)) == 30.0

    def test_methods_see_what_their_helpers_capture(self):
        table = {"k": 2.0}

        def helper(x):
            return x * table["k"]

        def f(x):
            return helper(x)

        def g(x):
            return x

        assert float(transforms.cond(True, f, g, 1.0)) == 2.0
        table["k"] = 3.0
        assert float(transforms.cond(True, f, g, 1.0)) == 3.0


class TestComposition:
    @pytest.mark.parametrize("pred", [True, False])
    def test_jit_and_nesting(self, pred):
        def inner(m, x):
            return transforms.cond(x > 1, Model.double, Model.tick, m, x)

        @transforms.jit
        def step(pred, m, x):
            return transforms.cond(pred, inner, lambda m, x: x * 0, m, x)

        ours, theirs = Model(), Model()
        for x in (0.5, 2.0):
            found = step(pred, ours, x)
            expected = (theirs.double if x > 1 else theirs.tick)(x) if pred else 0.0
            assert float(found) == float(expected)
            assert values(ours) == values(theirs)

    @pytest.mark.parametrize("pred", [True, False])
    def test_gradients(self, pred):
        def loss(m, pred):
            def square(m):
                m.stat.value = m.stat * 2
                return (m.w**2).sum() * m.stat

            def tick(m):
                m.count.value = m.count + 1
                return m.w.sum()

            return transforms.cond(pred, square, tick, m)

        model = Model()
        grads = transforms.grad(loss)(model, pred)
        assert grads["w"].tolist() == ([12.0, 24.0] if pred else [1.0, 1.0])
        assert float(model.stat.value) == (6.0 if pred else 3.0)
        assert int(model.count.value) == (0 if pred else 1)

    def test_written_state_carries_gradients(self):
        def loss(m, pred):
            transforms.cond(pred, Model.double, Model.tick, m, 1.0)
            return (m.w**2).sum()

        assert transforms.grad(loss)(Model(), True)["w"].tolist() == [8.0, 16.0]
        assert transforms.grad(loss)(Model(), False)["w"].tolist() == [2.0, 4.0]

    def test_batched_predicates_select(self):
        axes = ab.StateAxes({ab.Param: 0, ...: None})
        v = {"w": ab.Param(jnp.arange(4.0)), "n": ab.Variable(jnp.array(10.0))}

        def double(m):
            m["w"].value = m["w"] * m["n"]

        preds = jnp.array([True, False, True, False])
        transforms.vmap(
            lambda p, m: transforms.cond(p, double, lambda m: None, m), in_axes=(0, axes)
        )(preds, v)
        assert v["w"].value.tolist() == [0.0, 1.0, 20.0, 3.0]

    def test_a_broadcast_variable_under_a_batched_predicate(self):
        n = ab.Variable(jnp.array(0.0))

        def write(n):
            n.value = n + 1

        def lane(p, n):
            transforms.cond(p, write, lambda n: None, n)

        mapped = transforms.vmap(lane, in_axes=(0, None))
        with pytest.raises(BroadcastWriteError, match=r"args\[1\]"):
            mapped(jnp.array([True, False]), n)
        assert float(n) == 0.0

    def test_inside_plain_jax(self):
        def double(v):
            v.value *= 2

        def f(x, p):
            v = ab.Variable(x)
            transforms.cond(p, double, lambda v: None, v)
            return v.value

        assert float(jax.jit(f)(3.0, True)) == 6.0
        assert float(jax.grad(f)(3.0, True)) == 2.0
        assert jax.vmap(f)(jnp.arange(2.0), jnp.array([True, False])).tolist() == [0.0, 1.0]
        assert float(jax.checkpoint(f)(3.0, True)) == 6.0
        with jax.disable_jit():
            assert float(f(3.0, True)) == 6.0

    def test_equals_plain_jax_on_plain_arrays(self):
        f, g = (lambda x, y: (jnp.sin(x) * y).sum()), (lambda x, y: (x + y).sum())
        x = jnp.linspace(0.0, 1.0, 4)
        for pred in (True, False):
            assert float(transforms.cond(pred, f, g, x, 2.0)) == float(
                jax.lax.cond(pred, f, g, x, 2.0)
            )
