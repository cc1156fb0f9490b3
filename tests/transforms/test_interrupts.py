"""An interrupt may come while our own code runs: a call does all that it does, or nothing (R2)."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms
from tests.property.faults import left_open
from tests.transforms.interrupting import Interrupting, interrupted_by_a_signal

# an interrupt in a callback of the garbage collector is reported, and lost
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Model(ab.Module):
    def __init__(self) -> None:
        self.v = ab.Variable(jnp.array(0))
        self.array = jnp.array(0)
        self.n = 0


class Program:
    """A function that writes what it is passed, what it captures, and what nobody can see."""

    def __init__(self, *, grows: bool) -> None:
        self.passed, self.captured = Model(), Model()
        self.hidden = types.SimpleNamespace(v=ab.Variable(jnp.array(0)))
        captured, hidden = self.captured, self.hidden

        def step(model: Model) -> None:
            for each in (model, captured):
                each.v.value = each.v.value + 1
                each.array = each.array + 1
                if grows:
                    each.n += 1
                    setattr(each, f"new{each.n}", ab.Variable(each.v.value))
            hidden.v.value = hidden.v.value + 1

        self.step = step
        self.grows = grows

    def count(self) -> int:
        """Return how often the function has done all that it does; fail if that is no number."""
        counts = {int(self.hidden.v)}
        for model in (self.passed, self.captured):
            counts |= {int(model.v), int(model.array)}
            if self.grows:
                counts |= {model.n, sum(name.startswith("new") for name in vars(model))}
        (count,) = counts
        return count


def in_lanes(f: Any) -> Any:
    def lane(model: Model, _: Any) -> None:
        f(model)

    return lambda model: transforms.vmap(lane, in_axes=(None, 0))(model, jnp.arange(2))


def in_a_loop(f: Any) -> Any:
    def body(_: Any, model: Model) -> Model:
        f(model)
        return model

    return lambda model: transforms.fori_loop(0, 1, body, model)


CALLS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "jit": (transforms.jit, True),
    "vmap": (in_lanes, True),
    "fori_loop": (in_a_loop, False),
    "cond": (lambda f: lambda model: transforms.cond(True, f, f, model), True),
    "lift": (transforms.lift(jax.named_call), True),
    "remat": (transforms.remat, True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
def test_an_interrupted_call_does_all_or_nothing(name, warm):
    wrap, grows = CALLS[name]
    program = Program(grows=grows and not warm)
    call = wrap(program.step)
    if warm:
        call(program.passed)
        call(program.passed)
    number, interrupts, last = 0, 0, program.count()
    while True:
        interrupting = Interrupting(number)
        try:
            with interrupting:
                call(program.passed)
        except KeyboardInterrupt:
            interrupts += 1
        assert left_open() == []
        assert program.count() in (last, last + 1)
        last = program.count()
        if not interrupting.raised:
            break
        number += 1 + number // 4  # the places grow apart
    assert interrupts > 10
    call(program.passed)
    assert program.count() == last + 1


def twice(f: Any) -> Any:
    """Return the jitted function, whose calls follow a plan to a new trace."""
    jitted = transforms.jit(f)
    jitted(jnp.zeros(3))
    return jitted


@pytest.mark.parametrize(
    ("wrap", "apart"),
    [(transforms.lift(jax.named_call), 1), (transforms.jit, 5), (twice, 23)],
    ids=["lift", "jit", "twice"],
)
def test_an_interrupt_at_many_places_of_a_small_call(wrap, apart):
    hidden = types.SimpleNamespace(v=ab.Variable(jnp.array(0)))

    def step(x: Any) -> None:
        hidden.v.value = jnp.max(x)

    number = 0
    while True:
        call = wrap(step)
        hidden.v.value = jnp.array(number)
        interrupting = Interrupting(number)
        try:
            with interrupting:
                call(number + 1)
        except KeyboardInterrupt:
            pass
        assert left_open() == []
        assert int(hidden.v) in (number, number + 1)
        if not interrupting.raised:
            break
        number += apart
    assert number > 100


def places_of(call: Callable[[], Any]) -> list[str]:
    """List the functions that are entered in a call."""
    seen: list[str] = []
    sys.setprofile(
        lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", ["spend", "check_opaques", "finish", "apply", "commit"])
def test_an_interrupt_at_the_end_of_a_run_leaves_nothing_open(name, monkeypatch):
    program = Program(grows=True)
    call = transforms.jit(program.step)
    places = places_of(lambda: transforms.jit(program.step)(program.passed))
    assert name in places

    def look(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(program.passed)
    finally:
        sys.setprofile(None)
    assert left_open() == []
    assert program.count() == 1
    call(program.passed)
    assert program.count() == 2


class Part(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(2), tag="a")
        self.k = 1


class OtherPart(Part):
    pass


def seen(part: Any) -> Any:
    """Return what shows every structural write."""
    statics = {k: v for k, v in vars(part).items() if isinstance(v, int)}
    variables = {k: repr(v.get_metadata()) for k, v in vars(part).items() if k not in statics}
    total = sum(v.value.sum() for k, v in vars(part).items() if k not in statics)
    return total, (type(part).__name__, repr(statics), repr(variables))


STRUCTURAL_WRITES: dict[str, Callable[[Any], Any]] = {
    "deleted": lambda m: delattr(m, "w"),
    "static": lambda m: setattr(m, "k", 5),
    "new": lambda m: setattr(m, "z", 5),
    "replaced": lambda m: setattr(m, "w", ab.Param(jnp.zeros(3))),
    "class": lambda m: setattr(m, "__class__", OtherPart),
    "metadata": lambda m: m.w.set_metadata(tag="b"),
    "initialised": lambda m: m.w.__init__(jnp.zeros(2), tag="c"),
    "popped": lambda m: ab.pop(m, ab.Param),
    "updated": lambda m: ab.update(m, ab.state(OtherPart())),
    "compiled": ab.jit(lambda m: setattr(m, "k", 7)),
}


@pytest.mark.parametrize("door", STRUCTURAL_WRITES)
def test_a_structural_write_that_is_interrupted_is_seen_by_planned_calls_if_it_was_made(door):
    compiled = ab.jit(seen)
    for place in (*range(60), *range(60, 2000, 23)):  # of later places, some
        part = Part()
        for _ in range(3):
            compiled(part)
        interrupting = Interrupting(place)
        with interrupting, contextlib.suppress(KeyboardInterrupt):
            STRUCTURAL_WRITES[door](part)
        for _ in range(2):
            assert str(compiled(part)) == str(seen(part)), place
        if not interrupting.raised:
            break
    assert place >= 2


class Several(ab.Module):
    def __init__(self) -> None:
        self.many = [ab.Variable(jnp.array(0)) for _ in range(6)]
        self.array, self.held = jnp.array(0), {"a": jnp.array(0)}

    def count(self) -> None:
        for v in self.many:
            v.value = v.value + 1
        self.array = self.array + 1
        self.held["a"] = self.held["a"] + 1

    def counts(self) -> set[int]:
        return {int(x) for x in (*[v.value for v in self.many], self.array, self.held["a"])}


def test_real_signals_tear_no_planned_call_and_no_turn_is_kept():
    """While another thread writes objects of its own."""
    model, other = Several(), Several()
    call, beside = transforms.jit(Several.count), transforms.jit(Several.count)
    for _ in range(10):
        call(model)
    done, calls = threading.Event(), [0]

    def write() -> None:
        while not done.is_set():
            beside(other)
            calls[0] += 1

    thread, chance, came = threading.Thread(target=write), random.Random(0), 0
    thread.start()
    try:
        for _ in range(1500):
            came += interrupted_by_a_signal(lambda: call(model), chance.uniform(1e-6, 3e-4))
            assert len(model.counts()) == 1
    finally:
        done.set()
        thread.join(60)
    assert came > 0
    assert other.counts() == {calls[0]}
    assert left_open() == []
