"""Variables around a `jax.Ref`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, mixed, value


def _variable(lib: Library, number: float) -> Any:
    if lib is not ab:
        return nnx.Variable(jnp.array(number), ref=True)
    return ab.Variable(jax.new_ref(jnp.array(number)))


def _add(lib: Library, v: Any, x: Any) -> None:
    if lib is not ab:
        v[...] += x
    else:
        v.value[...] += x  # the Ref is the value, and written as JAX writes it


def _read(lib: Library, v: Any) -> float:
    return value(v[...] if lib is not ab else v.value[...])


def test_a_write_through_a_ref_reaches_the_caller() -> None:
    """Rule 75."""

    def program(lib: Library) -> tuple[float, int]:
        traces: list[int] = []

        @lib.jit
        def f(v: Any) -> None:
            traces.append(1)
            _add(lib, v, 1)

        v = _variable(lib, 1.0)
        f(v)
        f(v)
        return _read(lib, v), len(traces)

    assert program(nnx) == (3.0, 1)
    assert program(ab) == (3.0, 1)
    assert program(mixed) == (3.0, 1)


def test_a_ref_as_two_arguments_is_passed_once() -> None:
    """Rule 75."""

    def program(lib: Library) -> float:
        @lib.jit
        def f(a: Any, b: Any) -> None:
            _add(lib, a, 1)
            _add(lib, b, 1)

        v = _variable(lib, 1.0)
        f(v, v)
        return _read(lib, v)

    assert program(nnx) == 3.0
    assert program(ab) == 3.0
    assert program(mixed) == 3.0


def test_a_captured_ref_can_be_written() -> None:
    """Rule 75."""

    def program(lib: Library) -> float:
        v = _variable(lib, 1.0)
        f = lib.jit(lambda x: _add(lib, v, x))
        f(jnp.array(2.0))
        f(jnp.array(2.0))
        return _read(lib, v)

    assert program(nnx) == 5.0
    assert program(ab) == 5.0
    assert program(mixed) == 5.0


def test_a_ref_under_plain_jax_jit() -> None:
    """Rule 75."""

    def program(lib: Library) -> float:
        v = _variable(lib, 1.0)
        jax.jit(lambda x: _add(lib, v, x))(jnp.array(2.0))
        return _read(lib, v)

    assert program(nnx) == 3.0
    assert program(ab) == 3.0
    assert program(mixed) == 3.0


def test_a_write_through_a_broadcast_ref_is_lost_in_nnx_and_refused_here() -> None:
    """Rule 75."""

    def program(lib: Library, v: Any) -> None:
        def f(v: Any, x: Any) -> Any:
            _add(lib, v, 1)
            return x

        lib.vmap(f, in_axes=(None, 0))(v, jnp.arange(2.0))

    v = _variable(nnx, 1.0)
    program(nnx, v)
    assert _read(nnx, v) == 1.0  # lost silently

    # R4: what JAX refuses is refused, in JAX's words, for it is the caller who wrote to the Ref
    ours = _variable(ab, 1.0)
    with pytest.raises(Exception, match="unbatched array reference"):
        program(ab, ours)
    assert _read(ab, ours) == 1.0
    theirs = _variable(mixed, 1.0)
    with pytest.raises(Exception, match="unbatched array reference"):
        program(mixed, theirs)
    assert _read(mixed, theirs) == 1.0
