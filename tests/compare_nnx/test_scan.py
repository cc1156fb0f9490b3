"""Loops: `scan`, and what is carried, sliced and stacked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, raw, value


def _scan(lib: Library, f: Any, in_axes: Any, out_axes: Any, **options: Any) -> Any:
    return lib.scan(f, in_axes=in_axes, out_axes=out_axes, **options)


def test_random_streams_that_are_carried_draw_other_keys_in_each_step() -> None:
    """Rule 53."""

    def program(lib: Library) -> tuple[int, int]:
        def f(rngs: Any, x: Any) -> Any:
            return rngs, jax.random.uniform(rngs()) + x

        rngs = lib.Rngs(0)
        _, ys = _scan(lib, f, (lib.Carry, 0), (lib.Carry, 0))(rngs, jnp.zeros(3))
        return len(set(value(ys))), value(rngs.default.count)

    assert program(nnx) == (3, 3)
    assert program(ab) == (3, 3)
    assert program(mixed) == (3, 3)


def test_a_broadcast_stream_is_carried_only_here() -> None:
    """Rule 53."""

    def program(lib: Library) -> tuple[int, int]:
        rngs = lib.Rngs(0)
        f = _scan(lib, lambda rngs, x: jax.random.uniform(rngs()) + x, (None, 0), 0)
        return len(set(value(f(rngs, jnp.zeros(3))))), value(rngs.default.count)

    assert program(nnx) == (1, 0)
    assert program(ab) == (3, 3)  # R1: as the Python loop
    assert program(mixed) == (3, 3)


def test_a_carried_object_that_is_returned_is_the_one_that_went_in() -> None:
    """Rule 54."""

    def program(lib: Library) -> tuple[bool, float]:
        def f(m: Any, x: Any) -> Any:
            m.w[...] += x
            return m, m.w[...]

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        out, _ = _scan(lib, f, (lib.Carry, 0), (lib.Carry, 0))(m, jnp.arange(3.0))
        return out is m, value(m.w)

    assert program(nnx) == (True, 3.0)
    assert program(ab) == (True, 3.0)
    assert program(mixed) == (True, 3.0)


def test_a_new_object_cannot_be_carried() -> None:
    """Rule 54."""

    def program(lib: Library) -> Any:
        def f(m: Any, x: Any) -> Any:
            return box(lib, w=lib.Param(m.w[...] + x)), x

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        return outcome(lambda: _scan(lib, f, (lib.Carry, 0), (lib.Carry, 0))(m, jnp.arange(3.0)))

    assert program(nnx) is ValueError
    assert program(ab) is ab.errors.StructureError
    assert program(mixed) is ab.errors.StructureError


def test_a_write_to_a_broadcast_object_accumulates_only_here() -> None:
    """Rule 55."""

    def program(lib: Library) -> float:
        def f(m: Any, x: Any) -> Any:
            m.n[...] += 1
            return x

        m = box(lib, n=lib.BatchStat(jnp.array(0.0)))
        _scan(lib, f, (None, 0), 0)(m, jnp.arange(3.0))
        return value(m.n)

    assert program(nnx) == 0.0
    assert program(ab) == 3.0  # R1, R4: the write is not lost
    assert program(mixed) == 3.0


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_layers_are_sliced_and_written_back_along_their_axis(axis: int) -> None:
    """Rule 56."""

    def program(lib: Library) -> tuple[Any, Any, Any]:
        def f(x: Any, m: Any) -> Any:
            m.w[...] *= 2
            return x + m.w[...].sum(), x

        m = box(lib, w=lib.Param(jnp.arange(6.0).reshape(2, 3)))
        out, ys = _scan(lib, f, (lib.Carry, axis), (lib.Carry, 0))(jnp.array(0.0), m)
        return value(out), value(ys), value(m.w)

    expected = program(nnx)
    assert expected[2] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert program(ab) == expected
    assert program(mixed) == expected


def test_kinds_have_axes_of_their_own_and_steps_may_go_backwards() -> None:
    """Rule 56."""

    def program(lib: Library) -> tuple[Any, float]:
        def f(x: Any, m: Any) -> Any:
            m.n[...] += 1
            return x * m.w[...], x

        m = box(lib, w=lib.Param(jnp.array([1.0, 2.0, 3.0])), n=lib.BatchStat(jnp.array(0.0)))
        axes = lib.StateAxes({lib.Param: 0, ...: lib.Carry})
        run = _scan(lib, f, (lib.Carry, axes), (lib.Carry, 0), reverse=True)
        _, ys = run(jnp.array(1.0), m)
        return value(ys), value(m.n)

    assert program(nnx) == ([6.0, 3.0, 1.0], 3.0)
    assert program(ab) == ([6.0, 3.0, 1.0], 3.0)
    assert program(mixed) == ([6.0, 3.0, 1.0], 3.0)


def test_a_body_is_traced_once_for_two_calls() -> None:
    """Rule 57."""

    def program(lib: Library) -> int:
        traces: list[int] = []

        def f(m: Any, x: Any) -> Any:
            traces.append(1)
            m.w[...] += x
            return m, x

        run = _scan(lib, f, (lib.Carry, 0), (lib.Carry, 0))
        m = box(lib, w=lib.Param(jnp.zeros(())))
        run(m, jnp.arange(3.0))
        run(m, jnp.arange(3.0))
        return len(traces)

    assert program(nnx) == 1
    assert program(ab) == 1
    assert program(mixed) == 1


def test_metadata_that_name_axes_lose_one_inside_only_here_unasked() -> None:
    """Rule 58."""

    def program(lib: Library, **options: Any) -> tuple[Any, Any]:
        seen: list[Any] = []

        def f(x: Any, m: Any) -> Any:
            seen.append(m.w.get_metadata("out_sharding"))
            return x + raw(m.w).sum(), x

        m = box(lib, w=nnx.Param(jnp.ones((2, 3)), out_sharding=("layers", "features")))
        _scan(lib, f, (lib.Carry, 0), (lib.Carry, 0), **options)(jnp.array(0.0), m)
        return seen[0], m.w.get_metadata("out_sharding")

    named = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
    with jax.set_mesh(jax.make_mesh((1, 1), ("layers", "features"), axis_types=_AUTO)):
        assert program(nnx, **named) == (("features",), ("layers", "features"))
        assert program(mixed) == (("features",), ("layers", "features"))


_AUTO = (jax.sharding.AxisType.Auto,) * 2


def test_loops_carry_what_they_write_and_give_the_same_objects_back() -> None:
    """Rule 62."""

    def program(lib: Library) -> tuple[Any, ...]:
        def body(i: Any, carry: Any) -> Any:
            m, total = carry
            m.w[...] += i
            return m, total + m.w[...]

        m = box(lib, w=lib.Param(jnp.array(0)))
        out, total = lib.fori_loop(0, 4, body, (m, jnp.array(0)))
        again, count = lib.while_loop(
            lambda carry: carry[0].w[...] < 20,
            lambda carry: (_doubled(carry[0]), carry[1] + 1),
            (m, jnp.array(0)),
        )
        return out is m, again is m, value(total), value(count), value(m.w)

    assert program(nnx) == (True, True, 10, 2, 24)
    assert program(ab) == (True, True, 10, 2, 24)
    assert program(mixed) == (True, True, 10, 2, 24)


def _doubled(m: Any) -> Any:
    m.w[...] *= 2
    return m


def test_no_step_of_a_body_that_swaps_its_carries_does_nothing_only_here() -> None:
    """Rule 62."""

    def program(lib: Library) -> tuple[Any, Any]:
        def body(i: Any, carry: Any) -> Any:
            a, b = carry
            return b, a

        a, b = lib.Param(jnp.array(1.0)), lib.Param(jnp.array(2.0))
        failed = isinstance(outcome(lambda: lib.fori_loop(0, 0, body, (a, b))), type)
        return failed, (value(a), value(b))

    assert program(nnx) == (False, (2.0, 1.0))
    assert program(ab) == (False, (1.0, 2.0))
    assert program(mixed) == (False, (1.0, 2.0))


def test_an_object_may_be_carried_twice() -> None:
    """Rule 62."""

    def program(lib: Library) -> float:
        def body(i: Any, carry: Any) -> Any:
            a, b = carry
            a.w[...] += 1
            return a, b

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        lib.fori_loop(0, 3, body, (m, m))
        return value(m.w)

    assert program(nnx) == 3.0
    assert program(ab) == 3.0
    assert program(mixed) == 3.0


def test_a_condition_that_writes_is_run_as_in_python_only_here() -> None:
    """Rule 62."""

    def program(lib: Library) -> tuple[int, int]:
        def condition(m: Any) -> Any:
            m.asked[...] += 1
            return m.w[...] < 3

        def body(m: Any) -> Any:
            m.w[...] += 1
            return m

        m = box(lib, w=lib.Param(jnp.array(0)), asked=lib.BatchStat(jnp.array(0)))
        lib.while_loop(condition, body, m)
        return value(m.w), value(m.asked)

    assert program(nnx) == (3, 0)
    assert program(ab) == (3, 4)  # R1
    assert program(mixed) == (3, 4)
