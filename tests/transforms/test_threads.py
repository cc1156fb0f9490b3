"""Threads and tasks on shared objects: readers are right, no write is lost, no tracer is seen."""

from __future__ import annotations

import asyncio
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import ConcurrentWriteError
from anabranch.graph import _module, _watchers
from tests.property.stress import Crowd, Net, Tally, answer, together


def batch(rows: int, start: int = 0) -> np.ndarray:
    return (start + np.arange(rows * 3, dtype=np.float32)).reshape(rows, 3)


def calls_of(f: Any, calls: int, start: int) -> Any:
    """Return a function that calls another one over and over, and compares."""
    x = batch(1, start)

    def work() -> int:
        for _ in range(calls):
            assert (np.asarray(f(x)) == answer(x)).all()
        return calls

    return work


CALLS = 2_000


class TestReaders:
    def test_one_method_from_many_threads(self):
        """C26."""
        net = Net()
        assert together(*[calls_of(net, CALLS, i) for i in range(8)]) == [CALLS] * 8

    def test_while_another_thread_traces_new_shapes(self):
        net = Net()

        def trace() -> None:
            for rows in range(2, 10):
                assert (np.asarray(net(batch(rows))) == answer(batch(rows))).all()

        together(trace, *[calls_of(net, CALLS // 4, i) for i in range(4)])

    def test_while_another_thread_traces_writes_of_the_same_model(self):
        net = Net()

        def write(net: Net, rows: Any) -> None:
            net.w.value = net.w.value + rows.sum()
            net.scale = net.scale * 2
            net.layers.append({})

        def trace() -> None:
            for rows in range(1, 8):  # it traces the writes, and makes none
                transforms.jit(write).trace(net, batch(rows))

        together(trace, *[calls_of(net, CALLS // 4, i) for i in range(4)])

    @pytest.mark.parametrize("cells", ["variables", "attributes"])
    def test_nobody_sees_half_of_what_another_thread_writes(self, cells):
        class Many(ab.Module):
            def __init__(self) -> None:
                for i in range(40):
                    array = jnp.array(0)
                    setattr(self, f"a{i}", ab.Variable(array) if cells == "variables" else array)

        def of(model: Many) -> list[Any]:
            return [getattr(model, f"a{i}") for i in range(40)]

        @transforms.jit
        def write(model: Many) -> None:
            for i, x in enumerate(of(model)):
                if isinstance(x, ab.Variable):
                    x.value += 1
                else:
                    setattr(model, f"a{i}", x + 1)

        read = transforms.jit(lambda model: jnp.stack([jnp.asarray(x) for x in of(model)]))
        model = Many()
        for _ in range(3):
            write(model), read(model)

        def writes() -> None:
            for _ in range(2_000):
                write(model)

        def reads() -> None:
            for _ in range(2_000):
                found = np.asarray(read(model))
                assert (found == found[0]).all()

        together(writes, reads, reads)

    @pytest.mark.parametrize("way", ["closure", "default", "use"])
    def test_a_captured_model(self, way):
        net = Net()
        hidden = types.SimpleNamespace(net=net)

        def apply(x: Any) -> Any:
            return net.apply(x)

        f: Any = {
            "closure": apply,
            "default": lambda x, net=net: net.apply(x),
            "use": lambda x: Net.apply(_with_found(hidden), x),
        }[way]
        f = transforms.jit(f)
        together(*[calls_of(f, CALLS // 8, i) for i in range(4)])

    @pytest.mark.parametrize(
        "call",
        [
            transforms.vmap(Net.apply, in_axes=(None, 0)),
            lambda net, x: transforms.scan(lambda c, x: (c, net.apply(x)))(0.0, x)[1],
            lambda net, x: transforms.cond(True, Net.apply, Net.apply, net, x),
            transforms.remat(Net.apply),
            lambda net, x: transforms.value_and_grad(
                lambda net, x: (net.apply(x).sum(), net.apply(x)), has_aux=True
            )(net, x)[0][1],
        ],
        ids=["vmap", "scan", "cond", "remat", "grad"],
    )
    def test_other_transforms(self, call):
        net = Net()
        together(*[calls_of(lambda x: call(net, x), 10, i) for i in range(4)])


def _with_found(hidden: Any) -> Any:
    """Return something like a `Net`, whose Variables are those of one that nobody can see."""
    return types.SimpleNamespace(
        w=hidden.net.w, layers=[{"b": v["b"]} for v in hidden.net.layers], scale=2.0, power=2
    )


class TestWriters:
    def count(self, call: Any, threads: int = 4, calls: int = 60) -> tuple[int, int]:
        def work() -> int:
            refused = 0
            for _ in range(calls):
                try:
                    call()
                except ConcurrentWriteError:
                    refused += 1
            return refused

        refused = sum(together(*[work] * threads))
        return threads * calls - refused, refused

    @pytest.mark.parametrize("way", ["passed", "captured", "loop", "lanes"])
    def test_no_update_is_lost(self, way):
        tally = Tally()
        count = transforms.jit(Tally.count)

        @transforms.jit
        def captured() -> None:
            tally.count()

        def lane(tally: Tally, _: Any) -> None:
            tally.count()

        call: Any = {
            "passed": lambda: count(tally),
            "captured": captured,
            "loop": lambda: transforms.fori_loop(0, 1, _step, tally),
            "lanes": lambda: transforms.vmap(lane, in_axes=(None, 0))(tally, jnp.arange(2)),
        }[way]
        done, _ = self.count(call, calls=400 if way in ("passed", "captured") else 10)
        assert tally.counts() == {done}

    def test_no_change_of_structure_is_lost(self):
        tally = Tally()
        grow = transforms.jit(Tally.grow)
        done, _ = self.count(lambda: grow(tally), threads=3, calls=5)
        assert tally.counts() == {done}
        assert tally.static == len(tally.grown) == done
        assert [int(v) for v in tally.grown] == [*range(1, done + 1)]

    def test_a_write_in_between_is_reported_and_nothing_is_written(self):
        tally, started, go_on = Tally(), threading.Event(), threading.Event()

        def slow(tally: Tally) -> None:
            started.set()
            assert go_on.wait(60)
            tally.grow()

        def interfere() -> None:
            assert started.wait(60)
            tally.inner[0].value = jnp.array(7)
            go_on.set()

        def call() -> None:
            with pytest.raises(ConcurrentWriteError, match="inner"):
                transforms.jit(slow)(tally)

        together(call, interfere)
        assert (int(tally.n), int(tally.array), tally.static, tally.grown) == (0, 0, 0, [])
        assert int(tally.inner[0]) == 7

    def test_a_walk_never_sees_half_of_what_another_call_writes(self):
        net, calls = Net(), 1_500
        held = net.layers[2]
        held["c"] = ab.Param(jnp.zeros(3))

        @transforms.jit
        def rotate(net: Any) -> None:  # the dictionary is emptied and filled again
            held = net.layers[2]
            first = next(iter(held))
            held[first] = held.pop(first)

        @transforms.jit
        def total(net: Any) -> Any:
            return sum(v.value.sum() for v in net.layers[2].values())

        def write() -> None:
            for _ in range(calls):
                rotate(net)

        def read() -> None:
            for _ in range(calls):
                assert float(total(net)) == 6.0

        together(write, read, read)

    def test_objects_of_their_own_do_not_hinder_each_other(self):
        count = transforms.jit(Tally.count)

        def work() -> set[int]:
            tally = Tally()
            for _ in range(200):
                count(tally)
            return tally.counts()

        assert together(*[work] * 6) == [{200}] * 6


def _step(_: Any, tally: Tally) -> Tally:
    tally.count()
    return tally


def test_no_thread_sees_a_tracer_of_another_one():
    net, tally, over = Net(), Tally(), threading.Event()
    hidden = types.SimpleNamespace(v=ab.Variable(jnp.array(0.0)))

    def step(x: Any) -> None:
        tally.grow()
        net.w.value = net.w.value * x.sum()
        net.scale = net.scale + hidden.v.value
        hidden.v.value = hidden.v.value + 1.0

    def trace() -> None:
        for rows in range(1, 10):
            transforms.jit(step).trace(batch(rows))
        over.set()

    def look() -> int:
        looks = 0
        while not over.is_set():
            seen = [tally.n.value, tally.array, tally.inner[0].value, hidden.v.value]
            seen += [net.w.value, net.scale, *tally.grown]
            assert not any(isinstance(x, jax.core.Tracer) for x in seen)
            looks += 1
        return looks

    _, *looks = together(trace, look, look)
    assert all(looks)
    assert tally.counts() == {0} and tally.grown == []


class TestTasks:
    def test_update_contexts_of_interleaved_tasks(self):
        async def swap(n: float) -> None:
            m = {"a": ab.Param(jnp.array(n)), "b": ab.Param(jnp.array(-n))}
            a, b = m["a"], m["b"]
            with ab.update_context("swap"):
                await asyncio.sleep(0)
                with ab.split_context("swap") as ctx:
                    graphdef, state = ctx.split(m)
                await asyncio.sleep(0)
                graphdef, state = jax.jit(_swapped)(graphdef, state)
                await asyncio.sleep(0)
                with ab.merge_context("swap") as ctx:
                    assert ctx.merge(graphdef, state) is m
            assert m["a"] is b and m["b"] is a
            assert (float(a), float(b)) == (n + 1, -n)

        async def main() -> None:
            await asyncio.gather(*[swap(float(n)) for n in range(1, 5)])

        asyncio.run(main())

    def test_update_contexts_of_interleaved_generators(self):
        def steps(tag: str, m: dict[str, Any]) -> Any:
            with ab.update_context(tag):
                with ab.split_context(tag) as ctx:
                    graphdef, state = ctx.split(m)
                yield
                state = jax.tree.map(lambda x: x + 1, state)
                yield
                with ab.merge_context(tag) as ctx:
                    assert ctx.merge(graphdef, state) is m
                yield

        worlds = [{"a": ab.Param(jnp.array(n))} for n in range(3)]
        running = [steps(f"tag {n}", m) for n, m in enumerate(worlds)]
        for _ in range(3):
            for generator in running:
                next(generator)
        running[1].close()  # out of order
        running[0].close()
        running[2].close()
        assert [int(m["a"]) for m in worlds] == [1, 2, 3]
        with pytest.raises(ab.errors.ContextTagError):
            ab.split_context("tag 0").__enter__().split({})

    def test_calls_of_tasks_in_threads(self):
        net = Net()

        async def main() -> list[int]:
            work = [asyncio.to_thread(calls_of(net, 50, i)) for i in range(6)]
            return await asyncio.gather(*work)

        assert asyncio.run(main()) == [50] * 6


def _swapped(graphdef: Any, state: Any) -> Any:
    with ab.merge_context("swap") as ctx:
        m = ctx.merge(graphdef, state)
    m["a"].value += 1
    m["a"], m["b"] = m["b"], m["a"]
    with ab.split_context("swap") as ctx:
        return ctx.split(m)


def test_a_crowd_of_threads_does_as_each_of_them_alone():
    """`benchmarks/stress.py` does the same for longer."""
    crowd = Crowd()
    crowd.run(threads=6, seconds=3.0)
    assert crowd.done.total() > 6


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("then", ["before", "after"])
def test_a_call_that_is_planned_while_an_attribute_is_written(is_known, then, monkeypatch):
    class Tagged(ab.Module):
        def __init__(self) -> None:
            self.tag = "old"

    module, tagged = Tagged(), ab.jit(lambda module: module.tag)
    write, planned = _module._set, list[str]()

    def meanwhile(obj: Any, name: str, value: Any) -> None:
        if then == "after":
            write(obj, name, value)
        if obj is module and name == "tag":
            planned.extend(tagged(module) for _ in range(4))
        if then == "before":
            write(obj, name, value)

    for _ in range(4 if is_known else 0):
        tagged(module)
    monkeypatch.setattr(_module, "_set", meanwhile)
    monkeypatch.setattr(_watchers, "_set", meanwhile)  # of a Module that is watched
    module.tag = "new"
    assert planned == ["new" if then == "after" else "old"] * 4
    assert [tagged(module) for _ in range(4)] == ["new"] * 4
