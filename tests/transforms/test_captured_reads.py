"""A function that is kept is not stale: what it captures is compared (C38)."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms

SPEC = jax.sharding.PartitionSpec("i")


def sharded(f: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    return transforms.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC)


KEEPING = {
    "remat": transforms.remat,
    "gradient of remat": lambda f: transforms.grad(lambda x: transforms.remat(f)(x).sum()),
    "lift": transforms.lift(jax.checkpoint),
    "pmap": transforms.pmap,
    "shard_map": sharded,
}


class Model(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.array(1.0))
        self.k = 1.0

    def reset(self):
        self.w.value = jnp.array(1.0)
        self.k = 1.0
        return self


GLOBAL = Model()


def helper(x):
    return x * GLOBAL.w * GLOBAL.k


class TestJit:
    """C1: the second call answers with the new value (traced again, until closures are lifted)."""

    def check(self, f, model):
        traces: list[int] = []

        def counted(x):
            traces.append(1)
            return f(x)

        jitted = transforms.jit(counted)
        assert [float(jitted(2.0)) for _ in range(3)] == [2.0] * 3
        assert len(traces) == 1
        model.w.value = jnp.array(3.0)
        assert [float(jitted(2.0)) for _ in range(3)] == [6.0] * 3
        assert len(traces) == 1
        model.k = 2.0
        assert float(jitted(2.0)) == 12.0
        assert len(traces) == 2

    def test_reads_a_closure_afresh(self):
        model = Model()
        self.check(lambda x: x * model.w * model.k, model)

    def test_reads_objects_in_containers_and_partials_afresh(self):
        model = Model()
        held = {"models": [model]}
        multiply = functools.partial(lambda m, x: x * m.w * m.k, model)
        self.check(lambda x: x * held["models"][0].w * held["models"][0].k, model)
        self.check(multiply, Model.reset(model))

    def test_reads_globals_of_helpers_afresh(self):
        self.check(helper, GLOBAL)

    def test_a_global_with_the_name_of_an_attribute_is_not_captured(self):
        traces: list[int] = []

        @transforms.jit
        def f(m):
            traces.append(1)
            return m.GLOBAL * 2.0

        holder = Model()
        holder.GLOBAL = ab.Variable(1.0)
        for _ in range(2):
            assert float(f(holder)) == 2.0
            GLOBAL.w.value = GLOBAL.w + 0.0
        assert len(traces) == 1

    def test_sees_another_object_in_a_closure(self):
        model = Model()
        jitted = transforms.jit(lambda x: x * model.w)
        assert float(jitted(2.0)) == 2.0
        model = Model()
        model.w.value = jnp.array(4.0)
        assert float(jitted(2.0)) == 8.0

    def test_keeps_no_captured_model_alive(self):
        model = Model()
        jitted = transforms.jit(lambda x: x * model.w)
        jitted(2.0)
        refs = [weakref.ref(model), weakref.ref(jitted)]
        del jitted
        model = None
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("kind", ["Variable", "list", "array"])
def test_a_captured_value_is_read_afresh(name, kind):
    held: Any = {"Variable": ab.Variable(jnp.array(1.0)), "list": [1.0], "array": None}[kind]
    one = jnp.array(1.0)

    def f(x):
        return x * (held.value if kind == "Variable" else held[0] if kind == "list" else one)

    run = KEEPING[name](f)
    before = run(jnp.ones(8))
    if kind == "Variable":
        held.value = jnp.array(5.0)
    elif kind == "list":
        held[0] = 5.0
    else:
        one = jnp.array(5.0)
    assert (run(jnp.ones(8)) == 5 * before).all()


@pytest.mark.parametrize("name", ["remat", "lift", "pmap", "shard_map"])
def test_what_captures_the_same_is_traced_once(name):
    traces: list[int] = []
    scale = jnp.array(2.0)

    def f(x):
        traces.append(1)
        return x * scale

    run = KEEPING[name](f)
    for _ in range(4):
        run(jnp.ones(8))
    assert len(traces) == 1


def in_scan(f: Any) -> Any:
    return lambda x: transforms.scan(lambda c, _: (f(c), None), length=1)(x, None)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        transforms.remat,
        transforms.lift(jax.jit),
        lambda f: lambda x: transforms.cond(True, f, f, x),
        lambda f: lambda x: transforms.fori_loop(0, 1, lambda i, c: f(c), x),
        in_scan,
        lambda f: lambda x: transforms.map(f, x[None])[0],
    ],
    ids=["remat", "lift", "cond", "fori_loop", "scan", "map"],
)
def test_what_is_bound_anew_while_a_call_runs_is_seen_by_the_next_one(wrap):
    scale = jnp.array(1.0)

    def rebind(_):  # as another thread may
        nonlocal scale
        scale = scale + 1.0

    def f(x):
        y = x * scale
        jax.debug.callback(rebind, y)
        return y

    wrapped, seen = wrap(f), []
    for _ in range(3):
        seen.append(float(wrapped(jnp.array(1.0))))
        jax.effects_barrier()
    assert seen == [1.0, 2.0, 3.0]
