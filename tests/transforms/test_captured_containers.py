"""Functions that capture lists, dictionaries and tuples which lead to objects and functions."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from tests.transforms.plan_worlds import Walks, look, same


def double(x: Any) -> Any:
    return 2 * x


def shifted(by: int) -> Callable[[Any], Any]:
    return lambda x: x + by


@dataclasses.dataclass(frozen=True)
class Config:
    act: Any
    n: int = 2


class Net(ab.Module):
    def __init__(self, act: Any = double) -> None:
        self.n = ab.Variable(jnp.array(0))
        self.act = act

    def __call__(self, x: Any) -> Any:
        self.n.value += 1
        return self.act(x) + self.n


ACTS: dict[str, Any] = {}


class World:
    """Containers, and functions that capture them in some way."""

    def __init__(self) -> None:
        self.acts: dict[str, Any] = {"a": double, "b": jnp.tanh, "n": 3}
        self.steps: list[Any] = [double, shifted(1)]
        self.nets: list[Any] = [Net(), Net(shifted(2))]
        self.metrics: dict[str, Any] = {"loss": ab.Variable(jnp.zeros(2)), "steps": [Net()]}
        self.pair = (double, Net())
        self.config = Config(shifted(1))
        acts, steps, nets, metrics = self.acts, self.steps, self.nets, self.metrics
        pair, config = self.pair, self.config

        def of_functions(x: Any) -> Any:
            return sum(f(x) for f in acts.values() if callable(f)) + steps[-1](x) * len(steps)

        def of_objects(x: Any) -> Any:
            metrics["loss"].value = (metrics["loss"] + x) % 61
            for net in (*nets, *metrics["steps"]):
                x = net(x) % 61
            return x

        def of_tuples(x: Any) -> Any:
            return pair[0](pair[1](x)) + config.act(x) * config.n

        def of_helpers(x: Any) -> Any:
            def helper(x: Any) -> Any:
                return sum(net(x) for net in nets) + steps[0](x)

            return helper(x) % 61 + of_functions(x)

        def of_arguments(f: Any, nets: Any, *, more: Any, x: Any) -> Any:
            return f(sum(net(x) for net in nets)) + more["f"](x)

        self.more = {"f": steps[0]}
        given = functools.partial(of_arguments, steps[0], nets, more=self.more)
        self.functions: dict[str, Callable[..., Any]] = {
            "functions": of_functions,
            "objects": of_objects,
            "tuples": of_tuples,
            "helpers": of_helpers,
            "partial": lambda x: given(x=x),
        }
        self.partial = given

    def seen(self) -> Any:
        nets = [*self.nets, *self.metrics["steps"], self.pair[1]]
        return look([net.n for net in nets], self.metrics["loss"])


# what leads to no object is a constant, as it is to JAX
WRITES: tuple[Callable[[World], None], ...] = (
    lambda w: w.nets.append(Net()),
    lambda w: w.nets.__setitem__(0, Net(shifted(5))),
    lambda w: w.nets.__setitem__(0, w.nets[-1]),
    lambda w: w.nets.__setitem__(-1, w.metrics["steps"][0]),
    lambda w: w.nets.reverse(),
    lambda w: w.nets.__delitem__(slice(2, None)),
    lambda w: setattr(w.nets[0], "act", shifted(1)),
    lambda w: setattr(w.nets[0].n, "value", jnp.array(7)),
    lambda w: w.metrics.update(loss=ab.Variable(jnp.ones(2))),
    lambda w: w.metrics.update(steps=[Net()]),
    lambda w: w.metrics.update(steps=w.nets),
    lambda w: w.metrics.update(extra=Net()),
    lambda w: w.metrics.pop("extra", None),
    lambda w: w.metrics["steps"].append(Net()),
)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_written_to_what_is_captured_is_seen(seed):
    rng = random.Random(seed)
    ours, plain = World(), World()
    compiled = {name: ab.jit(function) for name, function in ours.functions.items()}
    history: list[Any] = []
    for _ in range(30):
        for name in rng.sample([*compiled], 3):
            for _ in range(rng.randrange(1, 5)):
                history.append(name)
                x = jnp.arange(2.0) + rng.randrange(3)
                found, expected = compiled[name](x), plain.functions[name](x)
                assert jnp.allclose(found, expected), history
                assert same(ours.seen(), plain.seen()), history
        at = rng.randrange(len(WRITES))
        history.append(at)
        WRITES[at](ours)
        WRITES[at](plain)


def test_calls_are_not_walked(monkeypatch):
    walks, world = Walks(monkeypatch), World()
    for name, function in [*world.functions.items(), ("given", world.partial)]:
        jitted = ab.jit(function)
        for _ in range(5):
            walked = walks.of(jitted, x=jnp.ones(2))
        assert walked == 0, name
        assert jitted._followers, name


def test_what_a_captured_container_has_lost_is_freed():
    """A container that leads to objects is not kept, and nothing that was in it."""

    class Large(Net):
        pass

    def make() -> Any:
        held: Any = [Large(), {"other": Large()}]
        functions = {"f": shifted(1)}

        def call(x: Any) -> Any:
            return held[0](x) + held[1]["other"](x) + functions["f"](x)

        def replace(new: Any) -> None:
            nonlocal held
            held = new

        return ab.jit(call), replace, held, functions

    jitted, replace, held, functions = make()
    for _ in range(6):
        jitted(jnp.ones(2))
    assert jitted._followers
    gone = [weakref.ref(x) for x in (held[0], held[1]["other"].n, functions["f"])]
    gc.collect()
    gc.disable()
    try:
        del functions["f"]
        assert gone[2]() is None
        replace([Large(), {"other": Large()}])
        del held
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()
    functions["f"] = shifted(1)
    assert jitted(jnp.ones(2)).tolist() == [3.0 + 3.0 + 2.0] * 2


def test_one_container_in_two_places():
    nets = [Net()]
    places = types.SimpleNamespace()

    def make(first: Any, second: Any) -> Callable[[Any], Any]:
        def helper() -> Any:
            return second

        def call(x: Any) -> Any:
            first.append(Net())
            return jnp.asarray(len(helper())) + x

        places.cells = (call.__closure__, helper.__closure__)
        return call

    jitted = ab.jit(make(nets, nets))
    for i in range(5):
        assert int(jitted(0)) == i + 2
    assert len(nets) == 6

    def told(first: Any, second: Any) -> Any:
        return lambda x: x + (first is second) + 0 * first[0](x)

    one, other = [Net()], [Net()]
    jitted = ab.jit(told(one, one))
    assert [int(jitted(0)) for _ in range(5)] == [1] * 5
    function = told(one, one)
    jitted = ab.jit(function)
    assert [int(jitted(0)) for _ in range(5)] == [1] * 5
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    other[0] = one[0]
    cells["second"].cell_contents = other
    assert [int(jitted(0)) for _ in range(5)] == [0] * 5


def test_a_captured_container_is_an_argument_too():
    nets = [Net()]

    def call(given: Any, x: Any) -> Any:
        return nets[0](x) + (given is nets)

    jitted = ab.jit(call)
    for i in range(5):
        assert int(jitted(nets, 0)) == i + 2
    other = [Net()]
    for i in range(5):
        assert int(jitted(other, 0)) == i + 6
    assert int(jitted(nets, 0)) == 12


def test_new_values_come_into_a_captured_container():
    cache: dict[str, Any] = {"net": Net(), "rows": {"k": ab.Variable(jnp.ones(2))}}

    def call(x: Any) -> Any:
        cache["rows"]["k"].value = cache["rows"]["k"] + x
        return cache["net"](x)

    jitted = ab.jit(call)
    for i in range(6):
        jitted(jnp.array(1.0))
        assert cache["rows"]["k"].value.tolist() == [2.0 + i] * 2
    assert jitted._followers
    assert isinstance(cache["rows"]["k"].value, jax.Array)


@pytest.mark.parametrize("calls", [2, 6])
def test_none_in_the_place_of_what_is_gone_is_seen(calls):
    nets: list[Any] = [Net(), Net()]
    last: Any = Net()

    def call(x: Any) -> Any:
        x = nets[1](x) if nets[0] is None else nets[0](x) + nets[1](x)
        return x if last is None else last(x)

    jitted = ab.jit(call)
    for _ in range(calls):
        jitted(1.0)
    nets[0] = None
    gc.collect()
    assert float(jitted(1.0)) == 2 * (2.0 + calls + 1) + calls + 1
    last = None
    gc.collect()
    assert float(jitted(1.0)) == 2.0 + calls + 2


@jax.tree_util.register_pytree_node_class
class Tree:
    def __init__(self, a: Any) -> None:
        self.a = a

    def tree_flatten(self) -> Any:
        return (), self.a

    @classmethod
    def tree_unflatten(cls, a: Any, _: Any) -> Any:
        return cls(a)


class Pair(NamedTuple):
    f: Any
    n: int = 1


class Key:
    def __init__(self, a: int) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.a == self.a

    def __hash__(self) -> int:
        return hash(self.a)


def later() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return a function that captures an object some day, and what lets it."""
    held: Any = None

    def read() -> Any:
        return held

    def put(x: Any) -> None:
        nonlocal held
        held = x

    return read, put


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("calls", [1, 2, 7])
@pytest.mark.parametrize("within", [lambda x: x, lambda x: (x,), Config, lambda x: {"k": [x]}])
def test_what_changes_in_place_beside_an_object_is_seen(within, calls):
    tree, key, (read, put) = Tree("s"), Key(1), later()
    bound = functools.partial(lambda x, **more: x + sum(more.values()))
    held = [within(tree), within(Pair(read)), within(key), within(bound), ab.Variable(jnp.array(0))]

    def call(x: Any) -> Any:
        held[-1].value += 1
        found = read()
        return bound(x) + len(tree.a) + key.a + (0 if found is None else found.value)

    jitted = ab.jit(call)
    steps = [
        (lambda: None, 3.0),
        (lambda: setattr(tree, "a", "text"), 6.0),
        (lambda: setattr(key, "a", 3), 8.0),
        (lambda: put(ab.Variable(jnp.array(100.0))), 108.0),
    ]
    for count, (write, expected) in enumerate(steps):
        write()
        for _ in range(calls):
            assert float(jitted(1.0)) == expected
        assert int(held[-1].value) == calls * (count + 1)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("calls", [1, 2, 7])
@pytest.mark.parametrize("given", [True, False])
def test_a_keyword_that_comes_into_a_partial_is_seen(given, calls):
    def call(x: Any, v: Any, **more: Any) -> Any:
        for other in more.values():
            other.value += 1
        return x + v.value + sum(other.value for other in more.values())

    bound = functools.partial(call, v=ab.Variable(jnp.array(1.0)))
    jitted = ab.jit(bound if given else lambda x: bound(x))  # noqa: PLW0108 - it is captured
    for _ in range(calls):
        assert float(jitted(1.0)) == 2.0
    bound.keywords["w"] = other = ab.Variable(jnp.array(5.0))
    for i in range(calls):
        assert float(jitted(1.0)) == 8.0 + i
    assert float(other.value) == 5.0 + calls
    del bound.keywords["w"]
    assert float(jitted(1.0)) == 2.0


def test_a_frozen_dataclass_that_gets_an_attribute_is_seen():
    config = Config(Net())
    held = [config]
    jitted = ab.jit(lambda x: held[0].act(x) * len(vars(held[0])))
    for i in range(6):
        assert float(jitted(0.0)) == 2.0 * (i + 1)
    object.__setattr__(config, "more", 1)
    assert float(jitted(0.0)) == 21.0


def test_a_named_tuple_that_a_captured_list_has_lost_is_freed():
    held: list[Any] = [Pair(Net()), ab.Variable(jnp.array(0.0))]
    jitted = ab.jit(lambda x: x + held[-1].value + (held[0].f(x) if len(held) > 1 else 0))
    for _ in range(6):
        jitted(1.0)
    gone = weakref.ref(held[0].f)
    held.pop(0)
    gc.collect()
    assert gone() is None
    assert float(jitted(1.0)) == 1.0
