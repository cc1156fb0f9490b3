"""Calls that a follower makes equal the plain call, whatever has changed since it was made."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.graph._classify import rule_of
from anabranch.transforms._plans import Plans
from tests.transforms.plan_worlds import Point, Slotted, look, same
from tests.transforms.test_plans_of_trees import Scaled


class Linear(ab.Module):
    def __init__(self, value=1.0):
        self.w = ab.Param(jnp.full(2, value))
        self.b = ab.Param(jnp.zeros(2))
        self.rate = 0.5


class Net(ab.Module):
    def __init__(self):
        self.layers = [Linear(1.0), Linear(2.0)]
        self.n = ab.Variable(jnp.array(0))

    @transforms.jit
    def count(self, x):
        self.n.value += 1
        return x * self.n


def step(net, batch, scale, *, name="a"):
    net.n.value += 1
    total = batch["x"] * scale + batch["y"][0]
    for layer in net.layers:
        total = total * layer.w + layer.b + layer.rate
        layer.b.value = layer.b + 1
    return total.sum() * (2 if name == "a" else 3)


def batch(value=1.0):
    return {"x": jnp.full(2, value), "y": [jnp.ones(2)]}


def followed(jitted: Any) -> bool:
    return bool(jitted._followers)


def pair(function: Callable[..., Any]) -> tuple[Any, Net, Net]:
    """Return a compiled function that has a follower, and two equal worlds."""
    jitted = transforms.jit(function)
    ours, plain = Net(), Net()
    for _ in range(4):
        jitted(ours, batch(), 2.0)
        function(plain, batch(), 2.0)
    assert followed(jitted)
    return jitted, ours, plain


def check(jitted: Any, function: Any, ours: Any, plain: Any, *args: Any, **kwargs: Any) -> None:
    for _ in range(3):
        found, expected = jitted(ours, *args, **kwargs), function(plain, *args, **kwargs)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert ab.graph.diff(ours, plain) == [] or _close(ours, plain)


def _close(a: Any, b: Any) -> bool:
    one, other = ab.split(a), ab.split(b)
    assert one[0] == other[0]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
        list(one[1].leaves),
        list(other[1].leaves),
    )
    return True


WRITES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "a value": lambda net: setattr(net.layers[0].w, "value", jnp.full(2, 5.0)),
    "a value of another dtype": lambda net: setattr(net.n, "value", jnp.array(2.5)),
    "a value of another shape": lambda net: setattr(net.layers[0].b, "value", jnp.ones((3, 2))),
    "a number as a value": lambda net: setattr(net.layers[0].w, "value", 3.0),
    "a Variable is replaced": lambda net: setattr(net.layers[0], "w", ab.Param(jnp.ones(2) * 9)),
    "a static attribute": lambda net: setattr(net.layers[1], "rate", 0.25),
    "an attribute is added": lambda net: setattr(net, "extra", ab.Param(jnp.ones(1))),
    "an attribute is deleted and set": lambda net: (
        delattr(net.layers[0], "rate"),
        setattr(net.layers[0], "rate", 1.5),
    ),
    "a layer is appended": lambda net: net.layers.append(Linear(3.0)),
    "a layer is replaced": lambda net: net.layers.__setitem__(0, Linear(4.0)),
    "layers change places": lambda net: net.layers.reverse(),
    "a layer is there twice": lambda net: net.layers.append(net.layers[0]),
    "another list": lambda net: setattr(net, "layers", [*net.layers]),
    "metadata": lambda net: net.layers[0].w.set_metadata(tag="x"),
    "weights are shared": lambda net: setattr(net.layers[0], "w", net.layers[1].w),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_calls_is_seen(name):
    jitted, ours, plain = pair(step)
    for net in (ours, plain):
        WRITES[name](net)
    check(jitted, step, ours, plain, batch(), 2.0)


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another batch": ((batch(3.0), 2.0), {}),
    "another number": ((batch(), 7.0), {}),
    "an integer": ((batch(), 7), {}),
    "an array for a number": ((batch(), jnp.array(3.0)), {}),
    "a numpy array": ((batch(), np.float32(3.0)), {}),
    "another order of keys": (({"y": [jnp.ones(2)], "x": jnp.ones(2)}, 2.0), {}),
    "another key": (({**batch(), "z": jnp.ones(1)}, 2.0), {}),
    "a tuple for a list": (({"x": jnp.ones(2), "y": (jnp.ones(2),)}, 2.0), {}),
    "a longer list": (({"x": jnp.ones(2), "y": [jnp.ones(2), jnp.ones(2)]}, 2.0), {}),
    "a static keyword": ((batch(), 2.0), {"name": "b"}),
    "the same keyword": ((batch(), 2.0), {"name": "a"}),
    "by name": ((), {"batch": batch(), "scale": 2.0}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments(name):
    jitted, ours, plain = pair(step)
    args, kwargs = ARGUMENTS[name]
    check(jitted, step, ours, plain, *args, **kwargs)
    check(jitted, step, ours, plain, batch(), 2.0)


@dataclasses.dataclass
class Part:
    w: Any
    rate: float = 0.5
    on: Any = True


@dataclasses.dataclass
class Other(Part):
    """The same fields."""


@dataclasses.dataclass
class Whole:
    parts: list[Part]
    n: Any
    v: Any


def whole():
    return Whole(
        [Part(jnp.ones(2)), Part(jnp.full(2, 2.0))], jnp.array(0), ab.Variable(jnp.ones(2))
    )


def use(whole, x):
    total = x
    for part in whole.parts:
        total = total * part.w + part.rate + (1 if part.on is True else 2)
    whole.n = whole.n + 1
    return total.sum() + whole.v[0]


def write_variable(whole, x):
    whole.v.value = whole.v + x
    return whole.v.sum() + whole.parts[0].w[0]


PARTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda w: None,
    "an array": lambda w: setattr(w.parts[0], "w", jnp.full(2, 7.0)),
    "a number becomes an array": lambda w: setattr(w.parts[0], "rate", jnp.ones(2)),
    "a float": lambda w: setattr(w.parts[0], "rate", 0.25),
    "a bool becomes a number": lambda w: setattr(w.parts[1], "on", 1),
    "an attribute is added": lambda w: setattr(w.parts[1], "extra", 1),
    "a part is replaced": lambda w: w.parts.__setitem__(0, Part(jnp.full(2, 3.0))),
    "a part is there twice": lambda w: w.parts.__setitem__(0, w.parts[1]),
    "parts change places": lambda w: w.parts.reverse(),
    "a part more": lambda w: w.parts.append(Part(jnp.ones(2))),
    "another class": lambda w: setattr(w.parts[1], "__class__", Other),
    "the value of a Variable": lambda w: setattr(w.v, "value", jnp.full(2, 4.0)),
    "metadata": lambda w: w.v.set_metadata(tag="x"),
    "another Variable": lambda w: setattr(w, "v", ab.Cache(jnp.full(2, 9.0))),
}


@pytest.mark.parametrize("function", [use, write_variable])
@pytest.mark.parametrize("name", PARTS)
def test_a_write_to_dataclasses_between_calls_is_seen(name, function):
    jitted = transforms.jit(function)
    ours, plain = whole(), whole()
    for _ in range(4):
        jitted(ours, 2.0)
        function(plain, 2.0)
    assert followed(jitted)
    for world in (ours, plain):
        PARTS[name](world)
    for _ in range(3):
        np.testing.assert_allclose(jitted(ours, 2.0), function(plain, 2.0), rtol=1e-5)
        assert _close(ours, plain)


def test_two_threads_lose_no_update_of_a_dataclass():
    world, jitted, errors = whole(), transforms.jit(use), []

    def run():
        for _ in range(200):
            try:
                jitted(world, 1.0)
            except ab.errors.ConcurrentWriteError:
                errors.append(1)

    jitted(world, 1.0)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(world.n) == 801 - len(errors)


def test_a_list_that_is_passed_twice_or_hangs_on_the_module():
    def put(net, first, second):
        net.n.value += 1
        first.append(jnp.ones(1))
        return len(second) + net.n

    def read(net, first, second):
        net.n.value += 1
        return jnp.asarray(1.0 if first is second else 2.0) * net.n

    for function in (read, put):
        jitted, net = transforms.jit(function), Net()
        for _ in range(4):
            jitted(net, [jnp.ones(2)], [jnp.ones(2)])
        one = [jnp.ones(2)]
        n = int(net.n) + 1
        expected = n if function is read else len(one) + 1 + n
        assert int(jitted(net, one, one)) == expected
    jitted, net = transforms.jit(read), Net()
    net.items = [jnp.ones(2)]
    for _ in range(4):
        jitted(net, [jnp.ones(2)], [jnp.ones(2)])

    @transforms.jit
    def same(net, items):
        return jnp.asarray(net.items is items)

    for _ in range(4):
        assert not same(net, [jnp.ones(2)])
    assert same(net, net.items)


def test_what_is_returned_is_the_callers_own_or_new(monkeypatch):
    def call(net, x):
        net.n.value += 1
        first = net.layers[0]
        return {"layer": first, "list": [net, first.w, x * net.n], "rate": first.rate, "new": Net()}

    net, jitted = Net(), transforms.jit(call)
    for _ in range(3):
        jitted(net, 1.0)
    monkeypatch.setattr(Plans, "call", None)  # from here on, calls are followed
    results = [jitted(net, 2.0) for _ in range(2)]
    for i, found in enumerate(results):
        assert found["layer"] is net.layers[0]
        assert found["list"][0] is net
        assert found["list"][1] is net.layers[0].w
        assert float(found["list"][2]) == 2.0 * (4 + i)
        assert found["rate"] == 0.5
    assert results[0]["new"] is not results[1]["new"]
    assert results[0]["new"].layers[1].w.value.tolist() == [2.0, 2.0]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    n: int = 1


def made(kind: str, x: Any) -> Any:
    """Return something new."""
    if kind == "module":
        net = Net()
        net.layers[0].w.value = x
        net.extra = ("text", 0.5, {"a": net.n})
        return net
    if kind == "variable":
        return ab.BatchStat(x, momentum=0.9)
    if kind == "dataclass":
        return Point(x, Frozen(x + 1))
    if kind == "pytree":
        return Scaled(x, 2), Frozen(x)
    if kind == "shared":
        point = Point(x, [x])
        return {"b": point, "a": [point, point.y]}
    cycle = Net()
    cycle.layers = [cycle]
    return cycle


@pytest.mark.parametrize("kind", ["module", "variable", "dataclass", "pytree", "shared", "cycle"])
def test_new_objects_that_are_returned(kind):
    jitted = transforms.jit(lambda net, x: made(kind, x + net.n))
    net, found = Net(), []
    for i in range(7):
        x = jnp.full(2, float(i))
        result = jitted(net, x)
        if kind != "pytree":
            assert same(look(result), look(made(kind, x)))
        found.append(result)
    assert followed(jitted)
    if not isinstance(result, tuple):  # a value
        assert len({*map(id, found)}) == len(found)
    if kind == "variable":
        result.value += 1  # it belongs to the caller, not to a trace
        assert result.momentum == 0.9
    if kind == "module":
        result.training = False
        assert result.extra[2]["a"] is result.n
        assert result.layers[0] is not found[-2].layers[0]
    if kind == "pytree":
        assert (result[0].by, result[0].x.tolist()) == (2, [6.0, 6.0])


def test_models_that_are_called_in_turn_do_not_mix():
    nets, jitted = [Net(), Net(), Net()], transforms.jit(step)
    for i in range(12):
        net = nets[i % 3]
        jitted(net, batch(), 2.0)
    assert [int(net.n) for net in nets] == [4, 4, 4]
    assert len(jitted._followers) == 3


def test_calls_in_several_forms_have_a_follower_each(monkeypatch):
    def call(net, x, mode):
        net.n.value += 1
        return x.sum() * {"train": 1, "eval": 2, "test": net.layers[0].rate}[mode]

    net, jitted = Net(), transforms.jit(call, static_argnames="mode")
    expected = {"train": 2.0, "eval": 4.0, "test": 1.0}
    for _ in range(3):
        for mode in expected:
            jitted(net, jnp.ones(2), mode)
    general, count = Plans.call, []
    monkeypatch.setattr(Plans, "call", lambda *a: (count.append(1), general(*a))[1])
    for _ in range(2):
        assert {mode: jitted(net, jnp.ones(2), mode) for mode in expected} == expected
    assert int(net.n) == 15
    assert not count
    net.layers[0].rate = 1.0
    for _ in range(3):
        assert float(jitted(net, jnp.ones(2), "test")) == 2.0
        assert float(jitted(net, jnp.ones(2), "eval")) == 4.0
    count.clear()
    for _ in range(3):
        assert float(jitted(net, jnp.ones(2), "test")) == 2.0
        assert float(jitted(net, jnp.ones(2), "eval")) == 4.0
    assert not count
    for i in range(30):  # more forms than are kept
        assert float(jitted(net, jnp.full(2, float(i)), mode=["train", "eval"][i % 2])) == 2 * i * (
            1 + i % 2
        )
        jitted._plans.drop_followers(next(iter(jitted._plans)))


def test_methods_and_static_arguments():
    net = Net()
    assert [float(net.count(2.0)) for _ in range(5)] == [2.0, 4.0, 6.0, 8.0, 10.0]

    @transforms.jit(static_argnums=1, static_argnames="k")
    def power(net, n, *, k):
        net.n.value += 1
        return net.layers[0].w[0] * n + k

    for n, k in ((1, 2), (1, 2), (1, 2), (True, 2), (1.0, 2), (1, 2), (3, 2), (3, 5), (1, True)):
        assert float(power(net, n, k=k)) == float(n + k)
    assert int(net.n) == 14


def test_globals_that_are_bound_anew(monkeypatch):
    def scaled(net):
        net.n.value += 1
        return net.n * SCALE

    net, jitted = Net(), transforms.jit(scaled)
    assert [int(jitted(net)) for _ in range(4)] == [2, 4, 6, 8]
    assert followed(jitted)
    held = Linear(3.0)
    monkeypatch.setitem(globals(), "SCALE", held.w)
    assert jitted(net).tolist() == [15.0, 15.0]
    held.w.value = jnp.ones(2)
    assert jitted(net).tolist() == [6.0, 6.0]


SCALE = 2


def test_an_exception_changes_nothing_and_the_next_call_is_right():
    def fail(x):
        if int(x) == 3:
            raise ValueError("three")
        return np.zeros((), np.float32)

    @transforms.jit
    def f(net, x):
        net.n.value += 1
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)

    net = Net()
    for _ in range(4):
        jax.block_until_ready(f(net, 1))
    with pytest.raises(TypeError):
        f(net, object.__new__(threading.Thread).__class__)
    assert int(net.n) == 4
    f(net, 1)
    assert int(net.n) == 5


def test_other_shapes_are_traced_once():
    traces = []

    @transforms.jit
    def f(net, x):
        traces.append(x.shape)
        net.n.value += 1
        return x + net.n

    net = Net()
    for shape in ((1,), (2,), (3,)):
        for _ in range(4):
            f(net, jnp.ones(shape))
    assert traces == [(1,), (2,), (3,)]
    assert int(net.n) == 12


def test_shardings_have_groups_of_their_own():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    whole, halves = [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names)) for names in ((), "i")
    ]

    def f(net, x):
        net.n.value = net.n + 1
        net.layers[0].b.value = net.layers[0].b + x
        return x * 2, x + 1

    jitted = transforms.jit(f, in_shardings=(whole, halves), out_shardings=(halves, whole))
    net = Net()
    for i in range(1, 6):
        first, second = jitted(net, jnp.ones(2))
        assert first.sharding.is_equivalent_to(halves, 1)
        assert second.sharding.is_equivalent_to(whole, 1)
        assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [2.0, 2.0])
        assert int(net.n) == i
        assert net.layers[0].b.value.tolist() == [i, i]
    assert followed(jitted)


def test_inside_other_traces():
    net = Net()
    for _ in range(4):
        net.count(1.0)
    assert transforms.vmap(net.count)(jnp.ones(2)).tolist() == [5.0, 5.0]
    assert float(transforms.grad(net.count)(1.0)) == 6.0
    assert float(transforms.jit(lambda x: net.count(x) * 1)(1.0)) == 7.0
    with pytest.raises(ab.errors.CapturedWriteError):
        jax.jit(net.count)(1.0)
    assert int(net.n) == 7


def test_two_threads_lose_no_update():
    net, errors = Net(), []

    def run():
        for _ in range(200):
            try:
                net.count(1.0)
            except ab.errors.ConcurrentWriteError:
                errors.append(1)

    net.count(1.0)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(net.n) == 801 - len(errors)


def test_nothing_is_kept_alive():
    jitted = transforms.jit(step)
    refs = []
    for _ in range(20):
        net = Net()
        for _ in range(4):
            jitted(net, batch(), 2.0)
        refs.append(weakref.ref(net))
    del net
    gc.collect()
    assert [ref() for ref in refs] == [None] * 20
    assert len(jitted._followers) == 0
    ref = weakref.ref(jitted)
    net = Net()
    for _ in range(4):
        jitted(net, batch(), 2.0)
    del jitted
    gc.collect()
    assert ref() is None


def test_many_static_variants_have_followers_each_and_remember_together(monkeypatch):
    def step(model: Any, k: Any, *, mode: Any) -> Any:
        model.n.value += 1
        return model.n.value * 10 + len(f"{k!r}{mode!r}")

    model = ab.Module()
    model.n = ab.Variable(jnp.zeros((), int))
    variants = [(k, mode) for k in (*range(40), True, False, "1", None, 1.0) for mode in ("a", "b")]
    step_of = ab.jit(step, static_argnums=1, static_argnames="mode")
    for _ in range(3):
        for k, mode in variants:
            step_of(model, k, mode=mode)
    monkeypatch.setattr(Plans, "call", None)  # nothing is left to the general way
    count = int(model.n.value)
    for k, mode in variants:
        count += 1
        assert int(step_of(model, k, mode=mode)) == count * 10 + len(f"{k!r}{mode!r}")
    segments = [*rule_of(model).kept_plans(model).values()]
    assert len(segments) == len(variants)
    assert len({id(segment.memory) for segment in segments}) == 1


def a_mesh(size: int = 1) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:size]), ("x",))


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], None]]] = {
    "deque": (lambda: deque([1, jnp.ones(2)]), lambda w: w["other"].append(2)),
    "deque, maxlen": (lambda: deque([1], maxlen=3), lambda w: w.update(other=deque([1], maxlen=4))),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda w: w["other"].move_to_end("a")),
    "defaultdict": (
        lambda: defaultdict(int, a=1),
        lambda w: w.update(other=defaultdict(list, a=1)),
    ),
    "Counter": (lambda: Counter(a=2), lambda w: w["other"].update(a=1)),
    "set": (lambda: {1, 2}, lambda w: w["other"].add(3)),
    "a set of another type": (lambda: {1}, lambda w: w.update(other={True})),
    "frozenset": (lambda: frozenset({1}), lambda w: w.update(other=frozenset({1.0}))),
    "range": (lambda: range(3), lambda w: w.update(other=range(4))),
    "a mesh": (a_mesh, lambda w: w.update(other=a_mesh(2))),
    "slots": (Slotted, lambda w: setattr(w["other"], "b", True)),
    "an array in a slot": (Slotted, lambda w: setattr(w["other"], "a", jnp.zeros(3))),
    "odd keys": (lambda: {(1, 2): 3, None: jnp.ones(1)}, lambda w: w["other"].update({(1, 2): 4})),
    "an odd key": (lambda: {(1,): 3}, lambda w: w.update(other={(True,): 3})),
    "a dtype": (lambda: jnp.dtype("float32"), lambda w: w.update(other=jnp.dtype("int32"))),
    "a compiled function": (lambda: jax.jit(abs), lambda w: w.update(other=jax.jit(len))),
    "a numpy scalar": (lambda: (np.float32(1),), lambda w: w.update(other=(np.float64(1),))),
}


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_what_stands_beside_is_compared_whatever_it_is(name):
    make, change = OTHERS[name]
    jitted = transforms.jit(look)
    world = {"point": Point(jnp.ones(2), [jnp.ones(2)]), "other": make()}

    def check() -> None:
        expected = transforms.jit(look)(world)  # numbers are leaves, so that a plain call differs
        for _ in range(5):
            assert same(jitted(world), expected)

    check()
    assert followed(jitted)
    change(world)
    check()
    world["other"] = make()
    check()
    world["point"].x = world["point"].x + 1
    check()
