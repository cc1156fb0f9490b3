"""A planned call remembers what Variables hold, and whoever writes one makes it forget."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.graph._classify import rule_of as kind_of
from anabranch.graph._turn import FREE, in_turn
from tests.transforms.interrupting import Interrupting, InterruptingAtLines

# an interrupt in a callback of the garbage collector is reported, and lost
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CALLS = 8  # after so many, a plan has a follower


class Model(ab.Module):
    def __init__(self, count: int = 6) -> None:
        self.layers = [ab.Param(jnp.full(2, float(i))) for i in range(count)]
        self.mean = ab.BatchStat(jnp.zeros(2))
        self.steps = ab.Variable(jnp.array(0))


def total(model: Model) -> Any:
    return sum(layer.value for layer in model.layers) + model.mean.value + model.steps.value


def count(model: Model) -> Any:
    model.steps.value += 1
    return total(model)


def train(model: Model) -> Any:
    for layer in model.layers:
        layer.value = layer.value * 0.5 + 1
    model.mean.value = model.mean.value + model.layers[0].value
    model.steps.value += 1
    return total(model)


def write_pair(first: ab.Variable, second: ab.Variable) -> None:
    first.value, second.value = second.value, first.value


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"total": total, "count": count, "train": train}
WRITE = ab.jit(lambda v, x: setattr(v, "value", x))
COUNT, TRAIN, PAIR = ab.jit(count), ab.jit(train), ab.jit(write_pair)


def count_once(_: Any, model: Model) -> Model:
    count(model)
    return model


def fail(model: Model) -> None:
    model.layers[0].value = jnp.ones(2)
    raise KeyError("after a write")


def failing(model: Model) -> None:
    with pytest.raises(KeyError):
        ab.jit(fail)(model)


def write_through_a_closure(model: Model) -> None:
    ab.jit(lambda: setattr(model.mean, "value", model.mean.value - 1))()


DOORS: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda m: None,
    "value": lambda m: setattr(m.layers[2], "value", jnp.full(2, 7.0)),
    "a NumPy array": lambda m: setattr(m.layers[2], "value", np.full(2, 7.0, np.float32)),
    "whole index": lambda m: m.layers[2].__setitem__(..., jnp.full(2, 8.0)),
    "part": lambda m: m.layers[2].__setitem__(0, 9.0),
    "initialised again": lambda m: m.mean.__init__(jnp.full(2, 4.0)),
    "in place": lambda m: m.layers[0].__iadd__(1.0),
    "update": lambda m: ab.update(m, jax.tree.map(lambda x: x + 1, ab.state(m, ab.Param))),
    "eager": train,
    "count": COUNT,
    "train": TRAIN,
    "another compiled function": ab.jit(train),
    "a Variable as argument": lambda m: WRITE(m.layers[1], jnp.full(2, 5.0)),
    "two Variables as arguments": lambda m: PAIR(m.layers[1], m.mean),
    "a closure": write_through_a_closure,
    "a loop": lambda m: ab.fori_loop(0, 3, count_once, m),
    "vmap": lambda m: ab.vmap(lambda m, x: x + 1, in_axes=(None, 0))(m, jnp.arange(2.0)),
    "grad": ab.grad(lambda m: (count(m) ** 2).sum()),
    "failing": failing,
    "replaced": lambda m: m.layers.__setitem__(0, ab.Param(jnp.full(2, 3.0))),
    "twice": lambda m: (COUNT(m), setattr(m.mean, "value", jnp.ones(2)), TRAIN(m)),
}


def check_what_is_remembered(model: Model) -> None:
    for segment in kind_of(model).kept_plans(model).values():
        memory = segment.memory
        assert memory.values is None or list(map(id, memory.values)) == [
            id(variable._value) for variable in segment.variables
        ]


def warm(compiled: Any, function: Any, ours: Model, plain: Model) -> None:
    for _ in range(CALLS):
        np.testing.assert_array_equal(compiled(ours), function(plain))
        WRITE(ab.Param(jnp.zeros(2)), jnp.ones(2))
        PAIR(ab.Param(jnp.zeros(2)), ab.BatchStat(jnp.zeros(2)))
        check_what_is_remembered(ours)


def values(model: Model) -> list[Any]:
    return [np.asarray(v.value).tolist() for v in (*model.layers, model.mean, model.steps)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_that_is_written_between_calls_is_read_by_the_next_one(name, door):
    function = FUNCTIONS[name]
    compiled = ab.jit(function)
    ours, plain = Model(), Model()
    warm(compiled, function, ours, plain)
    for _ in range(3):
        DOORS[door](ours)
        DOORS[door](plain)
        for _ in range(2):
            np.testing.assert_allclose(compiled(ours), function(plain), rtol=1e-6)
            check_what_is_remembered(ours)
            np.testing.assert_allclose(
                np.concatenate([np.ravel(v) for v in values(ours)]),
                np.concatenate([np.ravel(v) for v in values(plain)]),
                rtol=1e-6,
            )


@pytest.mark.parametrize("door", ["value", "part", "update", "eager", "count", "train"])
def test_what_was_written_is_not_kept_alive(door):
    evaluate = ab.jit(total)
    model = Model()
    TRAIN(model)  # so that nothing else holds the arrays
    for _ in range(CALLS):
        evaluate(model), COUNT(model)
    evaluate(model)
    held = [model.layers[2], model.steps]
    arrays = [weakref.ref(v.value) for v in held]
    DOORS[door](model)
    gc.collect()
    for variable, array in zip(held, arrays, strict=True):
        assert array() is None or array() is variable.value


def test_a_model_that_is_dropped_takes_what_is_remembered_along():
    evaluate = ab.jit(total)
    model = Model()
    TRAIN(model)
    for _ in range(CALLS):
        evaluate(model)
    array = weakref.ref(model.mean.value)
    gc.disable()
    try:
        del model
        assert array() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("watched", [False, True])
def test_an_interrupt_anywhere_in_a_write_leaves_what_the_variable_holds(watched):
    evaluate = ab.jit(total)
    for place in range(100):
        model = Model()
        for _ in range(CALLS if watched else 0):
            evaluate(model)
        if not is_interrupted(place, lambda m=model: setattr(m.mean, "value", jnp.ones(2))):
            break
        np.testing.assert_array_equal(evaluate(model), total(model))
    assert 3 <= place < 99


@pytest.mark.parametrize("interrupting", [Interrupting, InterruptingAtLines])
@pytest.mark.parametrize(
    ("name", "of_thread"), [("count", False), ("count", True), ("train", False)]
)
def test_an_interrupt_anywhere_in_a_planned_call_leaves_what_the_variables_hold(
    name, of_thread, interrupting
):
    evaluate, step = ab.jit(total), ab.jit(FUNCTIONS[name])
    model = Model()
    for _ in range(CALLS):
        evaluate(model), step(model)
    call = in_turn(step) if of_thread else step  # few are else written in one line
    for place in range(200):
        interrupted = is_interrupted(place, lambda: call(model), interrupting)
        before = values(model)
        np.testing.assert_array_equal(evaluate(model), total(model))
        plain = Model()
        for v, x in zip((*plain.layers, plain.mean, plain.steps), before, strict=True):
            v.value = jnp.array(x, v.value.dtype)
        np.testing.assert_allclose(step(model), FUNCTIONS[name](plain), rtol=1e-6)
        if not interrupted:
            break
    assert (4 if of_thread or name == "train" else 2) <= place < 199
    assert FREE == [None]


def is_interrupted(place: int, call: Callable[[], Any], make: Any = Interrupting) -> bool:
    """Make a call that is interrupted at a place; tell whether there was such a place."""
    interrupting = make(place)
    with interrupting:
        try:
            call()
        except KeyboardInterrupt:
            return True
    return interrupting.raised


def test_threads_that_write_and_call_see_every_write_that_was_finished():
    evaluate = ab.jit(lambda m: m.mean.value[0] + m.steps.value)
    model = Model()
    for _ in range(CALLS):
        evaluate(model)
    done: list[int] = []
    wrong: list[Any] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            least = done[-1] if done else 0
            seen = int(evaluate(model))
            if seen < least:
                wrong.append((seen, least))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=read) for _ in range(3)]
    try:
        for thread in readers:
            thread.start()
        for i in range(1, 400):
            if i % 3:
                model.steps.value = jnp.array(i)
            else:
                WRITE(model.steps, jnp.array(i))
            done.append(i)
    finally:
        stop.set()
        for thread in readers:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert int(evaluate(model)) == 399


class Holder(ab.Module):
    def __init__(self, shared: ab.Variable) -> None:
        self.shared, self.own = shared, ab.Variable(jnp.zeros((), int))


def add(holder: Holder) -> Any:
    holder.shared.value += 1
    holder.own.value += 2
    return holder.shared.value + holder.own.value


@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_a_variable_that_many_models_share_is_read_afresh_by_all(count):
    shared = ab.Variable(jnp.zeros((), int))
    holders = [Holder(shared) for _ in range(count)]
    compiled = ab.jit(add)
    for number in range(1, 6):
        for i, holder in enumerate(holders):
            done = (number - 1) * count + i + 1
            assert int(compiled(holder)) == done + 2 * number
            for known in holders:
                check_what_is_remembered(known)
    assert int(shared.value) == 5 * count
