"""Plans: a call on an unchanged graph is not walked, and any change is seen at the next call.

C17, C32, C34, C36.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.transforms import _plans
from tests.transforms.plan_worlds import (
    Frozen,
    Layer,
    OtherPoint,
    Point,
    Special,
    Walks,
    World,
    look,
    same,
)


@pytest.fixture
def walks(monkeypatch):
    return Walks(monkeypatch)


def in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def set_of(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda w: setattr(w, name, make(w))


DOORS: dict[str, Callable[[Any], Any]] = {
    # Modules
    "an attribute is set": lambda w: setattr(w, "new", 1),
    "a static attribute is changed": lambda w: setattr(w, "training", False),
    "True becomes 1": lambda w: setattr(w, "training", 1),
    "0.0 becomes -0.0": lambda w: setattr(w, "rate", -0.0),
    "an attribute is deleted": lambda w: delattr(w, "optional"),
    "an attribute moves to the end": lambda w: (
        delattr(w, "array"),
        setattr(w, "array", jnp.ones(3)),
    ),
    "a Variable is replaced": lambda w: setattr(w.first, "w", ab.Param(jnp.full(2, 9.0))),
    "a Variable of another kind": lambda w: setattr(w.first, "w", ab.Cache(jnp.full(2, 3.0))),
    "a module is swapped": lambda w: setattr(w, "first", Layer()),
    "an alias is made": lambda w: setattr(w.layers[1], "w", w.layers[0].w),
    "a cycle is made": lambda w: setattr(w.layers[1], "up", w),
    "an array becomes a number": lambda w: setattr(w, "array", 2.0),
    "a number becomes an array": lambda w: setattr(w, "rate", jnp.ones(2)),
    "an array becomes a Variable": lambda w: setattr(w, "array", ab.Param(jnp.ones(3))),
    "an array of another shape": lambda w: setattr(w, "array", jnp.ones(5)),
    "a numpy array": lambda w: setattr(w, "array", np.full(3, 4.0, np.float32)),
    "a new array": lambda w: setattr(w, "array", w.array * 7),
    "None becomes a module": lambda w: setattr(w, "optional", Layer()),
    "a class attribute is shadowed": lambda w: setattr(w.first, "scale", 5),
    "the class of a module": lambda w: setattr(w.layers[1], "__class__", Special),
    "a tuple is replaced": lambda w: setattr(w, "pair", (w.pair[1], w.pair[0])),
    "a frozen dataclass is replaced": lambda w: setattr(w, "frozen", Frozen(4)),
    "from another thread": lambda w: in_a_thread(lambda: setattr(w, "training", False)),
    "by a compiled function": transforms.jit(lambda w: setattr(w, "rate", 1.5)),
    # Variables
    "a value": lambda w: setattr(w.first.w, "value", jnp.full(2, 8.0)),
    "an element": lambda w: w.first.w.__setitem__(0, 8.0),
    "metadata are changed": lambda w: w.first.mean.set_metadata(momentum=0.5),
    "metadata are added": lambda w: w.first.w.set_metadata(tag="x"),
    "metadata by a compiled function": transforms.jit(lambda w: w.first.w.set_metadata(tag="y")),
    "the class of a Variable": lambda w: transforms.jit(
        lambda v: object.__setattr__(v, "__class__", ab.Cache)
    )(w.first.w),
    "a Variable that holds a list": lambda w: setattr(w.first.w, "value", [jnp.ones(2)]),
    "a Variable that holds a dict": lambda w: setattr(w.first.w, "value", {"a": jnp.ones(2)}),
    "a Variable that holds a tuple": lambda w: setattr(w.first.w, "value", (jnp.ones(2), 1.0)),
    "a Variable that holds None": lambda w: setattr(w.first.w, "value", None),
    "a Variable that holds a number": lambda w: setattr(w.first.w, "value", 2.0),
    "a Variable of another dtype": lambda w: setattr(w.first.w, "value", jnp.arange(2)),
    # lists
    "append": lambda w: w.layers.append(Layer()),
    "append to a list in a defaultdict": lambda w: w.default["z"].append(2),
    "insert": lambda w: w.layers.insert(0, Layer()),
    "pop": lambda w: w.layers.pop(),
    "reverse": lambda w: w.layers.reverse(),
    "clear": lambda w: w.layers.clear(),
    "extend": lambda w: w.layers.extend([1, 2]),
    "a slice": lambda w: w.layers.__setitem__(slice(0, 1), [Layer(), Layer()]),
    "an element is replaced": lambda w: w.layers.__setitem__(1, Layer()),
    "an array in a list": lambda w: w.arrays.__setitem__(0, jnp.full(2, 4.0)),
    "an array in a list becomes a number": lambda w: w.arrays.__setitem__(0, 4.0),
    "an array in a list becomes a Variable": lambda w: w.arrays.__setitem__(0, ab.Param(1.0)),
    "a text beside arrays": lambda w: w.arrays.__setitem__(2, "other"),
    "arrays in a list change places": lambda w: w.arrays.reverse(),
    "an array is appended": lambda w: w.arrays.append(jnp.ones(2)),
    # dicts
    "an item is set": lambda w: w.table.__setitem__("c", 1),
    "an item is replaced": lambda w: w.table.__setitem__("n", 2),
    "an item is replaced by an equal one": lambda w: w.table.__setitem__("n", True),
    "an item is deleted": lambda w: w.table.__delitem__("n"),
    "popitem": lambda w: w.table.popitem(),
    "update": lambda w: w.table.update(n=3, m=4),
    "setdefault": lambda w: w.table.setdefault("d", Layer()),
    "a key is renamed": lambda w: w.table.__setitem__("z", w.table.pop(7)),
    "a key becomes an equal one": lambda w: (w.table.pop(7), w.table.__setitem__(7.0, "seven")),
    "the order of a dict": lambda w: w.table.__setitem__("a", w.table.pop("a")),
    "move_to_end": lambda w: w.ordered.move_to_end("u"),
    "a missing key is read": lambda w: w.default["new"],
    "a default factory": lambda w: setattr(w.default, "default_factory", dict),
    "a counter": lambda w: w.counts.update("k"),
    "an array in a dict": lambda w: w.named_arrays.__setitem__("p", jnp.full(2, 6.0)),
    "an array in a dict becomes text": lambda w: w.named_arrays.__setitem__("p", "text"),
    # other containers
    "append to a deque": lambda w: w.queue.append(3),
    "rotate": lambda w: w.queue.rotate(1),
    "another deque": lambda w: setattr(w, "queue", type(w.queue)(w.queue, maxlen=5)),
    "add to a set": lambda w: w.tags.add("z"),
    "a set of equal size": lambda w: (w.tags.remove("x"), w.tags.add("z")),
    # other objects
    "a field of a dataclass": lambda w: setattr(w.point, "y", 2),
    "a Variable of a dataclass": lambda w: setattr(w.point, "x", ab.Param(jnp.zeros(2))),
    "a field is deleted": lambda w: delattr(w.point, "y"),
    "a field is added": lambda w: setattr(w.point, "z", Layer()),
    "the attributes are replaced": lambda w: setattr(w.point, "__dict__", {"x": 1, "y": 2}),
    "the class of a dataclass": lambda w: setattr(w.point, "__class__", OtherPoint),
    "an array of a dataclass": lambda w: setattr(w.holding, "x", jnp.full(2, 7.0)),
    "an array of a dataclass becomes a number": lambda w: setattr(w.holding, "x", 7.0),
    "a slot": lambda w: setattr(w.slotted, "b", 3),
    "a registered static object": lambda w: setattr(w.config, "rate", 2),
}


class TestGuard:
    def test_a_call_on_an_unchanged_world_is_not_walked(self, walks):
        world, jitted = World(), transforms.jit(look)
        assert walks.of(jitted, world) == 1
        assert walks.of(jitted, world) == 0
        assert same(jitted(world), look(world))

    @pytest.mark.parametrize("door", DOORS)
    def test_a_change_is_seen_at_the_very_next_call(self, door, walks):
        world, jitted = World(), transforms.jit(look)
        jitted(world)
        assert walks.of(jitted, world) == 0
        DOORS[door](world)
        for _ in range(2):
            assert same(jitted(world), look(world))
        Layer().extra = 1  # somebody else's write
        assert same(jitted(world), look(world))

    @pytest.mark.parametrize("door", DOORS)
    def test_a_change_that_nobody_reports_directly_is_seen_among_other_writes(self, door):
        world, jitted = World(), transforms.jit(look)
        jitted(world)
        jitted(world)
        Layer().extra = 1
        DOORS[door](world)
        Layer().extra = 1
        assert same(jitted(world), look(world))

    def test_arrays_of_a_state_that_are_written_are_no_structural_write(self, walks):
        world, jitted = World(), transforms.jit(look)
        for i in range(6):
            ab.update(world, {"array": world.array + 1, "point": {"x": jnp.full(2, i)}})
            walked = walks.of(jitted, world)
            assert same(jitted(world), look(world)), i
        assert walked == 0

    def test_a_write_to_another_module_does_not_walk(self, walks):
        """C34."""
        world, other, jitted = World(), Layer(), transforms.jit(look)
        jitted(world)
        for i in range(3):
            other.extra = i
            assert walks.of(jitted, world) == 0
            other.w.set_metadata(tag=i)
            assert walks.of(jitted, world) == 0

    def test_a_toggle_after_1_000_calls_is_seen(self, walks):
        """C17."""
        world = World()
        jitted = transforms.jit(lambda w: w.layers[0].w.value * 2 if w.training else w.array)
        jitted(world)
        assert sum(walks.of(jitted, world) for _ in range(1000)) == 0
        world.training = False
        assert jitted(world) is world.array
        world.training = True
        assert jitted(world).tolist() == [6.0, 6.0]
        world.layers[0].w = ab.Param(jnp.ones(2))
        assert jitted(world).tolist() == [2.0, 2.0]

    def test_arrays_are_read_by_name_whatever_the_order_in_memory(self, walks):
        def read(points):
            return [(p.x, p.y) for p in points]

        forwards, backwards = Holding(), Holding()  # a class lays its attributes out once
        forwards.x, forwards.y = jnp.array(1.0), jnp.array(2.0)
        backwards.y, backwards.x = jnp.array(3.0), jnp.array(4.0)
        world, jitted = World(), transforms.jit(lambda w: read(w.points))
        world.points = [forwards, backwards]
        jitted(world)
        for i in range(30):
            setattr(backwards, f"name{i}", None)  # until the dictionary has a layout of its own
            delattr(backwards, f"name{i}")
            assert jitted(world) == [(1.0, 2.0), (4.0, 3.0)]
        assert walks.of(jitted, world) == 0
        x = vars(backwards).pop("x")
        vars(backwards)["x"] = x
        assert jitted(world) == [(1.0, 2.0), (4.0, 3.0)]

    def test_the_order_of_an_ordered_dict_is_seen(self):
        world, jitted = World(), transforms.jit(lambda w: [*w.ordered.values()])
        world.ordered = OrderedDict(a=jnp.array(1.0), b=jnp.array(2.0))
        jitted(world)
        world.ordered.move_to_end("a")
        assert jitted(world) == [2.0, 1.0]
        world.ordered["a"] = world.ordered.pop("a")
        assert jitted(world) == [2.0, 1.0]

    def test_a_module_that_two_models_share_is_seen_by_both(self):
        """C36."""
        shared = Layer()
        a, b = World(), World()
        a.optional = b.optional = shared
        grow = transforms.jit(lambda w: setattr(w.optional, "extra", ab.Param(jnp.ones(2))))
        jitted = transforms.jit(look)
        jitted(b)
        jitted(b)
        grow(a)
        assert same(jitted(b), look(b))


@ab.node
class Holding:
    """Attributes in any order."""


def step(world: World, x: Any) -> Any:
    world.count.value = world.count + 1
    world.first.w.value = world.first.w + x
    return world.first.w.value.sum()


class TestWrites:
    def test_values_are_written_without_a_walk(self, walks):
        world, jitted = World(), transforms.jit(step)
        w, mean = world.first.w, world.first.mean.value
        jitted(world, 1.0)
        for i in range(2, 5):
            assert walks.of(jitted, world, 1.0) == 0
            assert int(world.count) == i
            assert world.first.w is w
            assert w.value.tolist() == [3.0 + i] * 2
        assert world.first.mean.value is mean

    def test_arrays_in_other_places_are_written_without_a_walk(self, walks):
        def write(w, d):
            w.array = w.array + 1
            w.arrays[1] = w.arrays[1] + 2
            w.named_arrays["p"] = w.array[:2]
            w.holding.x = w.holding.x * 3
            d["x"] += 1
            d["v"].value = d["v"] + 1

        world, jitted = World(), transforms.jit(write)
        d = {"x": jnp.zeros(()), "v": ab.Param(jnp.zeros(()))}
        jitted(world, d)
        assert walks.of(jitted, world, d) == 0
        assert world.array.tolist() == [3.0] * 3
        assert world.arrays[1].tolist() == [4.0] * 2
        assert world.named_arrays["p"].tolist() == [3.0] * 2
        assert world.holding.x.tolist() == [9.0] * 2
        assert float(d["x"]) == float(d["v"]) == 2.0

    def test_arrays_in_slots_are_written(self):
        def write(w):
            w.slotted.b = w.slotted.b + 1

        world, jitted = World(), transforms.jit(write)
        world.slotted.b = jnp.zeros(2)
        for i in range(1, 4):
            jitted(world)
            assert world.slotted.b.tolist() == [float(i)] * 2

    def test_arrays_that_change_places_are_the_same_arrays(self, walks):
        def swap(w):
            w.array, w.named_arrays["p"] = w.named_arrays["p"], w.array

        world, jitted = World(), transforms.jit(swap)
        world.array = jnp.zeros(2)
        a, b = world.array, world.named_arrays["p"]
        jitted(world)
        assert world.array is b
        assert walks.of(jitted, world) == 0
        assert world.array is a
        assert world.named_arrays["p"] is b

    def test_what_is_returned_is_the_callers_own(self, walks):
        def f(world, items):
            return {"world": world, "layers": world.layers, "new": [world.first.w], "items": items}

        world, items, jitted = World(), [jnp.ones(2)], transforms.jit(f)
        jitted(world, items)
        assert walks.of(jitted, world, items) == 0
        other = [jnp.zeros(2)]
        found = jitted(world, other)
        assert found["world"] is world
        assert found["layers"] is world.layers
        assert found["new"][0] is world.first.w
        assert found["items"] is other

    def test_structural_writes_are_played_in_full(self):
        def grow(world):
            world.layers.append(Layer())
            world.rate += 1.0
            return len(world.layers)

        world, jitted = World(), transforms.jit(grow)
        assert [jitted(world) for _ in range(3)] == [3, 4, 5]
        assert world.rate == 3.0
        assert len(world.layers) == 5

    def test_shapes_may_alternate(self, walks):
        world = World()
        jitted = transforms.jit(lambda w, x: setattr(w.count, "value", w.count + x.size))
        xs = [jnp.ones(2), jnp.ones(3)]
        for x in xs:
            jitted(world, x)
        assert sum(walks.of(jitted, world, x) for x in xs * 3) == 0
        assert int(world.count) == 20

    def test_a_new_shape_is_traced_without_a_call_in_vain(self, walks):
        """JAX takes its slow path for a signature whose first trace has raised."""
        world, jitted = World(), transforms.jit(step)
        jitted(world, 1.0)
        assert walks.of(jitted, world, jnp.ones(2)) == 0
        assert walks.of(jitted, world, 1) == 0
        assert int(world.count) == 3
        assert world.first.w.value.tolist() == [6.0, 6.0]

    def test_a_write_that_depends_on_the_shape_is_never_lost(self):
        def f(w, x):
            w.count.value = w.count + 1
            if x.size > 2:
                w.layers.append(x.size)

        world, jitted = World(), transforms.jit(f)
        for size in (2, 3, 2, 3, 2, 2):
            jitted(world, jnp.ones(size))
        assert world.layers[2:] == [3, 3]
        assert int(world.count) == 6

    def test_nothing_is_written_if_the_call_raises(self, walks):
        """C34."""
        world, jitted = World(), transforms.jit(step)
        jitted(world, 1.0)
        jitted(world, 1.0)
        before = look(world)
        with pytest.raises(TypeError):
            jitted(world, jnp.ones(7))
        with pytest.raises(TypeError):
            jitted(world, np.array(["text"], dtype=object))
        assert same(look(world), before)
        assert walks.of(jitted, world, 1.0) == 0

    def test_a_failure_is_that_of_the_walk(self):
        world, jitted = World(), transforms.jit(step)
        jitted(world, 1.0)
        world.first.w.value = "text"
        with pytest.raises(ab.errors.NodeTypeError, match=r"layers\[0\]\.w"):
            jitted(world, 1.0)
        world.first.w.value = jnp.zeros(2)
        assert float(jitted(world, 1.0)) == 2.0

    def test_a_place_that_somebody_else_has_written_is_an_error(self):
        world = World()
        meddle: list[Callable[[], None]] = []

        def call_back(x):
            for action in meddle:
                action()
            return x

        @transforms.jit
        def slow(w):
            w.count.value = jax.pure_callback(call_back, w.count.value, w.count.value) + 1
            w.array = w.array + w.count
            return w.count.value

        for _ in range(2):
            jax.block_until_ready(slow(world))
        plan = next(iter(slow._plans))
        call = plan.function
        for action in (
            lambda: setattr(world.count, "value", jnp.array(70)),
            lambda: setattr(world, "array", jnp.zeros(3)),
        ):
            plan.function = lambda *leaves, action=action: (call(*leaves), action())[0]
            for follower in slow._followers.values():
                follower.__globals__["function"] = plan.function
            array = world.array
            with pytest.raises(ab.errors.ConcurrentWriteError, match=r"World|count"):
                slow(world)
            assert world.array is array or world.array.tolist() == [0.0] * 3
        assert int(world.count) == 70


class TestCalls:
    def test_two_models_called_alternately_have_a_plan_each(self, walks):
        """C32."""
        traces: list[None] = []

        @transforms.jit
        def train(model, state, x):
            traces.append(None)
            model.first.w.value = model.first.w + x
            state["m"].value = state["m"] + model.first.w

        models = [World(), World()]
        models[1].config = models[0].config  # an opaque static is equal to itself only
        states = [{"m": ab.Variable(jnp.zeros(2))} for _ in models]
        for model, state in zip(models, states, strict=True):
            train(model, state, 1.0)
        for _ in range(3):
            for i, (model, state) in enumerate(zip(models, states, strict=True)):
                assert walks.of(train, model, state, 1.0 + i) == 0
        assert len(traces) == 1
        assert models[0].first.w.value.tolist() == [7.0, 7.0]
        assert models[1].first.w.value.tolist() == [10.0, 10.0]
        assert states[0]["m"].value.tolist() == [4.0 + 5 + 6 + 7] * 2
        assert states[1]["m"].value.tolist() == [4.0 + 6 + 8 + 10] * 2

    def test_models_may_be_exchanged_between_arguments(self, walks):
        @transforms.jit
        def copy(a, b):
            a.first.w.value = b.first.w.value

        one, two = World(), World()
        two.first.w.value = jnp.zeros(2)
        copy(one, two)
        assert one.first.w.value is two.first.w.value
        copy(two, one)
        two.first.w.value = jnp.ones(2)
        assert walks.of(copy, one, two) == 0
        assert one.first.w.value is two.first.w.value
        copy(one, one)

    def test_an_argument_that_hangs_on_another_one(self):
        @transforms.jit
        def f(world, layer, items):
            layer.w.value = layer.w + 1
            items.append(layer)
            return world.first is layer, items is world.layers

        world = World()
        assert f(world, world.first, []) == (True, False)
        assert f(world, world.first, []) == (True, False)
        assert f(world, world.layers[1], []) == (False, False)
        assert f(world, world.first, world.layers) == (True, True)
        assert f(world, world.first, []) == (True, False)

    def test_a_list_is_told_from_the_one_that_a_model_holds(self, walks):
        f = transforms.jit(lambda world, items: items is world.arrays)
        world = World()
        free = [jnp.ones(2), jnp.zeros(2), "text"]
        assert f(world, free) is False
        assert walks.of(f, world, list(free)) == 0
        assert f(world, world.arrays) is True
        assert f(world, free) is False
        same_twice = transforms.jit(lambda a, b: a is b)
        assert [same_twice(free, free), same_twice(free, list(free))] == [True, False]
        v, w = ab.Param(1.0), ab.Param(2.0)
        assert [same_twice(v, v), same_twice(v, w), same_twice(w, w)] == [True, False, True]

    def test_arguments_of_every_form(self, walks):
        def plain(a, batch, n, *rest, key=None, mode="x", **more):
            a.count.value = a.count + n
            return look(batch, rest, key, sorted(more.items())), n, mode

        make = functools.partial(transforms.jit, static_argnums=2, static_argnames="mode")
        f = make(plain)

        def arguments(i):
            batch = {"x": jnp.full(2, i), "deep": {"layer": layer, "t": (i, Frozen(2))}}
            return (world, batch, 3, 1.0 * i, [i, "s"]), {"key": i, "mode": "y", "extra": None}

        world, layer = World(), Layer()
        args, kwargs = arguments(1)
        f(*args, **kwargs)
        for i in range(2, 5):
            args, kwargs = arguments(i)
            before = walks.count
            seen, n, mode = f(*args, **kwargs)
            assert walks.count == before
            assert (n, mode) == (3, "y")
            assert same(seen, make(plain)(*args, **kwargs)[0])
        assert int(world.count) == 3 * 7
        kwargs["mode"] = "z"
        assert f(*args, **kwargs)[2] == "z"
        assert f(args[0], args[1], 4, *args[3:], **kwargs)[1] == 4
        assert f(args[0], args[1], True, *args[3:], **kwargs)[1] is True

    def test_methods_callable_modules_and_partials(self, walks):
        class Model(Layer):
            @transforms.jit
            def step(self, x):
                self.w.value = self.w + x

            def plain(self, x):
                self.w.value = self.w + x

            def __call__(self, x):
                self.w.value = self.w + x

        model = Model()
        calls = [
            model.step,
            transforms.jit(model.plain),
            transforms.jit(model),
            transforms.jit(functools.partial(Model.plain, model)),
        ]
        for call in calls:
            call(1.0)
            assert walks.of(call, 1.0) == 0
        assert model.w.value.tolist() == [3.0 + 8.0] * 2
        model.extra = 1
        assert walks.of(calls[1], 1.0) == 1

    def test_400_static_variants_are_found_without_a_walk(self, walks):
        f = transforms.jit(lambda m, n: m.w.value, static_argnums=1)
        layer = Layer()
        for n in range(400):
            f(layer, n)
        assert sum(walks.of(f, layer, n) for n in range(400)) == 0

    def test_a_call_inside_another_trace_is_an_ordinary_one(self):
        world, jitted = World(), transforms.jit(step)
        jitted(world, 1.0)
        jitted(world, 1.0)
        with pytest.raises(ab.errors.CapturedWriteError):
            jax.jit(lambda x: jitted(world, x))(1.0)
        assert int(world.count) == 2
        outer = transforms.jit(jitted)
        outer(world, 1.0)
        assert int(world.count) == 3
        with jax.disable_jit():
            jitted(world, 1.0)
        assert int(world.count) == 4
        with pytest.raises(ab.errors.CapturedWriteError):
            jax.jit(lambda: jitted(world, 1.0))()
        assert int(world.count) == 4

    def test_clear_cache_drops_plans(self, walks):
        world, jitted = World(), transforms.jit(step)
        jitted(world, 1.0)
        jitted.clear_cache()
        assert walks.of(jitted, world, 1.0) == 1

    def test_many_threads_may_call_one_function(self):
        world, jitted = World(), transforms.jit(lambda w, x: w.first.w.value.sum() * x)
        wrong: list[Any] = []

        def work(i):
            for k in range(100):
                if float(jitted(world, float(k))) != 6.0 * k:
                    wrong.append((i, k))
                if i == 0:
                    Layer().extra = k

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_points_are_read_structurally(walks):
    f = transforms.jit(lambda p: p.x.w.value * p.y)
    layer = Layer()
    p = Point(layer, 2)
    f(p)
    assert walks.of(f, Point(layer, 2)) == 0
    assert f(Point(layer, 3)).tolist() == [9.0, 9.0]
    assert f(Point(Layer(), 2)).tolist() == [6.0, 6.0]


class Mutable(ab.Module):
    def __init__(self) -> None:
        self.ref = jax.new_ref(jnp.zeros(2))
        self.v = ab.Variable(jax.new_ref(jnp.ones(2)))
        self.refs = [jax.new_ref(jnp.full(2, 2.0)), {"a": jax.new_ref(jnp.full(2, 3.0))}]
        self.count = ab.Variable(jnp.zeros((), int))


def add_to_refs(m: Mutable) -> Any:
    for i, ref in enumerate((m.ref, m.v.value, m.refs[0], m.refs[1]["a"])):
        ref[...] = ref[...] + 10**i
    m.count.value += 1
    return m.ref[...] + m.v.value[...] + m.refs[0][...] + m.refs[1]["a"][...]


REF_DOORS: dict[str, Callable[[Mutable], Any]] = {
    "a write": lambda m: m.ref.__setitem__(..., jnp.full(2, 5.0)),
    "an attribute": lambda m: setattr(m, "ref", jax.new_ref(jnp.full(2, 6.0))),
    "an alias": lambda m: setattr(m, "ref", m.refs[0]),
    "a value": lambda m: setattr(m.v, "value", jax.new_ref(jnp.full(2, 7.0))),
    "an element": lambda m: m.refs.__setitem__(0, jax.new_ref(jnp.full(2, 8.0))),
    "an item": lambda m: m.refs[1].update(a=jax.new_ref(jnp.full(2, 9.0))),
}


@pytest.mark.parametrize("door", REF_DOORS)
def test_calls_on_references_to_mutable_arrays_are_planned(walks, door):
    f = transforms.jit(add_to_refs)
    ours, plain = Mutable(), Mutable()
    for _ in range(4):
        np.testing.assert_array_equal(f(ours), add_to_refs(plain))
    assert walks.of(f, ours) == 0
    add_to_refs(plain)
    for _ in range(3):
        REF_DOORS[door](ours)
        REF_DOORS[door](plain)
        np.testing.assert_array_equal(f(ours), add_to_refs(plain))
    assert int(ours.count) == int(plain.count)


class Toggled(ab.Module):
    def __init__(self) -> None:
        self.by = (1,)  # no switch: what is known of one waits
        self.count = ab.Variable(jnp.array(0))


def add_one_or_two(model: Toggled) -> None:
    model.count.value = model.count.value + model.by[0]


@pytest.fixture
def planned(monkeypatch):
    """The calls of which a plan was made."""
    made: list[int] = []
    make = _plans.make_plan

    def noted(*args: Any) -> Any:
        made.append(1)
        return make(*args)

    monkeypatch.setattr(_plans, "make_plan", noted)
    return made


class TestPlansInVain:
    """A plan takes longer than a walk: where none is followed, few are made."""

    def test_the_structure_changes_before_every_call(self, planned, walks):
        jitted, model, expected = transforms.jit(add_one_or_two), Toggled(), 0
        for _ in range(300):
            model.by = (3 - model.by[0],)
            jitted(model)
            expected += model.by[0]
            assert int(model.count.value) == expected
        assert len(planned) <= 10
        for _ in range(70):  # it stays the same from now on
            jitted(model)
        before = walks.count
        jitted(model)
        assert walks.count == before
        assert int(model.count.value) == expected + 71 * model.by[0]

    def test_what_is_followed_once_between_two_changes_is_planned_each_time(self, planned):
        jitted, model = transforms.jit(add_one_or_two), Toggled()
        for _ in range(10):
            model.by = (3 - model.by[0],)
            jitted(model), jitted(model)
        assert len(planned) == 10

    def test_models_that_are_called_once(self, planned):
        jitted = transforms.jit(add_one_or_two)
        for _ in range(300):
            model = Toggled()
            jitted(model)
            assert int(model.count.value) == 1
            del model
        assert len(planned) <= 10

    def test_models_that_live_are_planned_all(self, planned):
        jitted, models = transforms.jit(add_one_or_two), [Toggled() for _ in range(30)]
        for model in models:
            jitted(model)
        assert len(planned) == 30
