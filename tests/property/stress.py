"""Many threads at once on shared objects: what each of them does is known to end in one way.

A `Crowd` of threads draws tasks at random until its time is over. Some only read, and must always
get the right answer; some write what is their own; some write what all of them write, where a call
either writes all that it has to or raises `ConcurrentWriteError` and writes nothing, so that in the
end every counter is the number of calls that returned. Nobody ever sees a tracer.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from anabranch import contextvars_ext, transforms
from anabranch.errors import ConcurrentWriteError


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run functions in threads that start together; return what they return."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(i: int, work: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[i] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


class Boom(Exception):
    """What a call raises that is meant to fail."""


class Net(ab.Module):
    """What is read: Variables, an array, a list, a static."""

    def __init__(self) -> None:
        self.w = ab.Param(jnp.arange(3.0))
        self.layers = [{"b": ab.Param(jnp.full(3, float(i)))} for i in range(3)]
        self.scale = jnp.array(2.0)
        self.power = 2

    def apply(self, x: Any) -> Any:
        total = sum(layer["b"].value for layer in self.layers)
        return self.scale * (x * self.w.value + total) ** self.power

    @transforms.jit
    def __call__(self, x: Any) -> Any:
        return self.apply(x)


class Tally(ab.Module):
    """What is written: each call adds one to all of it."""

    def __init__(self) -> None:
        self.n = ab.Variable(jnp.array(0))
        self.inner = [ab.Variable(jnp.array(0))]
        self.array = jnp.array(0)
        self.static = 0
        self.grown: list[Any] = []

    def count(self) -> None:
        self.n.value = self.n.value + 1
        self.inner[0].value = self.inner[0].value + 1
        self.array = self.array + 1

    def grow(self) -> None:
        self.count()
        self.static += 1
        self.grown.append(ab.Variable(jnp.array(self.static)))

    def counts(self) -> set[int]:
        return {int(x) for x in (self.n, self.inner[0], self.array)}


def answer(x: Any) -> np.ndarray:
    """Return what a `Net` makes of a batch."""
    return np.asarray(2.0 * (np.asarray(x) * np.arange(3.0) + 3.0) ** 2, np.float32)


class Crowd:
    """Threads that do tasks at random; `done` counts them.

    Arguments:
        seed: of the choices.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.net = net = Net()
        self.hidden = hidden = types.SimpleNamespace(net=Net(), n=ab.Variable(jnp.array(0)))
        self.tallies = {name: Tally() for name in ("passed", "captured", "loop", "lanes", "grown")}
        self.done: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._unit = contextvars_ext.JitAwareContextVar[int]("unit")
        captured = self.tallies["captured"]

        def apply(x: Any) -> Any:
            return net.apply(x)

        def count() -> None:
            captured.count()

        def find() -> None:
            hidden.n.value = hidden.n.value + 1

        self._captured = transforms.jit(apply)
        self._found = transforms.jit(lambda x: hidden.net.w * x)
        self._count = transforms.jit(Tally.count)
        self._count_captured = transforms.jit(count)
        self._count_found = transforms.jit(find)
        self._grow = transforms.jit(Tally.grow)
        self._fail = transforms.jit(_count_and_fail)

    def run(self, threads: int, seconds: float) -> None:
        """Let them work, then look at the counters; raise what went wrong."""
        end = time.monotonic() + seconds

        def work(number: int) -> None:
            choose = random.Random(f"crowd {self._seed} {number}")
            names, weights = zip(*_TASKS.items(), strict=True)
            while time.monotonic() < end:
                name = choose.choices(names, weights)[0]
                getattr(self, name)(choose)
                self._tell(name)

        together(*[functools.partial(work, number) for number in range(threads)])
        self._check()

    def _tell(self, what: str) -> None:
        with self._lock:
            self.done[what] += 1

    # -- what only reads -------------------------------------------------------------------------

    def read(self, choose: random.Random) -> None:
        x = _batch(choose.choice([1, 2]))
        _same(self.net(x), answer(x))

    def read_another_shape(self, choose: random.Random) -> None:
        x = _batch(choose.randint(3, 60))
        _same(self.net(x), answer(x))

    def read_captured(self, choose: random.Random) -> None:
        x = _batch(choose.choice([1, 1, 1, choose.randint(2, 60)]))
        _same(self._captured(x), answer(x))

    def read_found(self, choose: random.Random) -> None:
        x = _batch(choose.choice([1, 1, 1, choose.randint(2, 60)]))
        _same(self._found(x), np.arange(3.0) * x)

    def differentiate(self, choose: random.Random) -> None:
        x = _batch(1)
        gradient = transforms.grad(lambda net: net.apply(x).sum())(self.net)
        _same(gradient["w"][()], 4.0 * (np.arange(3.0) * x[0] + 3.0) * x[0])

    def read_in_lanes(self, choose: random.Random) -> None:
        x = _batch(4)
        _same(transforms.vmap(Net.apply, in_axes=(None, 0))(self.net, x), answer(x))

    def read_in_a_loop(self, choose: random.Random) -> None:
        x = _batch(3)
        step = transforms.scan(lambda carry, x: (carry, self.net.apply(x)))
        _same(step(0.0, x)[1], answer(x))

    def read_in_a_branch(self, choose: random.Random) -> None:
        x = _batch(1)
        _same(transforms.cond(True, Net.apply, Net.apply, self.net, x), answer(x))

    def look_for_tracers(self, choose: random.Random) -> None:
        for node in (self.net, self.hidden.net, *self.tallies.values()):
            for _, obj in list(ab.iter_nodes(node)):
                held = [obj.value] if isinstance(obj, ab.Variable) else _values(obj)
                assert not any(isinstance(x, jax.core.Tracer) for x in held), obj

    def set_a_context(self, choose: random.Random) -> None:
        mine = choose.randrange(1_000_000)
        with self._unit.set_on_enter(mine):
            assert transforms.vmap(lambda x: x * 0 + self._unit.get())(jnp.zeros(2, int))[0] == mine
            self.read(choose)
            assert self._unit.get() == mine
        assert self._unit.get(None) is None

    # -- what writes -----------------------------------------------------------------------------

    def count_alone(self, choose: random.Random) -> None:
        tally = Tally()
        for _ in range(3):
            self._count(tally)
        assert tally.counts() == {3}

    def fail(self, choose: random.Random) -> None:
        with contextlib.suppress(Boom):
            self._fail(self.tallies["passed"])
            raise AssertionError("a call that fails has returned")

    def count(self, choose: random.Random) -> None:
        name = choose.choice(["passed", "passed", "captured", "found", "loop", "lanes", "grown"])
        try:
            if name == "passed":
                self._count(self.tallies[name])
            elif name == "captured":
                self._count_captured()
            elif name == "found":
                self._count_found()
            elif name == "loop":
                transforms.fori_loop(0, 1, _count_step, self.tallies[name])
            elif name == "lanes":
                transforms.vmap(_count_lane, in_axes=(None, 0))(self.tallies[name], jnp.arange(2))
            elif name == "grown" and len(self.tallies[name].grown) < _LONGEST:
                self._grow(self.tallies[name])
            else:
                return
        except ConcurrentWriteError:
            self._tell(f"refused: {name}")
        else:
            self._tell(f"counted: {name}")

    def _check(self) -> None:
        for name, tally in self.tallies.items():
            assert tally.counts() == {self.done[f"counted: {name}"]}, (name, tally, self.done)
        assert int(self.hidden.n) == self.done["counted: found"], (self.hidden.n, self.done)
        grown = self.tallies["grown"]
        assert [int(v) for v in grown.grown] == [*range(1, grown.static + 1)]
        assert grown.static == self.done["counted: grown"]
        self.look_for_tracers(random.Random(0))


_LONGEST = 40
"""What grows is traced once for each length."""

_TASKS = {
    "read": 40,
    "read_another_shape": 4,
    "read_captured": 10,
    "read_found": 10,
    "differentiate": 2,
    "read_in_lanes": 2,
    "read_in_a_loop": 2,
    "read_in_a_branch": 2,
    "look_for_tracers": 20,
    "set_a_context": 2,
    "count_alone": 4,
    "fail": 1,
    "count": 20,
}
"""What a thread may do, and how often."""


def _count_and_fail(tally: Tally) -> None:
    tally.grow()
    raise Boom


def _count_step(_: Any, tally: Tally) -> Tally:
    tally.count()
    return tally


def _count_lane(tally: Tally, _: Any) -> None:
    tally.count()


def _batch(rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)


def _same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected, np.float32))


def _values(obj: Any) -> list[Any]:
    if isinstance(obj, list | tuple):
        return list(obj)
    return list((obj if isinstance(obj, dict) else vars(obj)).values())
