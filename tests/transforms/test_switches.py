"""Attributes that go back and forth: what was planned for a mode is followed again in that mode."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.graph._turn import FREE, HAS_LOCK
from tests.transforms.interrupting import Interrupting, interrupted_by_a_signal
from tests.transforms.plan_worlds import Walks

pytestmark = [
    pytest.mark.skipif(not HAS_LOCK, reason="what is out of date stays so"),
    # an interrupt in a callback of the garbage collector is reported, and lost
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CALLS = 4


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(2))
        self.training = True


class Model(ab.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.last = Layer()
        self.training: Any = True
        self.mode: Any = "a"
        self.times: Any = 3
        self.anything: Any = None
        self.steps = ab.Variable(jnp.array(0))

    def all(self) -> list[Any]:
        return [self, *self.layers, self.last]


def train(model: Model) -> Any:
    """Write what depends on all switches."""
    code = sum(2**i for i, m in enumerate(model.all()) if m.training)
    kinds = {bool: 1, int: 2, str: 3, type(None): 4}
    code += 100 * model.times + sum(map(ord, model.mode))
    code += 1000 * kinds.get(type(model.training), 0) + 10_000 * kinds.get(type(model.anything), 0)
    model.steps.value = model.steps.value + code % 9973
    return model.steps.value * 2


def evaluate(model: Model) -> Any:
    return train(ab.clone(model))


def switch(model: Model, value: bool) -> None:
    for module in model.all():
        module.training = value


@pytest.fixture
def walks(monkeypatch):
    return Walks(monkeypatch)


def both(functions: tuple[Any, Any], model: Model) -> list[int]:
    found: list[int] = []
    for function, value in zip(functions, (True, False), strict=True):
        switch(model, value)
        found.append(int(function(model)))
    return found


@pytest.mark.parametrize("one", [False, True])
def test_what_was_planned_is_followed_again(one, walks):
    functions = (train, train) if one else (train, evaluate)
    step = ab.jit(train)
    jitted = (step, step) if one else (step, ab.jit(evaluate))
    model, plain = Model(), Model()
    for _ in range(CALLS):
        assert both(jitted, model) == both(functions, plain)
    before = walks.count
    for _ in range(CALLS):
        assert both(jitted, model) == both(functions, plain)
    assert walks.count == before


def test_modes_of_one_function(walks):
    step, model, plain = ab.jit(train), Model(), Model()
    for _ in range(CALLS):
        for mode in "abcd":
            model.mode = plain.mode = mode
            assert int(step(model)) == int(train(plain))
    before = walks.count
    for mode in "dacbabcd":
        model.mode = plain.mode = mode
        assert int(step(model)) == int(train(plain))
    assert walks.count == before


OTHERS: dict[str, Callable[[Model], Any]] = {
    "of another type": lambda m: setattr(m, "training", 1),
    "one of many": lambda m: setattr(m.layers[1], "training", False),
    "deleted and set again": lambda m: (delattr(m, "mode"), setattr(m, "mode", "a")),
    "another attribute": lambda m: setattr(m, "new", 1),
    "no switch any more": lambda m: setattr(m, "anything", (1, 2)),
    "a module in its place": lambda m: setattr(m, "anything", Layer()),
    "a module replaced": lambda m: setattr(m, "last", Layer()),
    "an element replaced": lambda m: m.layers.__setitem__(0, Layer()),
    "a Variable replaced": lambda m: setattr(m, "steps", ab.Variable(jnp.array(7))),
    "metadata": lambda m: m.steps.set_metadata(a=1),
    "by a compiled function": ab.jit(lambda m: setattr(m, "times", 4)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_write_between_switches(other):
    step, model, plain = ab.jit(train), Model(), Model()
    for _ in range(CALLS):
        both((step, step), model), both((train, train), plain)
    for each in (model, plain):
        switch(each, True)
        each.mode = "b"
        OTHERS[other](each)
        each.mode = "a"
    for _ in range(CALLS):
        assert int(step(model)) == int(train(plain))
    assert ab.graphdef(model) == ab.graphdef(plain)
    assert both((step, step), model) == both((train, train), plain)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("seed", range(4))
def test_random_switches(seed):
    """A walk of switches of several Modules, and now and then another write."""
    choose = random.Random(seed)
    step, view, model, plain = ab.jit(train), ab.jit(evaluate), Model(), Model()
    values = {"training": [True, False], "mode": ["a", "b"], "anything": [None, True, 1, (1,)]}
    for _ in range(120):
        for _ in range(choose.randrange(4)):
            if choose.random() < 0.03:
                name = choose.choice([*OTHERS])
                OTHERS[name](model), OTHERS[name](plain)
                continue
            name = choose.choice([*values])
            at = choose.choice([0, 3]) if name == "training" else 0
            value = choose.choice(values[name])
            setattr(model.all()[at], name, value), setattr(plain.all()[at], name, value)
        if choose.random() < 0.5:
            assert float(step(model)) == float(train(plain))
        else:
            assert float(view(model)) == float(evaluate(plain))
    assert FREE == [None]


def test_nothing_that_is_gone_is_kept():
    step, model = ab.jit(train), Model()
    for _ in range(CALLS):
        both((step, step), model)
    model.training = False
    last, layer = weakref.ref(model.last), weakref.ref(model.layers[0])
    gc.disable()
    try:
        model.last = Layer()
        assert last() is None
        model.layers[0] = Layer()
        step(model)
        assert layer() is None
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_setter_of_the_same_name():
    class Checked(Model):
        @property
        def training(self) -> bool:
            return self.on

        @training.setter
        def training(self, value: bool) -> None:
            self.on = value

    step, model, plain = ab.jit(train), Checked(), Checked()
    for _ in range(2 * CALLS):
        for value in (True, False):
            model.training = plain.training = value
            assert int(step(model)) == int(train(plain))


@pytest.mark.parametrize("value", [False, True])
def test_an_interrupt_anywhere_in_a_switch(value):
    step = ab.jit(train)
    for place in range(100):
        model, plain = Model(), Model()
        for _ in range(CALLS):
            both((step, step), model), both((train, train), plain)
        switch(model, True), switch(plain, True)
        model.times = plain.times = 4
        interrupting = Interrupting(place)
        with contextlib.suppress(KeyboardInterrupt), interrupting:
            model.times = 3 if value else 5
        plain.times = model.times
        for now in (4, 3, 5, 4, 3):
            assert int(step(model)) == int(train(plain))
            model.times = plain.times = now
        if not interrupting.raised:
            break
    assert 3 <= place < 99
    assert FREE == [None]


def test_real_interrupts():
    step, model, plain = ab.jit(train), Model(), Model()
    for _ in range(CALLS):
        both((step, step), model), both((train, train), plain)

    def work() -> None:
        for i in range(20_000):
            model.times = 3 + i % 2

    for i in range(30):
        interrupted_by_a_signal(work, 0.0002 * (i + 1))
        plain.times = model.times
        assert int(step(model)) == int(train(plain))
        model.times = plain.times = 3
        assert int(step(model)) == int(train(plain))
    assert FREE == [None]


def test_threads_that_switch_while_others_call():
    model = Model()
    view = ab.jit(lambda m: m.steps.value + 10 * m.times + (1 if m.training else 2))
    expected = {10 * times + mode for times in (3, 4) for mode in (1, 2)}
    done = threading.Event()
    wrong: list[Any] = []

    def turn(name: str, values: tuple[Any, Any]) -> None:
        for i in range(3_000):
            setattr(model, name, values[i % 2])
        setattr(model, name, values[0])

    def call() -> None:
        while not done.is_set():
            found = int(view(model))
            if found not in expected:
                wrong.append(found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        callers = [threading.Thread(target=call) for _ in range(2)]
        writers = [
            threading.Thread(target=turn, args=args)
            for args in (("times", (3, 4)), ("training", (True, False))) * 2
        ]
        for thread in (*callers, *writers):
            thread.start()
        for thread in writers:
            thread.join(60)
        done.set()
        for thread in callers:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    for times in (3, 4, 3):
        for training in (False, True):
            model.times, model.training = times, training
            np.testing.assert_array_equal(view(model), 10 * times + (1 if training else 2))
    assert FREE == [None]
