"""Plans on objects of flax: no walk where nothing has changed, and any change is seen."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from tests.transforms.plan_worlds import Walks


def double(x: Any) -> Any:
    return 2 * x


class Layer(nnx.Module):
    def __init__(self, n: float) -> None:
        self.w = nnx.Param(jnp.full(2, n), unit="m")
        self.w.set_metadata("last", "m")
        self.mean = nnx.BatchStat(jnp.zeros(2))
        self.mean.set_metadata("one", 1)  # `==` does not tell it from True
        self.n = 1


class Loose(nnx.Module, pytree=False):  # flax keeps no record of its attributes
    def __init__(self) -> None:
        self.n = 1


class Special(Layer):
    pass


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([Layer(1.0), Layer(2.0)])
        self.count = nnx.Variable(jnp.zeros((), int))  # weak types do not survive pickling
        self.n, self.training = 0, True
        self.optional = nnx.data(None)
        self.act = double
        self.pair = nnx.data((Layer(3.0), 1))


class Whole(Model):
    def __init__(self) -> None:
        super().__init__()
        self.loose = nnx.data(Loose())


def look(m: Any) -> Any:
    """Return what depends on everything, and write a little."""
    m.count[...] += 1
    found = [
        (type(x).__name__, sorted(k for k in vars(x) if k[0] != "_"))
        if isinstance(x, nnx.Module)
        else (type(x).__name__, sorted(x.get_metadata().items(), key=str))
        for _, x in ab.iter_nodes(m)
    ]
    statics = [
        (k, type(v).__name__, v)
        for _, x in ab.iter_nodes(m)
        if isinstance(x, nnx.Module)
        for k, v in vars(x).items()
        if isinstance(v, (int, float, str))
    ]
    total = sum(x[...].sum() for _, x in ab.iter_nodes(m) if isinstance(x, nnx.Variable))
    return total, repr((found, statics, m.layers[0].w is m.layers[-1].w))


DOORS: dict[str, Callable[[Any], Any]] = {
    "a value": lambda m: m.layers[0].w.__setitem__(..., jnp.full(2, 8.0)),
    "a raw value": lambda m: m.layers[0].w.set_raw_value(jnp.ones(5)),
    "an attribute": lambda m: setattr(m, "new", 1),
    "an attribute of a layer": lambda m: setattr(m.layers[1], "new", nnx.Param(jnp.array(1.0))),
    "a static attribute": lambda m: setattr(m, "training", False),
    "True becomes 1": lambda m: setattr(m, "training", 1),
    "1 becomes 1.0 in a layer": lambda m: setattr(m.layers[0], "n", 1.0),
    "an attribute is deleted": lambda m: delattr(m.layers[0], "n"),
    "an attribute moves to the end": lambda m: (
        delattr(m, "training"),
        setattr(m, "training", True),
    ),
    "a Variable is replaced": lambda m: setattr(m.layers[0], "w", nnx.Param(jnp.full(2, 9.0))),
    "a Variable of another kind": lambda m: setattr(m.layers[0], "w", nnx.Cache(jnp.ones(2))),
    "a Variable that is equal": lambda m: setattr(m.layers[0], "w", nnx.Param(jnp.full(2, 1.0))),
    "the last attribute has another name": lambda m: (
        delattr(m.layers[0], "n"),
        setattr(m.layers[0], "renamed", 1),
    ),
    "the only attribute has another name": lambda m: (
        delattr(m.loose, "n"),
        setattr(m.loose, "renamed", 1),
    ),
    "an alias": lambda m: setattr(m.layers[1], "w", m.layers[0].w),
    "a cycle": lambda m: setattr(m.layers[1], "up", m),
    "metadata are added": lambda m: m.count.set_metadata(unit="s"),
    "metadata are changed": lambda m: m.layers[0].w.set_metadata("unit", "km"),
    "metadata are replaced": lambda m: m.layers[0].w.set_metadata({"unit": "m", "other": 1}),
    "metadata True becomes 1": lambda m: m.layers[0].w.set_metadata(eager_sharding=1),
    "metadata are deleted": lambda m: m.layers[0].w.del_metadata("unit"),
    "the last metadata have another name": lambda m: (
        m.layers[0].w.del_metadata("last"),
        m.layers[0].w.set_metadata("renamed", "m"),
    ),
    "metadata that are equal have another name": lambda m: (
        m.layers[0].mean.del_metadata("one"),
        m.layers[0].mean.set_metadata("renamed", 1),
    ),
    "metadata are copied": lambda m: vars(nnx.Variable)["_var_metadata"].__set__(
        m.count, dict(m.count.get_metadata())
    ),
    "the list grows": lambda m: m.layers.append(Layer(4.0)),
    "the list shrinks": lambda m: m.layers.pop(),
    "layers are swapped": lambda m: m.layers.__setitem__(slice(0, 2), [m.layers[1], m.layers[0]]),
    "None becomes a module": lambda m: setattr(m, "optional", Layer(5.0)),
    "a function": lambda m: setattr(m, "act", nnx.relu),
    "inside a tuple": lambda m: setattr(m.pair[0], "n", 7),
    "the class": lambda m: object.__setattr__(m.layers[0], "__class__", Special),
    "update of flax": lambda m: nnx.update(
        m, jax.tree.map(lambda x: x + 1, nnx.state(m, nnx.Param))
    ),
    "jit of flax": nnx.jit(lambda m: setattr(m, "training", False)),
    "our jit": ab.jit(lambda m: setattr(m, "late", nnx.Param(jnp.array(1.0)))),
}


@pytest.fixture
def walks(monkeypatch):
    return Walks(monkeypatch)


@pytest.mark.parametrize("door", DOORS)
def test_a_change_through_any_door_is_seen_at_the_next_call(door, walks):
    compiled = ab.jit(look)
    ours, plain = Whole(), Whole()
    for _ in range(3):
        assert str(compiled(ours)) == str(look(plain))
    before = walks.count
    compiled(ours), look(plain)
    assert walks.count == before, "the call is not planned"
    DOORS[door](ours)
    DOORS[door](plain)
    for _ in range(3):
        assert str(compiled(ours)) == str(look(plain))


def test_a_model_with_a_plan_is_collected():
    model = Model()
    model.layers[0].up = model
    f = ab.jit(look)
    f(model), f(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_model_without_cycles_is_freed_at_once():
    model = Model()
    f = ab.jit(look)
    f(model), f(model)
    values = weakref.ref(model), weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert [ref() for ref in values] == [None, None]
    finally:
        gc.enable()


def test_what_flax_and_jax_see_of_a_model_with_a_plan_is_what_it_was():
    model, other = Model(), Model()
    structure, graphdef = jax.tree.structure(model), nnx.graphdef(model)
    f = ab.jit(look)
    f(model), f(model)
    f(other)
    assert jax.tree.structure(model) == structure
    assert nnx.graphdef(model) == graphdef
    summed = jax.tree.map(lambda x, y: x + y, model, other)
    assert summed.count[...] == 3
    for twin in (nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.count[...] += 1
        assert twin.count[...] == 3
        assert model.count[...] == 2


def test_two_models_and_an_optimizer_have_plans_of_their_own(walks):
    import optax

    a, b = Model(), Model()
    optimizer = nnx.Optimizer(a, optax.adam(1e-2), wrt=nnx.Param)

    @ab.jit
    def step(first, second, optimizer):
        grads = ab.grad(lambda m: (m.layers[0].w[...] ** 2).sum())(first)
        optimizer.update(first, grads)
        second.count[...] += 1
        return first.layers[0].w[...].sum()

    values = [float(step(x, y, optimizer)) for x, y in [(a, b), (b, a)] * 3]
    assert values[4] < values[2] < values[0]
    before = walks.count
    step(a, b, optimizer)
    step(b, a, optimizer)
    assert walks.count == before


def test_states_of_flax_are_compared_whatever_is_in_them(walks):
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.state = nnx.data(
                nnx.State({"a": {"w": nnx.Param(jnp.ones(2))}, "c": jnp.zeros(2)})
            )

    holder, jitted = Holder(), ab.jit(lambda h: (len(h.state), *jax.tree.leaves(h.state)))

    def both() -> None:
        found, expected = jitted(holder), (len(holder.state), *jax.tree.leaves(holder.state))
        assert [jnp.asarray(x).tolist() for x in found] == [
            jnp.asarray(x).tolist() for x in expected
        ]

    both()
    before = walks.count
    both()
    holder.state.raw_mapping["c"] = jnp.full(2, 5.0)
    both()
    assert walks.count == before
    holder.state.raw_mapping["a"]["w"] = nnx.Param(jnp.full(3, 7.0))
    both()
    holder.state.raw_mapping["b"] = nnx.Param(jnp.ones(1))
    both()
    del holder.state.raw_mapping["a"]
    both()


def test_a_call_may_write_attributes_beside_variables(walks):
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.n, self.total = nnx.Variable(jnp.array(0)), nnx.data(jnp.zeros(2))

        def count(self, x: Any) -> None:
            self.n[...] += 1
            self.total = self.total + x

    counter, jitted = Counter(), ab.jit(Counter.count)
    jitted(counter, 1.0)
    before = walks.count
    for i in range(2, 5):
        jitted(counter, 1.0)
        assert (int(counter.n[...]), counter.total.tolist()) == (i, [i, i])
    assert walks.count == before


class Meter(ab.Module):
    def __init__(self, count: int) -> None:
        self.sums = [ab.Variable(jnp.zeros(2)) for _ in range(count)]
        self.calls = ab.Variable(jnp.zeros((), int))


def measure(model: Model, meter: Meter) -> Any:
    model.count[...] += 1
    meter.calls.value += 1
    for v in meter.sums:
        v.value = v.value + model.layers[0].w[...]
    model.layers[0].mean[...] += 1
    return sum(v.value for v in meter.sums) + model.layers[0].mean[...]


BOTH_DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "ours": lambda model, meter: setattr(meter.sums[0], "value", jnp.full(2, 7.0)),
    "theirs": lambda model, meter: model.layers[0].mean.set_value(jnp.full(2, 7.0)),
    "ours, compiled": lambda model, meter: ab.jit(lambda m: setattr(m.calls, "value", 0))(meter),
    "theirs, compiled": lambda model, meter: ab.jit(lambda m: m.count.__setitem__(..., 0))(model),
}


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("door", BOTH_DOORS)
def test_calls_that_write_variables_of_both_libraries_are_planned(walks, count, door):
    f = ab.jit(measure)
    ours, plain = (Model(), Meter(count)), (Model(), Meter(count))
    for _ in range(4):
        assert f(*ours).tolist() == measure(*plain).tolist()
    assert walks.of(f, *ours) == 0
    measure(*plain)
    for _ in range(3):
        BOTH_DOORS[door](*ours)
        BOTH_DOORS[door](*plain)
        for _ in range(2):
            assert f(*ours).tolist() == measure(*plain).tolist()
    assert int(ours[1].calls.value) == int(plain[1].calls.value)
    assert int(ours[0].count[...]) == int(plain[0].count[...])


def test_an_attribute_before_an_array_of_the_root_is_deleted():
    class Holder(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))
            self.x = nnx.data(jnp.ones(1))

    for calls in range(6):
        double = ab.jit(lambda m: m.x * 2)
        holder = Holder()
        for _ in range(calls):
            double(holder)
        del holder.a
        assert float(double(holder)[0]) == 2.0
