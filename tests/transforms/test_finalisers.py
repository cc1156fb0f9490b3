"""What a finaliser writes while a call ends is neither lost nor forgotten.

The garbage collector may come along wherever something is made, and run code of the user; handlers
of signals run where Python looks for them.
"""

from __future__ import annotations

import gc
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch as ab
from anabranch import contextvars_ext, transforms
from anabranch.contextvars_ext import _keystream_var
from anabranch.errors import CapturedWriteError, ConcurrentWriteError
from anabranch.graph._turn import COMMITS, FREE, in_turn
from tests.transforms.interrupting import Interrupting

CALLS = 8


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(x).tolist() for x in ab.state(tree).leaves]


def train(model: Any) -> Any:
    """Write as many Variables as there are before the last one, which is read."""
    for variable in model.all[:-1]:
        variable.value = variable.value + 1
    return model.all[-1].value + 0


class Many(ab.Module):
    def __init__(self, count: int) -> None:
        self.all = [ab.Variable(jnp.array(0)) for _ in range(count + 1)]


class Collected:
    """Does something when the garbage collector comes along, at the `number`th look at it."""

    def __init__(self, number: int, does: Callable[[], Any]) -> None:
        self.left, self.does = number, does
        self.done = self.refused = False

    def __enter__(self) -> None:
        gc.collect()
        gc.callbacks.append(self._look)
        self._threshold = gc.get_threshold()
        gc.set_threshold(1, 1000, 1000)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self._threshold)
        gc.callbacks.remove(self._look)

    def _look(self, phase: str, _: object) -> None:
        if phase == "stop" and not self.done:
            self.done = self.left == 0
            self.left -= 1
            if self.done:
                gc.set_threshold(0)
                try:
                    self.does()
                except CapturedWriteError:  # while the function is traced
                    self.refused = True


@pytest.fixture
def little_to_collect() -> Iterator[None]:
    """Leave what there is to itself: a collection takes long, and there will be many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("which", ["a written one", "the one that is read"])
def test_what_a_finaliser_writes_meanwhile_is_neither_lost_nor_forgotten(which, count, taken):
    step, view = ab.jit(train), ab.jit(lambda model: [v.value + 0 for v in model.all])
    model = Many(count)
    for _ in range(CALLS):
        step(model), view(model)
    call = in_turn(step) if taken else step
    place, new = 0, [jnp.array(1000 * (i + 1)) for i in range(400)]
    target = model.all[0 if which == "a written one" else -1]
    for place, value in enumerate(new):
        before = [int(v.value) for v in model.all]
        finaliser = Collected(place, lambda value=value: setattr(target, "value", value))
        ok = True
        with finaliser:
            try:
                call(model)
            except ConcurrentWriteError:
                ok = False
        now = [int(v.value) for v in model.all]
        expected = [x + ok for x in before[:-1]] + before[-1:]
        if finaliser.done:
            at = model.all.index(target)
            # before the call, or after it
            assert now[at] in {int(value), int(value) + (ok and at == 0)}
            expected[at] = now[at]
        assert now == expected
        assert [int(x) for x in view(model)] == now
        assert FREE == [None]
        if not finaliser.done:
            break
    assert 1 <= place < len(new) - 1


class Rows(ab.Module):
    """Holds trees in an attribute, a Variable, a list and a dictionary, and a Variable."""

    def __init__(self) -> None:
        rows = [(jnp.array(10 * i), {"a": jnp.array(10 * i + 1)}) for i in range(4)]
        self.attribute, cell, element, item = rows
        self.cell, self.elements, self.items = ab.Variable(cell), [element], {"at": item}
        self.count = ab.Variable(jnp.array(0))

    def all(self) -> list[Any]:
        values = self.cell.value, self.elements[0], self.items["at"], self.count.value
        return [self.attribute, *values]

    def put(self, place: int, value: Any) -> None:
        if place == 0:
            self.attribute = value
        elif place == 1:
            self.cell.value = value
        elif place == 2:
            self.elements[0] = value
        elif place == 3:
            self.items["at"] = value
        else:
            self.count.value = value


PLACES = range(5)


def put_all(model: Rows) -> None:
    for place, value in enumerate(model.all()):
        model.put(place, jax.tree.map(lambda x: x + 1, value))


def put_all_and_grow(model: Rows) -> None:
    put_all(model)
    model.elements.append(jnp.array(0))


def count_and_extend(model: Rows) -> None:
    model.count.value = model.count.value + 1
    model.extra = [jnp.array(1)]


def meets_finalisers(
    call: Callable[[Rows], None],
    model: Rows,
    at: int,
    settle: Callable[[], None],
    stride: int = 1,
    written: Sequence[int] = PLACES,
) -> int:
    """Call with a finaliser that writes a place, at each of the moments when one may run.

    Arguments:
        call: adds one to places.
        model: what it is called with.
        at: the place that the finaliser writes.
        settle: is called between.
        stride: how many moments later the next one writes.
        written: the places that the function adds to.

    Returns:
        How many calls were refused.
    """
    refused, moment = 0, 0
    while True:
        settle()
        before = [*map(leaves, model.all())]
        new = [1000 * moment + i for i, _ in enumerate(before[at])]
        value = jax.tree.unflatten(jax.tree.structure(model.all()[at]), [*map(jnp.array, new)])
        finaliser = Collected(moment, lambda value=value: model.put(at, value))
        ok = True
        with finaliser:
            try:
                call(model)
            except ConcurrentWriteError:
                ok = False
        now = [*map(leaves, model.all())]
        add = [ok and place in written for place in PLACES]
        expected = [[x + add[place] for x in before[place]] for place in PLACES]
        if finaliser.done and not finaliser.refused:
            # before the call, or after it
            assert now[at] in (new, [x + add[at] for x in new])
            expected[at] = now[at]
        assert now == expected
        assert FREE == [None]
        assert gc.isenabled()
        if not finaliser.done:
            return refused
        refused += not ok
        moment += stride


@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("at", PLACES)
def test_what_a_finaliser_puts_where_a_call_puts_something_is_not_lost(at, taken):
    step, model = ab.jit(put_all), Rows()
    for _ in range(CALLS):
        step(model)

    def settle() -> None:
        for _ in range(3):  # until it is planned again, whatever was put there
            step(model)

    assert meets_finalisers(in_turn(step) if taken else step, model, at, settle)


@pytest.mark.usefixtures("little_to_collect")
@pytest.mark.parametrize("transform", [transforms.jit, transforms.remat])
@pytest.mark.parametrize("function", [put_all_and_grow, count_and_extend])
@pytest.mark.parametrize("at", PLACES)
def test_nor_where_the_structure_changes(at, function, transform):
    step, model = transform(function), Rows()

    def settle() -> None:
        del model.elements[1:]
        if hasattr(model, "extra"):
            del model.extra

    step(model)
    written = PLACES if function is put_all_and_grow else PLACES[-1:]
    refused = meets_finalisers(step, model, at, settle, 11, written)
    assert refused or at not in (0, *written)


def test_a_commit_does_not_end_by_one_that_runs_within():
    step, inner, outer = ab.jit(train), Many(6), Many(6)
    for _ in range(CALLS):
        step(inner), step(outer)
    open_after: list[bool] = []
    follower = step._followers[id(outer)]
    replacing = follower.__globals__["replacing"]

    def meanwhile(*args: Any) -> Any:
        step(inner)
        open_after.append(COMMITS.begun is not COMMITS.ended)
        return replacing(*args)

    follower.__globals__["replacing"] = meanwhile
    step(outer)
    assert open_after == [True]
    assert COMMITS.begun is COMMITS.ended
    assert int(outer.all[0].value) == int(inner.all[0].value) == CALLS + 1


def test_nothing_is_held_after_an_error():
    step, model = ab.jit(train), Many(6)
    for _ in range(CALLS):
        step(model)
    (follower,) = step._followers.values()
    replacing = follower.__globals__["replacing"]

    def meanwhile(*args: Any) -> Any:
        model.all[0].value = jnp.array(100)
        return replacing(*args)

    follower.__globals__["replacing"] = meanwhile
    with pytest.raises(ConcurrentWriteError):
        step(model)
    follower.__globals__["replacing"] = replacing
    assert [ref().held for ref in model.all[0]._memories] == [None]
    step(model)
    assert leaves(model) == [101, *[CALLS + 1] * 5, 0]


class Meanwhile(Interrupting):
    """Call something at one of the places where Python looks for signals, in place of a raise."""

    def __init__(self, number: int, does: Callable[[], Any]) -> None:
        super().__init__(number)
        self._does = does

    def _look(self, frame: types.FrameType, event: str, argument: object) -> None:
        try:
            super()._look(frame, event, argument)
        except KeyboardInterrupt:
            self._does()


class Counter(ab.Module):
    def __init__(self) -> None:
        self.count = ab.Variable(jnp.array(0))
        self.variable = nnx.Variable(jnp.array(0))

    def both(self) -> list[Any]:
        return [self.count, self.variable]


def add_one(counter: Counter) -> None:
    for variable in counter.both():
        variable[...] += 1


def add_two(counter: Counter) -> None:
    add_one(counter), add_one(counter)


def conditionally(counter: Counter) -> None:
    transforms.cond(True, add_one, add_two, counter)


def by_use(counter: Counter) -> None:
    transforms.jit(lambda: add_one(counter))()


DOORS = [transforms.jit(add_one), transforms.remat(add_one), conditionally, by_use]


@pytest.mark.parametrize("door", DOORS, ids=["jit", "remat", "cond", "by use"])
def test_a_handler_may_make_the_same_call_wherever_it_runs(door):
    one, other = Counter(), Counter()
    for counter in one, other:
        for _ in range(CALLS):
            door(counter)
    done = [CALLS, CALLS]
    failed: list[BaseException] = []

    def handle() -> None:
        try:
            door(other)
            done[1] += 1
        except BaseException as error:
            if door is not by_use or type(error) is not CapturedWriteError:
                failed.append(error)  # refused while the function is traced

    def run() -> None:
        for place in itertools.count(step=31 if door is by_use else 7):
            meanwhile = Meanwhile(place, handle)
            with meanwhile:
                door(one)
            done[0] += 1
            counts = [[int(v[...]) for v in counter.both()] for counter in (one, other)]
            if door is by_use:  # what a handler has done is undone where the function runs again
                done[1] = min(done[1], counts[1][0])
            if counts != [[n, n] for n in done]:
                failed.append(AssertionError(place, counts, done))
            if failed or not meanwhile.raised:
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert not failed
    assert done[1] > CALLS + 1


def test_a_handler_that_draws_a_key_first_draws_from_the_same_stream(monkeypatch):
    drawn: list[Any] = []

    def make(key: Any) -> Any:
        monkeypatch.undo()
        drawn.append(contextvars_ext.get_next_key())
        return contextvars_ext.KeyStream(key)

    contextvars_ext.set_default_seed(3)
    monkeypatch.setattr(_keystream_var, "KeyStream", make)
    drawn.append(contextvars_ext.get_next_key())
    expected = [jax.random.fold_in(jax.random.key(3), i) for i in range(2)]
    assert [x == y for x, y in zip(drawn, expected, strict=True)] == [True, True]


def test_a_handler_that_asks_for_a_default_first_gets_the_same():
    got: list[Any] = []

    def make() -> object:
        if not got:
            got.append(None)
            got[0] = variable.get()
        return object()

    variable = contextvars_ext.JitAwareContextVar(default_factory=make)
    got.append(variable.get())
    assert got[0] is got[1]
