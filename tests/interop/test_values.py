"""Values of other libraries: equinox, optax, `flax.struct`, chex, and classes known to JAX."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import ValueWriteError
from tests.transforms.plan_worlds import Walks


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


@pytest.fixture
def struct():
    return pytest.importorskip("flax.struct")


@pytest.fixture
def chex():
    return pytest.importorskip("chex")


class TestEquinox:
    def test_a_module_is_compiled_whatever_it_holds_besides_arrays(self, eqx):
        mlp = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
        x = jnp.ones(2)
        traces = []

        @ab.jit
        def f(mlp, x):
            traces.append(1)
            return mlp(x)

        np.testing.assert_allclose(f(mlp, x), mlp(x), rtol=1e-6)
        np.testing.assert_allclose(f(mlp, x), mlp(x), rtol=1e-6)
        assert len(traces) == 1
        np.testing.assert_allclose(ab.jit(mlp)(x), mlp(x), rtol=1e-6)

    def test_it_is_called_when_something_was_found_in_another_function(self, eqx):
        hidden = types.SimpleNamespace(v=ab.Variable(1.0))
        found = ab.jit(lambda: hidden.v + 1)
        assert float(found()) == 2
        mlp = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
        x = jnp.ones(2)
        np.testing.assert_allclose(ab.jit(mlp)(x), mlp(x), rtol=1e-6)

    def test_numbers_and_flags_in_it_are_static(self, eqx):

        class Layer(eqx.Module):
            w: Any
            n: int
            flag: bool

            def __call__(self, x):
                return x * self.w if self.flag and self.n > 2 else x

        f = ab.jit(lambda layer, x: layer(x))
        assert f(Layer(jnp.array(2.0), 3, True), 1.0) == 2
        assert f(Layer(jnp.array(2.0), 3, False), 1.0) == 1
        assert f(Layer(jnp.array(2.0), 1, True), 1.0) == 1

    def test_gradients_keep_its_form(self, eqx):
        linear = eqx.nn.Linear(2, 1, key=jax.random.key(0))
        grads = ab.grad(lambda linear, x: linear(x).sum())(linear, jnp.array([1.0, 2.0]))
        assert isinstance(grads, eqx.nn.Linear)
        assert grads.weight.tolist() == [[1.0, 2.0]]

    def test_it_goes_through_lanes_and_loops(self, eqx):
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 2, key=key))
        layers = make(jax.random.split(jax.random.key(0), 3))
        x = jnp.ones(2)
        expected = x
        for i in range(3):
            expected = layers.weight[i] @ expected + layers.bias[i]

        def f(x, layer):
            return layer(x), None

        axes = (ab.Carry, 0)
        found, _ = ab.scan(f, in_axes=axes, out_axes=axes)(x, layers)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        out = ab.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x)
        np.testing.assert_allclose(out[1], layers.weight[1] @ x + layers.bias[1], rtol=1e-6)

    def test_it_holds_objects_that_are_written(self, eqx):

        class Layer(eqx.Module):
            count: ab.Variable

        layer = Layer(ab.Variable(jnp.array(0)))

        @ab.jit
        def step(layer):
            layer.count.value += 1
            return layer

        assert step(layer).count is layer.count
        assert layer.count.value == 1

    def test_a_shared_array_is_named(self, eqx):

        class Tied(eqx.Module):
            embed: Any
            head: Any

        w = jnp.ones((2, 2))
        assert ab.find_aliases(Tied(w, [w])) == [[("embed",), ("head", 0)]]


class TestFlaxStruct:
    def test_a_dataclass_is_a_value_and_its_numbers_are_traced(self, struct):

        @struct.dataclass
        class TrainState:
            step: int
            w: Any
            name: str = struct.field(pytree_node=False)

        traces = []

        @ab.jit
        def f(state):
            traces.append(state.name)
            return state.replace(step=state.step + 1, w=state.w * 2)

        state = TrainState(0, jnp.array(1.0), "a")
        for _ in range(3):
            state = f(state)
        assert (int(state.step), float(state.w), state.name) == (3, 8.0, "a")
        assert len(traces) <= 2  # of a Python number, then of an array
        assert isinstance(ab.grad(lambda s: s.w**2)(TrainState(0, jnp.array(3.0), "a")), TrainState)

    def test_a_variable_in_it_keeps_its_identity(self, struct):

        @struct.dataclass
        class Holder:
            v: Any

        v = ab.Param(jnp.array(1.0))

        @ab.jit
        def f(holder, v):
            holder.v.value += 1
            return holder, holder.v is v

        out, same = f(Holder(v), v)
        assert out.v is v
        assert same
        assert v.value == 2


class TestChex:
    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_dataclass_works_in_every_way(self, chex, frozen):
        @chex.dataclass(frozen=frozen)
        class Data:
            x: Any
            y: Any

        data = Data(x=jnp.array(1.0), y=ab.Param(jnp.array(2.0)))

        @ab.jit
        def f(data):
            data.y.value += data.x
            return data.replace(x=data.x * 5)

        out = f(data)
        assert out.x == 5
        assert out.y is data.y
        assert data.y.value == 3

    def test_one_that_is_not_frozen_is_written_in_place(self, chex):
        @chex.dataclass
        class Data:
            x: Any

        data = Data(x=jnp.array(1.0))

        @ab.jit
        def f(data):
            data.x = data.x + 1
            return data

        assert f(data) is data
        assert data.x == 2


def test_optax_states_are_values_in_any_transform():
    optax = pytest.importorskip("optax")
    model = ab.Param(jnp.array([1.0, 2.0]))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    opt_state = tx.init(ab.state(model, ab.Param))

    @ab.jit
    def step(model, opt_state, tx):
        grads = ab.grad(lambda model: (model.value**2).sum())(model)
        updates, opt_state = tx.update(grads, opt_state, ab.state(model, ab.Param))
        ab.update(model, optax.apply_updates(ab.state(model, ab.Param), updates))
        return opt_state

    for _ in range(3):
        opt_state = step(model, opt_state, tx)
    assert type(opt_state[1][0]).__name__ == "ScaleByAdamState"
    assert int(opt_state[1][0].count) == 3
    assert np.all(np.asarray(model.value) < [1.0, 2.0])


def test_partials_of_jax_and_registered_classes_are_values():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Pair:
        a: Any
        b: Any

    v = ab.Param(jnp.array(1.0))
    pair = Pair(v, jnp.array(2.0))
    scale = jax.tree_util.Partial(lambda k, x: k * x, jnp.array(3.0))

    @ab.jit
    def f(pair, scale):
        pair.a.value += scale(pair.b)
        return pair

    assert f(pair, scale).a is v
    assert v.value == 7


def test_a_value_that_is_changed_in_place_is_refused():
    class Cell:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Cell, lambda c: ((c.x,), None), lambda _, xs: Cell(*xs))

    @ab.jit
    def f(cell):
        cell.x = cell.x + 1

    with pytest.raises(ValueWriteError, match="Cell"):
        f(Cell(jnp.array(1.0)))


def test_arrays_at_several_places_are_named_but_not_those_of_variables():
    w = jnp.ones(2)
    v = ab.Param(w)
    assert ab.find_aliases({"a": w, "b": (w, 1), "v": [v, ab.Param(w)]}) == [[("a",), ("b", 0)]]


@pytest.mark.parametrize("library", ["equinox", "struct"])
def test_a_value_that_is_put_anew_in_every_call_is_planned(library, request, monkeypatch):
    walks = Walks(monkeypatch)
    if library == "equinox":
        linear = request.getfixturevalue("eqx").nn.Linear(2, 2, key=jax.random.key(0))
    else:
        struct = request.getfixturevalue("struct")

        @struct.dataclass
        class Linear:
            weight: Any
            bias: Any
            name: str = struct.field(pytree_node=False, default="a")

        linear = Linear(jnp.ones((2, 2)), jnp.ones(2))

    class Holder(ab.Module):
        def __init__(self) -> None:
            self.value = ab.Variable(linear)
            self.other = linear

    def double(m: Any) -> None:
        m.value.value = jax.tree.map(lambda x: x * 2, m.value.value)
        m.other = jax.tree.map(lambda x: x * 2, m.other)

    holder, jitted = Holder(), ab.jit(double)
    for i in range(8):
        walked = walks.of(jitted, holder)
        for found in (holder.value.value, holder.other):
            assert type(found) is type(linear)
            np.testing.assert_allclose(found.bias, linear.bias * 2 ** (i + 1), rtol=1e-6)
    assert walked == 0


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
def test_a_number_in_a_module_of_equinox_stays_static(eqx):
    class Scale(eqx.Module):
        by: Any
        w: Any

    class Holder(ab.Module):
        def __init__(self) -> None:
            self.value = Scale(jnp.array(1), jnp.ones(2))

    holder = Holder()
    jitted = ab.jit(lambda m, s: (type(m.value.by).__name__ == "int", type(s.by).__name__ == "int"))
    for by in (jnp.array(1), 1, True, jnp.array(2), 2):
        holder.value = Scale(by, jnp.ones(2))
        for _ in range(5):
            assert jitted(holder, holder.value) == (type(by) is int, type(by) is int)
