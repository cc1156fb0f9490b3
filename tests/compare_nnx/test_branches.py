"""Branches, rules of derivatives, values recorded on the way, and `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, value


def test_only_the_taken_branch_counts_and_each_may_write_something_else() -> None:
    """Rule 60."""

    def program(lib: Library, flag: bool) -> tuple[float, float]:
        def first(m: Any) -> None:
            m.a[...] += 1

        def second(m: Any) -> None:
            m.b[...] += 10

        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.Param(jnp.array(1.0)))
        lib.cond(jnp.array(flag), first, second, m)
        return value(m.a), value(m.b)

    for lib in (nnx, ab, mixed):
        assert program(lib, True) == (2.0, 1.0)
        assert program(lib, False) == (1.0, 11.0)


def test_references_inside_one_operand_stay_shared() -> None:
    """Rule 60."""

    def program(lib: Library) -> float:
        def add(m: Any) -> None:
            m.a[...] += 1
            m.b[...] += 1

        v = lib.Param(jnp.array(1.0))
        lib.cond(jnp.array(True), add, lambda m: None, box(lib, a=v, b=v))
        return value(v)

    assert program(nnx) == 3.0
    assert program(ab) == 3.0
    assert program(mixed) == 3.0


def test_a_predicate_may_differ_between_lanes() -> None:
    """Rule 60."""

    def program(lib: Library) -> list[float]:
        def f(m: Any, flag: Any) -> None:
            lib.cond(flag, _add_one, lambda m: None, m)

        m = box(lib, w=lib.Param(jnp.zeros(3)))
        lib.vmap(f, in_axes=(0, 0))(m, jnp.array([True, False, True]))
        return value(m.w)

    assert program(nnx) == [1.0, 0.0, 1.0]
    assert program(ab) == [1.0, 0.0, 1.0]
    assert program(mixed) == [1.0, 0.0, 1.0]


def _add_one(m: Any) -> None:
    m.w[...] += 1


def test_a_shared_variable_cannot_be_written_by_some_lanes() -> None:
    """Rule 60."""

    def program(lib: Library) -> Any:
        def f(m: Any, flag: Any) -> None:
            lib.cond(flag, _add_one, lambda m: None, m)

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        flags = jnp.array([True, False])
        return outcome(lambda: lib.vmap(f, in_axes=(None, 0))(m, flags)), value(m.w)

    assert program(nnx) == (ValueError, 0.0)
    assert program(ab) == (ab.errors.BroadcastWriteError, 0.0)
    assert program(mixed) == (ab.errors.BroadcastWriteError, 0.0)


def test_branches_that_leave_other_structures_are_refused() -> None:
    """Rule 61."""

    def program(lib: Library) -> Any:
        def add(m: Any) -> None:
            m.late = lib.Param(jnp.array(1.0))

        def name(m: Any) -> None:
            m.s = "other"

        def nothing(m: Any) -> None:
            pass

        found = []
        for first in (add, name):
            m = box(lib, w=lib.Param(jnp.array(0.0)), s="")
            found.append(outcome(lambda f=first, m=m: lib.cond(jnp.array(True), f, nothing, m)))
        return found

    assert program(nnx) == [TypeError, TypeError]
    assert program(ab) == [ab.errors.StructureError] * 2
    assert program(mixed) == [ab.errors.StructureError] * 2


def test_branches_that_add_the_same_attribute_add_it() -> None:
    """Rule 61."""

    def program(lib: Library) -> float:
        def add(n: float) -> Any:
            def f(m: Any) -> None:
                m.late = lib.Param(jnp.array(n))

            return f

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        lib.switch(jnp.array(1), [add(1.0), add(2.0)], m)
        return value(m.late)

    assert program(nnx) == 2.0
    assert program(ab) == 2.0
    assert program(mixed) == 2.0


def test_branches_called_again_are_traced_again_only_by_nnx() -> None:
    """Rule 57."""

    def program(lib: Library) -> int:
        traces: list[int] = []

        def first(m: Any) -> None:
            traces.append(1)
            m.w[...] += 1

        def second(m: Any) -> None:
            traces.append(1)

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        for _ in range(4):
            lib.cond(jnp.array(True), first, second, m)
        assert value(m.w) == 4.0
        return len(traces)

    assert program(nnx) == 8
    assert program(ab) == 2
    assert program(mixed) == 2


def test_values_recorded_in_lanes_are_stacked() -> None:
    """Rule 59."""

    def program(lib: Library) -> tuple[list[float], list[Any]]:
        def square(m: Any, x: Any) -> Any:
            m.seen = lib.Intermediate(x)
            return x**2

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        axes = lib.StateAxes({lib.Intermediate: 0, ...: None})
        lib.vmap(square, in_axes=(axes, 0))(m, jnp.arange(3.0))
        return value(m.seen), paths(lib, lib.pop(m, lib.Intermediate))

    assert program(nnx) == ([0.0, 1.0, 2.0], [("seen",)])
    assert program(ab) == ([0.0, 1.0, 2.0], [("seen",)])
    assert program(mixed) == ([0.0, 1.0, 2.0], [("seen",)])


def test_a_rule_of_ones_own_takes_objects_and_may_record() -> None:
    """Rule 68."""

    def program(lib: Library) -> tuple[float, float, float]:
        @lib.custom_vjp
        def scaled(m: Any, x: Any) -> Any:
            return m.w.value * x if lib is ab else m.w[...] * x

        def forward(m: Any, x: Any) -> Any:
            m.calls[...] += 1
            return scaled(m, x), (m.w[...], x)

        def backward(residuals: Any, g: Any) -> Any:
            w, x = residuals
            return ab.State.from_dict({"w": 10 * g * x}, kind=lib.Param), g * w

        scaled.defvjp(forward, backward)
        m = box(lib, w=lib.Param(jnp.array(2.0)), calls=lib.BatchStat(jnp.array(0)))
        loss, grads = lib.value_and_grad(scaled)(m, jnp.array(3.0))
        return value(loss), value(grads["w"]), value(m.calls)

    # nnx has a signature of its own for the rules
    assert program(ab) == (6.0, 30.0, 1)
    assert program(mixed) == (6.0, 30.0, 1)


def test_shard_map_shows_local_shapes_and_brings_replicated_writes_back() -> None:
    """Rule 71."""

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def program(lib: Library) -> tuple[Any, Any, Any, Any]:
        seen: list[Any] = []

        def f(m: Any, x: Any) -> Any:
            seen.append(m.w[...].shape)
            m.n[...] += 1
            m.w[...] *= 2
            return x + m.w[...].sum()

        m = box(lib, w=lib.Param(jnp.arange(4.0)), n=lib.BatchStat(jnp.array(0)))
        state = nnx.StateSharding if lib is nnx else ab.StateSharding
        specs = state({lib.Param: spec("d"), ...: spec()})
        run = lib.shard_map(f, mesh=mesh, in_specs=(specs, spec("d")), out_specs=spec("d"))
        out = run(m, jnp.zeros(2))
        return seen[0], value(out), value(m.w), value(m.n)

    expected = ((2,), [2.0, 10.0], [0.0, 2.0, 4.0, 6.0], 1)
    assert program(nnx) == expected
    assert program(ab) == expected
    assert program(mixed) == expected
