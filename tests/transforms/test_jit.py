"""`transforms.jit` equals the plain call: R1 to R4, with traces counted."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms


class Layer(ab.Module):
    def __init__(self, scale: float = 1.0) -> None:
        self.w = ab.Param(jnp.full(2, scale))
        self.calls = 0


class Counter:
    """Count the traces of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.traces = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self.function(*args, **kwargs)


def counted(function: Any, **options: Any) -> tuple[Any, Counter]:
    counter = Counter(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return counter(*args, **kwargs)

    return transforms.jit(call, **options), counter


class TestWrites:
    def test_values_come_back_into_the_same_objects(self):
        def step(layer, x):
            layer.w.value = layer.w * x

        jitted, counter = counted(step)
        layer = Layer()
        w = layer.w
        jitted(layer, 2.0)
        jitted(layer, 3.0)
        assert layer.w is w
        assert w.value.tolist() == [6.0, 6.0]
        assert counter.traces == 1

    def test_what_is_only_read_is_not_touched(self):
        layer = Layer()
        layer.array = np.ones(2)
        layer.table = jnp.ones(3)
        values = [layer.w.value, layer.array, layer.table]
        jitted = transforms.jit(lambda m: (m.w * m.array).sum() + m.table.sum())
        assert float(jitted(layer)) == 5.0
        now = [layer.w.value, layer.array, layer.table]
        assert all(a is b for a, b in zip(values, now, strict=True))
        outputs = jax.tree.leaves(jitted.lower(layer).out_info)
        assert len(outputs) == 1

    def test_weights_that_are_only_read_are_no_outputs(self):
        """C4: a model of 4 MB, the plain call's result and nothing else."""
        layer = Layer()
        layer.weights = [ab.Param(jnp.ones((512, 512))) for _ in range(4)]
        before = [w.value for w in layer.weights]
        jitted = transforms.jit(lambda m: sum(w.value.sum() for w in m.weights))
        memory = jitted.lower(layer).compile().memory_analysis()
        assert memory.argument_size_in_bytes == 4 * 2**20
        assert memory.output_size_in_bytes == 4
        for _ in range(3):
            assert float(jitted(layer)) == 4 * 2**18
            assert all(w.value is x for w, x in zip(layer.weights, before, strict=True))

    def test_attributes_are_swapped_added_and_deleted(self):
        def change(a, b):
            a.w, b.w = b.w, a.w
            a.new = ab.BatchStat(a.w * 2)
            a.alias = a.new
            del b.calls
            a.me = a
            a.text = "x"

        a, b = Layer(1.0), Layer(2.0)
        a_w, b_w = a.w, b.w
        transforms.jit(change)(a, b)
        assert a.w is b_w
        assert b.w is a_w
        assert a.new is a.alias
        assert a.new.value.tolist() == [4.0, 4.0]
        assert type(a.new) is ab.BatchStat
        assert not hasattr(b, "calls")
        assert a.me is a
        assert list(vars(a)) == ["w", "calls", "new", "alias", "me", "text"]

    def test_python_state_counts_and_retraces(self):
        def step(layer):
            layer.calls += 1

        jitted, counter = counted(step)
        layer = Layer()
        for _ in range(3):
            jitted(layer)
        assert layer.calls == 3
        assert counter.traces == 3
        other = Layer()
        jitted(other)
        assert other.calls == 1
        assert counter.traces == 3  # that structure was seen before

    def test_plain_arrays_move_between_attributes(self):
        class Two(ab.Module):
            def __init__(self):
                self.a, self.b = jnp.ones(2), jnp.zeros(3)

        def swap(two):
            two.a, two.b = two.b, two.a

        two = Two()
        a, b = two.a, two.b
        transforms.jit(swap)(two)
        assert two.a is b
        assert two.b is a

    def test_lists_and_dicts_are_changed_in_place(self):
        def change(items, table):
            items.append(table)
            items.insert(0, items[0])
            table["n"] = 1
            table["first"] = table.pop("first")
            return len(items)

        v = ab.Param(1.0)
        items, table = [v], {"first": v, "second": 2}
        assert transforms.jit(change)(items, table) == 3
        assert items[0] is v
        assert items[1] is v
        assert items[2] is table
        assert list(table) == ["second", "n", "first"]
        assert table["first"] is v

    def test_keys_that_python_takes_for_one_are_told_apart(self):
        def f(d):
            d[1] = d.pop(True)
            d[-0.0] = d.pop(0.0)

        d = {True: "a", 0.0: "b"}
        transforms.jit(f)(d)
        assert repr(d) == repr({1: "a", -0.0: "b"})

    @pytest.mark.parametrize("dtype", [np.int8, np.float32, jnp.bfloat16, jnp.float8_e4m3fn])
    def test_numpy_scalars_are_traced_as_jax_traces_them(self, dtype):
        traces: list[Any] = []

        def double(x: Any, given: Any) -> Any:
            traces.append(x)
            return x + x, given["a"] + given["a"]

        one, two = np.ones(1, dtype)[0], np.full(1, 2, dtype)[0]
        jitted = ab.jit(double)
        for x in (one, two, one):
            found, expected = jitted(x, {"a": x}), jax.jit(double)(x, {"a": x})
            assert [a.dtype for a in found] == [a.dtype for a in expected]
            assert [float(a) for a in found] == [float(a) for a in expected]
        assert len(traces) == 2  # one each

    def test_a_numpy_array_is_written_alike_in_a_trace_and_outside(self):
        def f(v, x):
            v[...] = x

        x = np.ones(2, np.float32)
        for transform in (lambda f: f, transforms.jit, transforms.remat):
            v = ab.Param(jnp.zeros(2))
            transform(f)(v, x)
            assert v.value is x

    def test_objects_that_are_detached_keep_what_was_written(self):
        def detach(layer):
            old = layer.w
            layer.w = ab.Param(jnp.zeros(2))
            old.value = old * 10
            inner = layer.items.pop()
            inner.append(3)

        layer = Layer()
        inner: list[int] = []
        layer.items = [inner]
        w = layer.w
        transforms.jit(detach)(layer)
        assert w.value.tolist() == [10.0, 10.0]
        assert layer.w is not w
        assert layer.w.value.tolist() == [0.0, 0.0]
        assert inner == [3]
        assert layer.items == []

    def test_metadata_and_classes_come_back(self):
        class Special(Layer):
            pass

        def change(layer):
            layer.w.set_metadata(frozen=True)
            layer.__class__ = Special

        layer = Layer()
        transforms.jit(change)(layer)
        assert layer.w.frozen is True
        assert type(layer) is Special


class TestIdentity:
    def test_returned_inputs_are_the_inputs(self):
        layer = Layer()
        items = [layer]
        out = transforms.jit(lambda m, items: (m, {"w": m.w}, items))(layer, items)
        assert out[0] is layer
        assert out[1]["w"] is layer.w
        assert out[2] is items

    def test_one_object_as_two_arguments_is_one_inside(self):
        def f(a, b, *, c):
            assert a is b
            assert c is a.w
            a.w.value = a.w + 1
            return b.w.value

        layer = Layer()
        assert transforms.jit(f)(layer, layer, c=layer.w).tolist() == [2.0, 2.0]
        assert layer.w.value.tolist() == [2.0, 2.0]

    def test_aliases_are_part_of_the_structure(self):
        jitted, counter = counted(lambda a, b: a + b)
        v, w = ab.Param(1.0), ab.Param(2.0)
        assert float(jitted(v, w)) == 3.0
        assert float(jitted(v, v)) == 2.0
        assert float(jitted(w, w)) == 4.0
        assert counter.traces == 2

    def test_a_new_object_returned_twice_is_one(self):
        def make():
            layer = Layer(3.0)
            return {"x": layer, "y": [layer, layer.w]}

        out = transforms.jit(make)()
        assert out["x"] is out["y"][0]
        assert out["x"].w is out["y"][1]
        assert type(out["x"]) is Layer

    def test_two_instances_share_a_trace(self):
        jitted, counter = counted(lambda m: m.w.sum())
        assert float(jitted(Layer(1.0))) == 2.0
        assert float(jitted(Layer(2.0))) == 4.0
        assert counter.traces == 1

    def test_static_results_come_back_as_themselves(self):
        out = transforms.jit(lambda n: (n, 3, "a", None, 2.5, (1, True)))(7)
        assert repr(out) == repr((7, 3, "a", None, 2.5, (1, True)))


class TestStatics:
    @pytest.mark.parametrize(
        ("values", "traces"), [([1, True, 1.0], 3), ([0.0, -0.0], 2), ([float("nan")] * 3, 1)]
    )
    def test_are_compared_by_type_and_bits(self, values, traces):
        """C35."""
        jitted, counter = counted(lambda m: repr(m.k))
        layer = Layer()
        for value in [*values, *values]:
            layer.k = value
            assert jitted(layer) == repr(value)
        assert counter.traces == traces

    def test_untouched_ones_stay_the_callers_own(self):
        """A cached trace must not bring back an equal object of another call."""

        class Equal:
            def __init__(self, text):
                self.text = text

            def __eq__(self, other):
                return isinstance(other, Equal)

            def __hash__(self):
                return 0

        def f(m):
            m.new = ab.Param(1.0)
            m.items.append(m.s)

        jitted, counter = counted(f)
        for text in ("first", "second"):
            layer = Layer()
            layer.s, layer.items = Equal(text), [Equal(text)]
            s, inner = layer.s, layer.items[0]
            jitted(layer)
            assert layer.s is s
            assert layer.items[0] is inner
            assert layer.items[1] is s
        assert counter.traces == 1

    def test_those_with_identity_cannot_be_created(self):
        for make in (object, lambda: iter([1]), lambda: np.random.default_rng(1)):
            with pytest.raises((ab.errors.StaticValueError, ab.errors.NodeTypeError)):
                transforms.jit(lambda make=make: make())()

    @pytest.mark.parametrize("method", ["__hash__", "__eq__"])
    def test_those_that_cannot_be_compared_are_refused_by_path(self, method):
        def fail(*_):
            raise RuntimeError("not me")

        namespace = {"__hash__": lambda _: 1, "__eq__": lambda a, b: a is b, method: fail}
        layer = Layer()
        layer.value = type("Odd", (), namespace)()
        with pytest.raises(ab.errors.StaticValueError, match=r"args\[0\]\.value: .*not me"):
            transforms.jit(lambda m: m.w)(layer)

    def test_those_that_are_compared_by_element_are_refused_by_path(self):
        namespace = {"__hash__": lambda _: 1, "__eq__": lambda a, b: np.array([True, False])}
        layer = Layer()
        layer.value = type("Odd", (), namespace)()
        with pytest.raises(ab.errors.StaticValueError, match=r"args\[0\]\.value: .*compared"):
            transforms.jit(lambda m: m.w)(layer)

    def test_functions_that_close_over_tracers_cannot_be_left_behind(self):
        def f(m):
            traced = m.w * 2
            m.late = lambda: traced

        layer = Layer()
        with pytest.raises(ab.errors.StaticValueError, match=r"^args\[0\]\.late: .*closes over"):
            transforms.jit(f)(layer)
        assert not hasattr(layer, "late")

    @pytest.mark.parametrize(
        "make",
        [
            lambda m, traced: lambda: traced + m.w,
            lambda m, traced: lambda x=traced: x + m.w,
            lambda m, traced: lambda *, x=traced: x + m.w,
            lambda m, traced: lambda x=(1, {"a": [traced]}): x[1]["a"][0] + m.w,
        ],
    )
    def test_nor_those_that_reach_an_object_as_well(self, make):
        def f(m):
            m.late = make(m, m.w * 2)

        layer = Layer()
        with pytest.raises(ab.errors.StaticValueError, match="closes over"):
            transforms.jit(f)(layer)
        assert not hasattr(layer, "late")

    def test_variables_inside_variables_are_refused_at_once(self):
        v = ab.Param(jnp.ones(2))
        for wrong in (lambda v: [ab.Param(v.value)], lambda v: "text", lambda v: {"a": "text"}):
            with pytest.raises(ab.errors.NodeTypeError, match="inside the value"):
                transforms.jit(lambda v, wrong=wrong: setattr(v, "value", wrong(v)))(v)
        assert v.value.tolist() == [1.0, 1.0]

    def test_mutable_ones_cannot_be_created(self):
        class Thing:
            def __init__(self):
                self.n = 1

        layer = Layer()
        with pytest.raises(ab.errors.StaticValueError, match="thing"):
            transforms.jit(lambda m: setattr(m, "thing", Thing()))(layer)
        assert not hasattr(layer, "thing")

    def test_unregistered_objects_with_state_are_refused(self):
        """C33."""

        class Config:
            def __init__(self):
                self.n = 0

        layer = Layer()
        layer.cfg = Config()

        def f(m):
            m.cfg.n += 1

        with pytest.raises(ab.errors.NodeTypeError, match=r"args\[0\]\.cfg") as caught:
            transforms.jit(f)(layer)
        assert "@graph.node" in str(caught.value)
        assert "static=True" in str(caught.value)
        assert layer.cfg.n == 0

    def test_declared_ones_are_restored_when_written(self):
        @ab.graph.node(static=True)
        class Config:
            def __init__(self):
                self.n = 0

        layer = Layer()
        layer.cfg = Config()

        def f(m):
            m.w.value = m.w * 2
            m.cfg.n += 1

        with pytest.raises(ab.errors.ValueWriteError, match="Config"):
            transforms.jit(f)(layer)
        assert layer.cfg.n == 0
        assert layer.w.value.tolist() == [1.0, 1.0]


class TestFailures:
    def test_in_the_third_of_five_writes_change_nothing(self):
        """C31."""

        def f(m, fail):
            m.w.value = m.w + 1
            m.calls = 5
            m.new = []
            if fail:
                raise RuntimeError("third")
            del m.calls

        layer = Layer()
        w = layer.w.value
        jitted = transforms.jit(f, static_argnames="fail")
        with pytest.raises(RuntimeError, match="third"):
            jitted(layer, True)
        assert layer.w.value is w
        assert list(vars(layer)) == ["w", "calls"]
        assert layer.calls == 0
        jitted(layer, fail=False)
        assert list(vars(layer)) == ["w", "new"]

    def test_keyboard_interrupt_while_tracing_changes_nothing(self):
        def f(m):
            m.w.value = m.w + 1
            raise KeyboardInterrupt

        layer = Layer()
        with pytest.raises(KeyboardInterrupt):
            transforms.jit(f)(layer)
        assert layer.w.value.tolist() == [1.0, 1.0]
        transforms.jit(lambda m: setattr(m, "ok", 1))(layer)
        assert layer.ok == 1

    def test_a_run_time_error_changes_nothing(self):
        def boom(x):
            raise ValueError("run time")

        def f(m):
            shape = jax.ShapeDtypeStruct((2,), jnp.float32)
            m.w.value = jax.pure_callback(boom, shape, m.w.value)

        layer = Layer()
        # JAX reports it where the result is read, if not in the call
        with pytest.raises(Exception, match="run time"):
            transforms.jit(f)(layer)
            jax.block_until_ready(layer.w.value)

    def test_writing_a_hidden_module_is_refused(self):
        layer, hidden = Layer(), types.SimpleNamespace(other=Layer())

        def f(m):
            m.w.value = m.w + 1
            hidden.other.new = m.w

        with pytest.raises(ab.errors.CapturedWriteError, match="argument"):
            transforms.jit(f)(layer)
        assert layer.w.value.tolist() == [1.0, 1.0]
        assert list(vars(hidden.other)) == ["w", "calls"]

    def test_returning_a_hidden_module_is_refused(self):
        hidden = types.SimpleNamespace(other=Layer())
        with pytest.raises(ab.errors.CapturedWriteError, match="as a copy"):
            transforms.jit(lambda m: hidden.other)(Layer())

    def test_immutable_values_cannot_be_changed_in_place(self):
        layer = Layer()
        layer.partial = functools.partial(max, default=1)

        def f(m):
            m.partial.keywords["default"] = 2

        with pytest.raises(ab.errors.ValueWriteError, match="partial"):
            transforms.jit(f)(layer)
        assert layer.partial.keywords == {"default": 1}

    def test_an_escaped_twin_says_what_it_is(self):
        escaped: list[Any] = []
        transforms.jit(lambda m: escaped.extend([m, m.w]))(Layer())
        with pytest.raises(ab.errors.SpentTwinError, match="twin"):
            _ = escaped[0].w
        with pytest.raises(ab.errors.SpentTwinError, match="twin"):
            _ = escaped[1].value
        for twin in escaped:
            with pytest.raises(ab.errors.SpentTwinError, match="twin"):
                transforms.jit(lambda m: 1)(twin)

    def test_nothing_leaks_by_jax_s_own_check(self):
        with jax.checking_leaks():
            layer = Layer()
            assert transforms.jit(lambda m: m)(layer) is layer
            v = ab.Param(jnp.arange(3.0))
            assert transforms.vmap(lambda v: v * 2)(v).tolist() == [0.0, 2.0, 4.0]
            assert float(transforms.grad(lambda v: v**2)(ab.Param(3.0))[()]) == 6.0

    def test_no_finaliser_fires_for_a_twin(self):
        fired: list[int] = []

        class Loud(ab.Module):
            def __init__(self):
                self.v = ab.Param(1.0)

            def __del__(self):
                fired.append(1)

        loud = Loud()
        transforms.jit(lambda m: m.v * 2)(loud)
        with pytest.raises(ZeroDivisionError):
            transforms.jit(lambda m: 1 / 0)(loud)
        gc.collect()
        assert fired == []

    def test_a_write_through_plain_vmap_is_refused(self):
        class Model(ab.Module):
            def __init__(self):
                self.n = ab.Variable(1.0)

            @transforms.jit
            def read(self, x):
                return self.n * x

            @transforms.jit
            def write(self, x):
                self.n.value = self.n + x

        model = Model()
        assert jax.vmap(model.read)(jnp.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
        assert jax.jit(model.read)(2.0) == 2.0
        assert jax.grad(model.read)(2.0) == 1.0
        with pytest.raises(ab.errors.CapturedWriteError):
            jax.vmap(model.write)(jnp.arange(3.0))
        assert model.n.value == 1.0
        assert list(vars(model)) == ["n"]


class TestMethods:
    def test_are_decorated_in_the_class_body(self):
        class Model(Layer):
            @transforms.jit
            def __init__(self, scale):
                self.w = ab.Param(jnp.full(2, scale))
                self.name = "model"

            @transforms.jit
            def scale(self, by):
                self.w.value = self.w * by
                return self

            @transforms.jit
            def twice(self):
                return self.scale(2.0)

        class Sub(Model):
            @transforms.jit
            def scale(self, by):
                return super().scale(by + 1)

        model = Model(2.0)
        assert model.name == "model"
        assert model.scale(2.0) is model
        assert model.twice() is model
        assert model.w.value.tolist() == [8.0, 8.0]
        sub = Sub(1.0)
        assert sub.scale(1.0) is sub
        assert sub.w.value.tolist() == [2.0, 2.0]

    def test_bound_methods_modules_and_partials_can_be_compiled(self):
        class Model(Layer):
            def step(self, x):
                self.w.value = self.w + x

            def __call__(self, x):
                self.step(x)
                return self

        model = Model()
        transforms.jit(model.step)(1.0)
        assert transforms.jit(model)(1.0) is model
        transforms.jit(functools.partial(Model.step, model))(1.0)
        assert model.w.value.tolist() == [4.0, 4.0]

    def test_a_jitted_method_can_be_an_attribute(self):
        """C28."""
        layer = Layer()
        layer.f = transforms.jit(lambda m: m.w * 2)
        assert transforms.jit(lambda m: m.f(m))(layer).tolist() == [2.0, 2.0]


class TestOptions:
    def test_static_arguments_by_number_and_name(self):
        def f(m, n, *, flag=False):
            return m.w.value.sum() * n if flag else n

        jitted = transforms.jit(f, static_argnums=1, static_argnames="flag")
        layer = Layer()
        assert jitted(layer, 3) == 3
        assert float(jitted(layer, 3, flag=True)) == 6.0
        assert jitted(layer, n="text") == "text"
        with pytest.raises(ab.errors.StaticValueError, match=r"args\[1\]"):
            jitted(layer, [])

    def test_lower_compile_trace_and_eval_shape(self):
        def f(m, x):
            m.w.value = m.w + x
            return m, m.w * 2

        jitted = transforms.jit(f)
        layer, other = Layer(), Layer(5.0)
        compiled = jitted.lower(layer, 1.0).compile()
        assert layer.w.value.tolist() == [1.0, 1.0]
        assert compiled(other, 1.0)[0] is other
        assert other.w.value.tolist() == [6.0, 6.0]
        assert len(jitted.trace(layer, 1.0).jaxpr.eqns) >= 2
        shaped, array = jitted.eval_shape(layer, 1.0)
        assert shaped is not layer
        assert shaped.w.value.shape == array.shape == (2,)
        assert layer.w.value.tolist() == [1.0, 1.0]
        with pytest.raises(ab.errors.StructureError, match="structure"):
            compiled(layer.w, 1.0)

    def test_methods_have_stages_too(self):
        class Model(Layer):
            @transforms.jit
            def step(self, x):
                self.w.value = self.w + x

        model = Model()
        model.step.lower(1.0).compile()(model, 2.0)
        assert model.w.value.tolist() == [3.0, 3.0]

    def test_only_written_buffers_are_donated(self):
        def f(a, b):
            a.value = a + b

        jitted = transforms.jit(f, donate_argnums=(0, 1))
        a, b = ab.Param(jnp.ones(2)), ab.Param(jnp.ones(2))
        old = a.value
        for expected in (2.0, 3.0):
            jitted(a, b)
            assert a.value.tolist() == [expected, expected]
        assert old.is_deleted()
        assert not b.value.is_deleted()

    def test_one_buffer_in_two_variables_is_donated_once(self):
        array = jnp.ones(2)
        a, b = ab.Param(array), ab.Param(array)

        def f(a, b):
            a.value, b.value = a + 1, b + 2

        transforms.jit(f, donate_argnames=("a", "b"))(a, b)
        assert a.value.tolist() == [2.0, 2.0]
        assert b.value.tolist() == [3.0, 3.0]

    def test_plain_arrays_are_donated_as_asked(self):
        jitted = transforms.jit(lambda x, y: (x + 1, y), donate_argnums=(0, 1))
        x, y = jnp.ones(2), jnp.ones(2)
        _, same = jitted(x, y)
        assert x.is_deleted()
        assert same is y

    def test_shardings_are_chosen_by_filter(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        layer = Layer()
        layer.w.value = jnp.arange(8.0)
        layer.stat = ab.BatchStat(jnp.zeros(()))

        def f(m, n):
            m.w.value = m.w * n
            m.stat.value = m.w.value.sum()
            return m.w.value

        shardings = ab.StateSharding({ab.Param: split, ...: None})
        jitted = transforms.jit(f, in_shardings=(shardings,), out_shardings=split, static_argnums=1)
        out = jitted(layer, 2)
        assert out.sharding == split
        assert layer.w.value.sharding == split
        assert float(layer.stat.value) == 56.0

    def test_one_object_cannot_have_two_shardings(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        v = ab.Param(jnp.arange(8.0))
        with pytest.raises(ab.errors.AliasError, match=r"args\[0\].*args\[1\]\[0\]"):
            transforms.jit(lambda a, b: None, in_shardings=(split, [whole]))(v, [v])

    def test_arguments_that_are_not_there_are_refused(self):
        for options in (
            {"static_argnums": 4},
            {"static_argnames": "q"},
            {"donate_argnums": 5},
            {"donate_argnames": ("m", "q")},
        ):
            with pytest.raises(ab.errors.StructureError, match="has no argument"):
                transforms.jit(lambda m: m, **options)

    def test_a_donated_snapshot_is_told(self):
        """C23."""
        v = ab.Param(jnp.ones(2))
        snapshot = ab.state(v)
        transforms.jit(lambda v: setattr(v, "value", v + 1), donate_argnums=0)(v)
        with pytest.raises(ab.errors.UpdateError, match="donated"):
            ab.update(v, snapshot)
        assert v.value.tolist() == [2.0, 2.0]

    def test_messages_name_the_function_of_the_user(self):
        hidden = types.SimpleNamespace(layer=Layer())

        def capture_it(x):
            hidden.layer.new = x

        with pytest.raises(ab.errors.CapturedWriteError, match=r"jit of capture_it at .*test_jit"):
            transforms.jit(capture_it)(1.0)

    def test_the_same_name_everywhere(self):
        assert transforms.jit is ab.jit


class TestNesting:
    def test_of_jits_writes_once(self):
        @transforms.jit
        def inner(m):
            m.w.value = m.w + 1
            m.items.append(m.w)

        @transforms.jit
        def outer(m):
            inner(m)
            inner(m)
            return len(m.items)

        layer = Layer()
        layer.items = []
        assert outer(layer) == 2
        assert layer.w.value.tolist() == [3.0, 3.0]
        assert layer.items[0] is layer.items[1] is layer.w

    def test_a_jitted_function_may_call_itself(self):
        @functools.partial(transforms.jit, static_argnums=1)
        def count(m, n):
            if n:
                m.w.value = m.w + 1
                count(m, n - 1)

        layer = Layer()
        count(layer, 3)
        assert layer.w.value.tolist() == [4.0, 4.0]


class TestMemory:
    def test_models_are_collected_while_the_function_lives(self):
        jitted = transforms.jit(lambda m: setattr(m.w, "value", m.w * 2))
        layer = Layer()
        layer.me = layer
        ref = weakref.ref(layer)
        jitted(layer)
        del layer
        gc.collect()
        assert ref() is None

    def test_functions_are_collected_with_what_they_hold(self):
        layer = Layer()
        jitted = transforms.jit(functools.partial(lambda m, x: m.w * x, layer))
        jitted(2.0)
        refs = [weakref.ref(layer), weakref.ref(jitted)]
        del layer, jitted
        gc.collect()
        assert [ref() for ref in refs] == [None, None]

    def test_a_chain_of_100_000_nodes_is_compiled(self):
        """C24."""

        class Link(ab.Module):
            pass

        first = link = Link()
        for _ in range(100_000):
            link.next = Link()
            link = link.next
        link.v = ab.Param(jnp.ones(()))

        def f(first, last):
            last.v.value = last.v + 1
            first.last = last

        transforms.jit(f)(first, link)
        assert float(link.v.value) == 2.0
        assert first.last is link

    def test_a_cyclic_graph_is_no_array_for_plain_jax(self):
        """C24."""
        layer = Layer()
        layer.me = layer
        with pytest.raises(TypeError, match="Layer"):
            jax.jit(lambda m: m)(layer)
        assert jnp.ones(2).sum() == 2.0
