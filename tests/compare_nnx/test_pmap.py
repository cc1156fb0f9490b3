"""`pmap`: the rules of `vmap`, on devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import AliasError, BroadcastWriteError, SharedStreamError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, value


def test_each_device_writes_its_part() -> None:
    """Rule 49."""

    def program(lib: Library) -> tuple[bool, list[float], list[float]]:
        def f(m: Any, x: Any) -> Any:
            m.w[...] += x
            return m.w[...] * 10

        m = box(lib, w=lib.Param(jnp.arange(2.0)))
        w = m.w
        result = lib.pmap(f)(m, jnp.ones(2))
        return m.w is w, value(m.w), value(result)

    assert program(nnx) == (True, [1.0, 2.0], [10.0, 20.0])
    assert program(ab) == (True, [1.0, 2.0], [10.0, 20.0])
    assert program(mixed) == (True, [1.0, 2.0], [10.0, 20.0])


def test_a_broadcast_write_that_differs_keeps_the_first_device_in_nnx_and_raises_here() -> None:
    """Rule 48."""

    def program(lib: Library) -> float:
        def f(m: Any, x: Any) -> None:
            m.w[...] += x

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        outcome(lambda: lib.pmap(f, in_axes=(None, 0))(m, jnp.array([5.0, 7.0])))
        return value(m.w)

    assert program(nnx) == 6.0  # the write of the second device is lost silently
    assert program(ab) == 1.0  # R2
    assert program(mixed) == 1.0
    with pytest.raises(BroadcastWriteError, match=r"args\[0\]"):  # R4, S1 g
        ab.pmap(lambda v, x: v.__setitem__(..., x), in_axes=(None, 0))(
            ab.Param(jnp.array(1.0)), jnp.array([5.0, 7.0])
        )


def test_a_broadcast_variable_may_be_written_alike_on_all_devices() -> None:
    """Rule 48."""

    def program(lib: Library) -> float:
        def f(m: Any, x: Any) -> None:
            m.w[...] += jax.lax.psum(x, "devices")

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        lib.pmap(f, in_axes=(None, 0), axis_name="devices")(m, jnp.array([5.0, 7.0]))
        return value(m.w)

    assert program(nnx) == 13.0
    assert program(ab) == 13.0
    assert program(mixed) == 13.0


def test_one_object_with_two_axes_is_refused() -> None:
    """Rule 46."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.ones((2, 2))))
        return outcome(lambda: lib.pmap(lambda a, b: a.w + b.w, in_axes=(0, 1))(m, m))

    assert program(nnx) is ValueError
    assert program(ab) is AliasError
    assert program(mixed) is AliasError


def test_a_stream_that_is_broadcast_gives_one_key_in_nnx_and_an_error_here() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[Any, int]:
        def draw(rngs: Any, x: Any) -> Any:
            return jax.random.key_data(rngs())

        rngs = lib.Rngs(0)

        def same() -> bool:
            first, second = value(lib.pmap(draw, in_axes=(None, 0))(rngs, jnp.arange(2)))
            return first == second

        return outcome(same), value(rngs.default.count)

    assert program(nnx) == (True, 1)
    assert program(ab) == (SharedStreamError, 0)  # R4
    assert program(mixed) == (SharedStreamError, 0)
