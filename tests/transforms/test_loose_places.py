"""Functions that put new lists, dictionaries and trees in the place of others, call after call."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch.errors import ConcurrentWriteError
from tests.transforms.plan_worlds import Point, Walks, look, same


class Moments(NamedTuple):
    count: Any
    first: Any
    nothing: Any = None


def moments(first: Any) -> Any:
    return Moments(jnp.array(0), first), ()


def table() -> dict[str, Any]:
    return {"w": jnp.arange(3.0), "b": jnp.array(1.0)}  # in an order that JAX does not keep


TREES: dict[str, Callable[[], Any]] = {
    "list": lambda: [jnp.arange(3.0), jnp.array(1.0)],
    "dict": table,
    "nested": lambda: {"layers": [table(), table()], "a": [jnp.ones(1)]},
    "optimiser": lambda: moments(table()),
    "tuple": lambda: (jnp.arange(3.0), [jnp.ones(1)]),
    "values": lambda: moments((jnp.arange(3.0), jnp.ones(1))),
    "state": lambda: ab.State.from_dict(table()),
}


class Model(ab.Module):
    def __init__(self, tree: Any) -> None:
        self.count = ab.Variable(jnp.array(0))
        self.tree = tree


class Holding(ab.Module):
    def __init__(self, tree: Any) -> None:
        self.held = tree
        self.count = ab.Variable(jnp.array(0))


def in_variable(tree: Any) -> tuple[Any, Any, Any]:
    model = Model(ab.Variable(tree))
    return model, lambda m: m.tree.value, lambda m, new: setattr(m.tree, "value", new)


def in_element(make: Callable[[Any], Any], key: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    def placed(tree: Any) -> tuple[Any, Any, Any]:
        return (
            Holding(make(tree)),
            lambda m: m.held[key],
            lambda m, new: m.held.__setitem__(key, new),
        )

    return placed


def in_argument(make: Callable[[Any], Any], key: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    def placed(tree: Any) -> tuple[Any, Any, Any]:
        return make(tree), lambda a: a[key], lambda a, new: a.__setitem__(key, new)

    return placed


def in_attribute(make: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, Any, Any]]:
    def placed(tree: Any) -> tuple[Any, Any, Any]:
        return make(tree), lambda m: m.tree, lambda m, new: setattr(m, "tree", new)

    return placed


class Attribute:
    def __init__(self, tree: Any) -> None:
        self.tree = tree


class Node(Attribute):
    pass


ab.graph.node(Node)


def in_dataclass(tree: Any) -> tuple[Any, Any, Any]:
    return Holding(Point(tree)), lambda m: m.held.x, lambda m, new: setattr(m.held, "x", new)


def in_passed_dataclass(tree: Any) -> tuple[Any, Any, Any]:
    return Point(tree), lambda p: p.x, lambda p, new: setattr(p, "x", new)


PLACES: dict[str, Callable[[Any], tuple[Any, Any, Any]]] = {
    "attribute": in_attribute(Model),
    "variable": in_variable,
    "attribute of a node": in_attribute(Node),
    "list in a module": in_element(lambda tree: ["text", tree], 1),
    "dict in a module": in_element(lambda tree: {7: None, "tree": tree}, "tree"),
    "dataclass in a module": in_dataclass,
    "passed dataclass": in_passed_dataclass,
    "passed list": in_argument(lambda tree: [None, tree], 1),
    "passed dict": in_argument(lambda tree: {"tree": tree, "n": None}, "tree"),
}


def renewed(x: Any) -> Any:
    """Return a copy with other arrays."""
    if isinstance(x, dict):
        return {key: renewed(value) for key, value in x.items()}
    if isinstance(x, list):
        return [renewed(value) for value in x]
    if isinstance(x, Moments):
        return Moments(*map(renewed, x))
    if isinstance(x, tuple):
        return tuple(map(renewed, x))
    if isinstance(x, ab.State):
        return jax.tree.map(renewed, x)
    return (2 * x + 1) % 61 if isinstance(x, jax.Array) else x  # exact in float32


def shown(x: Any) -> Any:
    """Return all that can be seen of a tree, keys in their order."""
    if isinstance(x, dict):
        return "dict", [(key, shown(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [shown(value) for value in x]
    if isinstance(x, ab.State):
        return "State", x.paths, [shown(leaf) for leaf in x.leaves]
    return (x.tolist(), str(x.dtype)) if isinstance(x, jax.Array) else x


@pytest.fixture
def walks(monkeypatch):
    return Walks(monkeypatch)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("place", PLACES)
def test_a_tree_is_replaced_in_every_call(place, tree, walks):
    obj, get, put = PLACES[place](TREES[tree]())
    plain, _, _ = PLACES[place](TREES[tree]())

    def step(obj: Any) -> Any:
        put(obj, renewed(get(obj)))
        return jnp.ones(())

    jitted, reader = ab.jit(step), ab.jit(lambda obj: renewed(get(obj)))
    for i in range(9):
        before, text = get(obj), shown(get(obj))
        walked = walks.of(jitted, obj)
        step(plain)
        assert get(obj) is not before
        assert shown(before) == text
        assert shown(get(obj)) == shown(get(plain))
        assert shown(reader(obj)) == shown(renewed(get(plain)))
        if i > 4:
            assert walked == walks.of(reader, obj) == 0
    assert jitted._followers
    assert reader._followers


def test_several_places_and_variables_are_written_at_once(walks):
    class Two(ab.Module):
        def __init__(self) -> None:
            self.a, self.b, self.n = table(), [table()], jnp.array(0)
            self.first, self.second = ab.Variable(jnp.array(0)), ab.Variable({"k": jnp.ones(2)})
            self.rows = [[jnp.ones(1)], (jnp.ones(2), [jnp.zeros(1)])]

    def step(two: Two, x: Any) -> Any:
        two.a, two.b, two.n = renewed(two.a), renewed(two.b), two.n + 1
        two.first.value += 1
        two.second.value = renewed(two.second.value)
        two.rows[:] = renewed(two.rows)
        two.b[0]["w"] = x + two.b[0]["w"]
        return {"n": two.n + 0}

    two, plain = Two(), Two()
    jitted = ab.jit(step)
    for _ in range(8):
        walked = walks.of(jitted, two, 1.0)
        step(plain, 1.0)
        assert same(look(two), look(plain))
    assert walked == 0


def test_an_array_of_the_arguments_is_put(walks):
    def step(model: Model, x: Any) -> None:
        model.tree = {"x": x, "old": model.tree["x"]}

    model, jitted = Model({"x": jnp.ones(2), "old": jnp.zeros(2)}), ab.jit(step)
    for i in range(8):
        x, before = jnp.full(2, float(i)), model.tree["x"]
        walked = walks.of(jitted, model, x)
        assert model.tree["x"] is x
        assert model.tree["old"] is before
    assert walked == 0


def test_a_container_that_is_stored_and_returned_is_one():
    def step(model: Model) -> Any:
        model.tree = renewed(model.tree)
        return model.tree

    model, jitted = Model(table()), ab.jit(step)
    for _ in range(6):
        assert jitted(model) is model.tree


def test_a_container_that_is_stored_twice_is_one():
    def step(model: Model) -> None:
        model.tree = model.other = renewed(model.tree)

    model, jitted = Model(table()), ab.jit(step)
    model.other = table()
    for _ in range(6):
        jitted(model)
        assert model.tree is model.other


@pytest.mark.parametrize("calls", [1, 3, 7])
def test_a_container_that_is_replaced_while_the_function_runs_is_not_lost(calls):
    model = Model(table())
    other = table()

    def step(model: Model) -> None:
        model.count.value += 1
        model.tree = renewed(model.tree)

    jitted = ab.jit(step)
    for _ in range(calls):
        jitted(model)
    count = model.count.value
    for plan in jitted._plans:
        function = plan.function

        def meddling(*leaves: Any, function: Any = function) -> Any:
            results = function(*leaves)
            model.tree = other
            return results

        plan.function = meddling
        for follower in jitted._followers.values():
            follower.__globals__["function"] = meddling
    if calls > 1:
        with pytest.raises(ConcurrentWriteError, match="Model"):
            jitted(model)
        assert model.tree is other
        assert model.count.value is count


class World(ab.Module):
    def __init__(self) -> None:
        self.cache = table()
        self.pairs = [[jnp.ones(2), jnp.zeros(2)], [jnp.ones(2), jnp.zeros(2)]]
        self.cell = ab.Variable({"h": jnp.ones(2)})
        self.state = moments(table())
        self.box = Point({"x": jnp.ones(1)}, 1)
        self.other: Any = None
        self.array = jnp.ones(3)


def replace_cache(world: World) -> None:
    world.cache = renewed(world.cache)


def replace_pair(world: World) -> None:
    world.pairs[0] = renewed(world.pairs[0])


def replace_all(world: World) -> None:
    world.state, world.box.x = renewed(world.state), renewed(world.box.x)
    world.cell.value = renewed(world.cell.value)
    world.array = renewed(world.array)


def replace_pairs(world: World) -> None:
    world.pairs = renewed(world.pairs)


def share(world: World) -> None:
    world.other = world.cache = renewed(world.cache)


def read(world: World) -> None:
    """Write nothing."""


def write_inside(world: World) -> None:
    for x in (world.cache, world.cell.value, world.box.x):
        for key, value in x.items() if isinstance(x, dict) else ():
            if isinstance(value, jax.Array):
                x[key] = (value + 1) % 61
                break


STEPS = 20
FUNCTIONS = (replace_cache, replace_pair, replace_all, replace_pairs, share, read, write_inside)
WRITES: tuple[Callable[[World], None], ...] = (
    lambda w: setattr(w, "cache", table()),
    lambda w: setattr(w, "cache", {"b": jnp.ones(()), "w": jnp.ones(3)}),
    lambda w: setattr(w, "cache", {"w": jnp.ones(2), "b": 3}),
    lambda w: setattr(w, "cache", (jnp.ones(2), jnp.ones(1))),
    lambda w: setattr(w, "other", w.cache),
    lambda w: setattr(w, "other", None),
    lambda w: setattr(w.box, "x", w.cache),
    lambda w: setattr(w.box, "x", {"x": jnp.ones(1)}),
    lambda w: w.pairs.__setitem__(0, w.pairs[-1]),
    lambda w: w.pairs.__setitem__(0, [*w.pairs[0]]),
    lambda w: setattr(w, "pairs", [[jnp.ones(2), jnp.zeros(2)], [jnp.ones(2), jnp.zeros(2)]]),
    lambda w: w.pairs[0].append(jnp.ones(1)) if isinstance(w.pairs[0], list) else None,
    lambda w: setattr(w.cell, "value", {"h": jnp.full(2, 4.0)}),
    lambda w: setattr(w.cell, "value", [jnp.full(2, 4.0)]),
    lambda w: setattr(w.cell, "value", {"h": (jnp.ones(1), [jnp.ones(1)])}),
    lambda w: setattr(w, "state", moments([jnp.ones(1)])),
    lambda w: setattr(w, "state", moments(table())),
    lambda w: setattr(w, "state", moments(w.cache)),
    lambda w: setattr(w, "state", (Moments(jnp.array(0), w.state[0].first, w.state[0].first), ())),
    lambda w: setattr(w, "array", {"a": jnp.ones(1)}),
    lambda w: setattr(w, "array", jnp.ones(3)),
    lambda w: setattr(w.box, "y", [jnp.ones(1)]),
    lambda w: setattr(w.box, "y", 1),
)


def apply(write: Callable[[World], None], world: World) -> bool:
    """Tell whether the write failed."""
    try:
        write(world)
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_written_between_calls_they_do_what_plain_calls_do(seed):
    rng = random.Random(seed)

    def and_look(function: Callable[[World], None]) -> Callable[[World], Any]:
        def called(world: World) -> Any:
            function(world)
            return look(world)

        return called

    plain = {function: and_look(function) for function in FUNCTIONS}
    compiled = {function: ab.jit(called) for function, called in plain.items()}
    ours, theirs = World(), World()
    history: list[Any] = []
    for _ in range(STEPS):
        chosen = rng.sample(FUNCTIONS, 2)
        for _ in range(rng.randrange(1, 5)):
            for function in chosen:
                history.append(function.__name__)
                assert same(compiled[function](ours), plain[function](theirs)), history
                assert same(look(ours), look(theirs)), history
        at = rng.randrange(len(WRITES))
        history.append(at)
        assert apply(WRITES[at], ours) == apply(WRITES[at], theirs), history


def test_a_container_that_holds_itself_is_no_tree():
    def step(model: Model) -> None:
        new: list[Any] = [renewed(model.tree[0])]
        new.append(new)
        model.tree = new

    model, jitted = Model([jnp.ones(2)]), ab.jit(step)
    model.tree.append(model.tree)
    for _ in range(5):
        jitted(model)
        assert model.tree[1] is model.tree
    assert model.tree[0].tolist() == [2.0, 2.0]  # 3, 7, 15, 31, 63 % 61


@pytest.mark.parametrize("reads", [0, 1, 5])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_replaced_is_freed_though_another_function_has_read_it(place, reads):
    obj, get, put = PLACES[place](table())
    others = [PLACES[place](table())[0] for _ in range(3)]  # so that no id is used again

    def step(obj: Any) -> None:
        put(obj, renewed(get(obj)))

    jitted, reader = ab.jit(step), ab.jit(lambda obj: renewed(get(obj)))
    for _ in range(reads):
        reader(obj)
    first = weakref.ref(get(obj)["w"])
    for _ in range(6):
        jitted(obj)
    gc.collect()
    assert first() is None
    for _ in range(6):
        second = weakref.ref(get(obj)["w"])
        reader(obj)
        jitted(obj)
        assert second() is None
    assert len(others) == 3


def test_a_variable_that_held_an_array_holds_trees():
    model = Model(ab.Variable(jnp.ones(2)))
    reader = ab.jit(lambda m: jax.tree.leaves(m.tree.value)[0] + 1)

    def step(model: Model) -> None:
        model.tree.value = renewed(model.tree.value)

    jitted = ab.jit(step)
    for _ in range(5):
        reader(model)
    model.tree.value = {"k": jnp.ones(2)}
    assert reader(model).tolist() == [2.0, 2.0]
    first = weakref.ref(model.tree.value["k"])
    for i in range(6):
        jitted(model)
        gc.collect()
        assert first() is None
        assert reader(model).tolist() == [4.0, 8.0, 16.0, 32.0, 3.0, 6.0][i : i + 1] * 2


@pytest.mark.parametrize("tree", ["dict", "tuple"])
def test_none_is_a_key_like_others(tree):
    ours, plain = Holding({None: TREES[tree](), "a": 1}), Holding({None: TREES[tree](), "a": 1})

    def step(model: Holding) -> Any:
        model.held[None] = renewed(model.held[None])
        return model.held["a"]

    jitted = ab.jit(step)
    for _ in range(6):
        assert int(jitted(ours)) == step(plain) == 1
        assert shown(ours.held) == shown(plain.held)
