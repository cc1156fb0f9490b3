"""Arguments that are read by columns, or taken apart by JAX, are those of the plain call.

A compiled function that tells all that can be seen of its arguments answers as the plain one only
if every write was noticed. Here the arguments are lists of layers of one form, and states of
optimisers in named tuples.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from tests.transforms.plan_worlds import Frozen, OtherPoint, Point, Walks, children_of

LAYERS = 12


class Moments(NamedTuple):
    count: Any
    first: Any
    second: Any = ()


class OtherMoments(NamedTuple):
    count: Any
    first: Any
    second: Any = ()


@dataclasses.dataclass(frozen=True)
class Frame(Frozen):
    array: Any = None


def layer(i: int) -> Point:
    linear = Point(jnp.full(2, float(i)), jnp.ones(()))
    norm = {
        "scale": ab.Param(jnp.full(2, 2.0)),
        "bias": ab.Variable(jnp.ones(2), momentum=0.9),
        "rate": 0.5,
        "axes": (1, "features"),
    }
    return Point([linear, norm, (jnp.ones(2), i % 2 == 0)], Frame(3, jnp.full((), float(i))))


def pair(i: int) -> Point:
    one, other = Point(jnp.full(2, float(i)), jnp.ones(())), Point(jnp.ones(3), jnp.full((), 2.0))
    return Point(one, Point(other, Frame(1, jnp.ones(()))))


def world() -> list[Any]:
    """Return arguments of all forms."""
    layers: list[Any] = [layer(i) for i in range(LAYERS)]
    moments = Moments(jnp.array(0), {"w": jnp.ones(2), "b": [jnp.ones(())] * 2})
    variables = [ab.Param(jnp.full((), float(i))) for i in range(LAYERS)]
    return [
        Point(layers, 3),
        [*[jnp.full((), float(i)) for i in range(LAYERS)], *variables, 7, "text", *range(LAYERS)],
        (moments, (), None, Moments(jnp.ones(()), (jnp.ones(2), jnp.zeros(2)))),
        ab.State.from_dict({"w": [jnp.ones(2), jnp.ones(())], "b": jnp.zeros(2)}),
        {f"k{i}": [jnp.ones(()), 2.0] for i in range(LAYERS)},
        [
            Point(Point(*[jnp.full(2, float(i))] * 2), Point(jnp.ones(()), jnp.ones(2)))
            for i in range(LAYERS)
        ]
        + [pair(i) for i in range(LAYERS)],
    ]


def look(*args: Any) -> tuple[str, Any]:
    """Return everything that can be seen of arguments: structure as text, arrays as one number."""
    seen: dict[int, int] = {}
    text: list[str] = []
    total: Any = jnp.zeros(())

    def visit(x: Any, numbers: bool) -> None:
        nonlocal total
        if isinstance(x, np.ndarray) or (numbers and isinstance(x, (bool, int, float))):
            x = jnp.asarray(x)
        if isinstance(x, jax.Array):
            text.append(f"array{x.shape}{x.dtype}")
            total = total + len(text) * x.astype(float).sum()
            return
        children = children_of(x)
        if isinstance(x, ab.Variable):
            numbers = True
        elif isinstance(x, Point):
            numbers = False
        elif isinstance(x, ab.State):
            children = [*zip(x.paths, jax.tree.leaves(x), strict=True)]
        if children is None:
            text.append(f"{type(x).__name__}:{x!r}")
            return
        if not isinstance(x, (tuple, Frozen, ab.State)):
            if id(x) in seen:
                text.append(f"#{seen[id(x)]}")
                return
            seen[id(x)] = len(seen)
        text.append(f"{type(x).__name__}(")
        for key, child in children:
            text.append(f"{type(key).__name__}:{key!r}=")
            # metadata are no arrays
            visit(child, numbers and (not isinstance(x, ab.Variable) or key == "value"))
        text.append(")")

    for arg in args:
        visit(arg, True)
    return " ".join(text), total


def same(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1], equal_nan=True)


def nodes_of(args: list[Any]) -> list[Any]:
    """Return all that can be written, from the outside in."""
    found: list[Any] = []
    pending: list[Any] = [*args]
    while pending:
        x = pending.pop(0)
        if any(x is y for y in found):
            continue
        if isinstance(x, (Point, list, dict)):
            found.append(x)
        if isinstance(x, ab.Variable):
            found.append(x)
        elif isinstance(x, (Point, Frozen)):
            pending += vars(x).values()
        elif isinstance(x, dict):
            pending += x.values()
        elif isinstance(x, (list, tuple)):
            pending += x
    return found


def values(rng: random.Random, nodes: list[Any]) -> Any:
    """Return something that may stand anywhere."""
    return rng.choice(
        [
            lambda: jnp.full(2, float(rng.randrange(9))),
            lambda: jnp.full((), float(rng.randrange(9))),
            lambda: jnp.ones(3, jnp.int32),
            lambda: np.full(2, rng.randrange(9), np.float32),
            lambda: rng.choice([1, True, 1.0, 0.0, -0.0, "a", "b", None, 2.0]),
            lambda: math.nan,
            lambda: ab.Param(jnp.ones(2)),
            lambda: rng.choice(nodes),
            lambda: layer(rng.randrange(9)),
            lambda: (jnp.ones(2), rng.choice([True, 1, False])),
            lambda: Frame(rng.choice([3, 4]), jnp.ones(())),
            lambda: Moments(jnp.ones(()), jnp.ones(2)),
            lambda: OtherMoments(jnp.ones(()), jnp.ones(2)),
        ]
    )()


def write_array(rng: random.Random, x: Any) -> bool:
    """Put another array of the same type in the place of one: what happens most often."""
    held = vars(x) if isinstance(x, Point) else x
    places: list[Any] = [*held] if isinstance(held, dict) else [*range(len(held))]
    places = [key for key in places if isinstance(held[key], jax.Array)]
    if places:
        key = rng.choice(places)
        held[key] = held[key] + 1
    return bool(places)


def write(rng: random.Random, args: list[Any]) -> str:
    """Do one write somewhere; return what it was."""
    nodes = nodes_of(args)
    x = rng.choice(nodes)
    if isinstance(x, ab.Variable):
        choice = rng.randrange(3)
        if choice == 0:
            x.value = jnp.full(2, float(rng.randrange(9)))
        elif choice == 1:
            x.set_metadata(momentum=rng.choice([0.9, 1, True]))
        else:
            x.value = jnp.asarray(x.value) + 1
        return f"variable {choice}"
    if rng.random() < 0.3 and write_array(rng, x):
        return "array"
    if isinstance(x, list):
        return write_list(rng, x, nodes)
    held = x if isinstance(x, dict) else vars(x)
    names = [*held]
    choice = rng.randrange(5)
    if choice == 0 and len(names) > 1:
        del held[rng.choice(names)]
    elif choice == 1 and isinstance(x, Point):
        x.__class__ = OtherPoint if type(x) is Point else Point
    elif choice == 2 and names:  # another order of the same names
        name = rng.choice(names)
        held[name] = held.pop(name)
    elif choice == 3:
        held[rng.choice(["x", "y", "new"])] = values(rng, nodes)
    elif names:
        held[rng.choice(names)] = values(rng, nodes)
    return f"{type(x).__name__} {choice}"


def write_list(rng: random.Random, x: list[Any], nodes: list[Any]) -> str:
    choice = rng.randrange(6)
    if choice == 0 and x:
        x.pop(rng.randrange(len(x)))
    elif choice == 1:
        x.insert(rng.randrange(len(x) + 1), values(rng, nodes))
    elif choice == 2 and len(x) > 1:
        i, j = rng.sample(range(len(x)), 2)
        x[i], x[j] = x[j], x[i]
    elif choice == 3 and len(x) > 1:  # an alias, or one less
        i, j = rng.sample(range(len(x)), 2)
        x[i] = x[j]
    elif x:
        x[rng.randrange(len(x))] = values(rng, nodes)
    return f"list {choice}"


@pytest.mark.parametrize("seed", range(5))
def test_random_writes_between_calls_are_seen(seed):
    rng = random.Random(seed)
    jitted = ab.jit(look)
    args = world()
    history: list[str] = []
    for _ in range(25):
        for _ in range(rng.choice([0, 5])):
            jitted(*args)  # what is not written is looked at less closely then
        for _ in range(3):
            assert same(jitted(*args), look(*args)), history
        history.append(write(rng, args))
        if rng.random() < 0.1:
            args, history = world(), []


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("seed", range(2))
def test_one_write_to_a_followed_argument_is_seen(i, seed):
    rng = random.Random(1000 * i + seed)
    jitted = ab.jit(look)
    for _ in range(15):
        arg = world()[i]
        for _ in range(rng.choice([3, 8])):
            jitted(arg)
        assert same(jitted(arg), look(arg))
        args = [arg]
        if isinstance(arg, (Point, list, dict, tuple)):
            history = write(rng, args)
        else:
            history, args = "state", [arg.replace({("b",): jnp.full(2, float(rng.randrange(9)))})]
        assert same(jitted(*args), look(*args)), history


@pytest.mark.parametrize("i", range(6))
def test_calls_are_not_walked(i, monkeypatch):
    walks = Walks(monkeypatch)
    jitted = ab.jit(look)
    arg = world()[i]
    for _ in range(3):
        jitted(arg)
    assert jitted._followers
    monkeypatch.setattr(jitted, "_plans", None)  # followers do not ask it
    assert walks.of(jitted, arg) == 0
    if i != 0:  # metadata are compared by identity
        other = world()[i]
        assert walks.of(jitted, other) == 0  # nothing else is tied to the objects
        assert same(jitted(other), look(other))


def test_an_attribute_that_moves_to_the_next_object_is_seen():
    """All names together are then what they were."""
    model = Point([Point(Point(jnp.ones(2), jnp.ones(())), Point(1, 2)) for _ in range(LAYERS)])
    for one in model.x:
        del one.y.x, one.y.y
        one.y.z = jnp.full(2, 3.0)
    jitted = ab.jit(look)
    for _ in range(4):
        assert same(jitted(model), look(model))
    assert jitted._followers
    one = model.x[5]
    moved = one.x.__dict__.pop("y")
    one.y.__dict__ = {"y": moved, **vars(one.y)}
    for _ in range(2):
        assert same(jitted(model), look(model))


def test_nothing_is_kept_alive():
    jitted = ab.jit(lambda model, moments: (model.y, moments))
    layers = [layer(i) for i in range(LAYERS)]
    model = Point(layers, jnp.ones(()))
    refs = [weakref.ref(x) for x in (model, layers[0], layers[0].x[0], layers[0].x[1]["scale"])]
    moments = Moments(jnp.array(0), (jnp.ones(2), jnp.ones(2)))
    refs.append(weakref.ref(moments.first[0]))
    for _ in range(5):
        jitted(model, moments)
    assert jitted._followers
    del model, layers, moments
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_what_a_step_writes_is_written():
    def step(model, moments, x):
        for one in model.x:
            one.x[0].x = one.x[0].x + x
            one.x[1]["scale"].value += 1
        return moments._replace(count=moments.count + 1), model.x[3]

    jitted = ab.jit(step)
    model, plain = world()[0], world()[0]
    moments = expected = Moments(jnp.array(0), {"w": jnp.ones(2)}, ())
    for i in range(6):
        moments, third = jitted(model, moments, float(i))
        expected, _ = step(plain, expected, float(i))
        assert third is model.x[3]
        assert type(moments) is Moments
        assert same(look(model, moments), look(plain, expected))


def test_optax_states_are_returned_without_a_walk(monkeypatch):
    optax = pytest.importorskip("optax")
    walks = Walks(monkeypatch)
    model, plain = ab.Param(jnp.ones(3)), ab.Param(jnp.ones(3))
    tx = optax.chain(optax.clip(1.0), optax.adam(0.1))

    def step(model, state):
        params = ab.state(model)
        grads = jax.tree.map(lambda x: 2 * x, params)
        updates, state = tx.update(grads, state, params)
        ab.update(model, optax.apply_updates(params, updates))
        return state

    jitted = ab.jit(step)
    state = expected = tx.init(ab.state(model))
    for i in range(6):
        walked = walks.count
        state = jitted(model, state)
        assert walks.count == walked + (i == 0)
        expected = step(plain, expected)
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        np.testing.assert_allclose(model.value, plain.value, rtol=1e-5)


def test_values_that_are_passed_on_come_back():
    class Own:
        pass

    own = Own()
    jitted = ab.jit(lambda pair, x: (pair, x + 1, pair[0]))
    for _ in range(5):
        (first, second), y, again = jitted((("a", jnp.ones(2)), 1.5), 2.0)
        assert (first[0], second, float(y), again[0]) == ("a", 1.5, 3.0, "a")
    identity = ab.jit(lambda pair: pair)
    for _ in range(5):
        assert identity((own, 1))[0] is own


class Text(str):
    """Equal to a name, and another one."""

    __slots__ = ()


@pytest.mark.parametrize("count", [1, 2, LAYERS, 3 * LAYERS])
@pytest.mark.parametrize("around", [False, True], ids=["arguments", "in a Module"])
def test_a_key_that_equals_another_one_is_seen(count: int, around: bool) -> None:
    held = [{"w": jnp.ones(1), "b": ab.Param(jnp.ones(1))} for _ in range(count)]
    box = ab.Module()
    box.held = held
    arg = box if around else held

    def keys_of(arg: Any) -> list[str]:
        return [type(key).__name__ for x in (arg.held if around else arg) for key in x]

    jitted = ab.jit(keys_of)
    for _ in range(6):
        assert jitted(arg) == keys_of(arg)
    for x in (held[0], held[-1]):
        x[Text("b")] = x.pop("b")
        for _ in range(3):
            assert jitted(arg) == keys_of(arg)


def test_the_attributes_of_an_object_are_seen_through_their_dictionary() -> None:
    point = Point(ab.Param(jnp.ones(1)), "a")
    box = ab.Module()
    box.held, box.more = vars(point), [{"a": i} for i in range(30)]
    jitted = ab.jit(lambda box: (box.held["y"], box.held["x"].value * 2))
    for i in range(4):
        for _ in range(6):
            tag, value = jitted(box)
            assert (tag, float(value[0])) == (point.y, 2 * float(point.x.value[0]))
        point.y = f"tag {i}"
        if i % 2:
            point.x = ab.Param(jnp.full(1, float(i)))
