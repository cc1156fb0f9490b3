"""Objects that are no arguments: captured, bound, made inside and leaked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import nnx

import anabranch as ab
from anabranch.errors import CapturedWriteError, SpentTwinError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, value


def test_a_captured_variable_can_be_read() -> None:
    """Rule 32."""

    def program(lib: Library) -> float:
        captured = lib.Param(jnp.array(3.0))

        @lib.jit
        def f(x: Any) -> Any:
            return captured[...] * x

        return value(f(jnp.array(2.0)))

    assert program(nnx) == 6.0
    assert program(ab) == 6.0
    assert program(mixed) == 6.0


def _write_a_value(m: Any, x: Any) -> None:
    m.w[...] += x


def _add_an_attribute(m: Any, x: Any) -> None:
    m.k = x


@pytest.mark.parametrize(
    ("write", "expected"), [(_write_a_value, (3.0, False)), (_add_an_attribute, (1.0, True))]
)
def test_a_write_to_a_captured_module_is_refused_by_nnx_and_made_here(
    write: Callable[[Any, Any], None], expected: tuple[float, bool]
) -> None:
    """Rule 32."""

    def program(lib: Library) -> tuple[Any, float, bool]:
        m = box(lib, w=lib.Param(jnp.array(1.0)))
        raised = outcome(lambda: lib.jit(lambda x: write(m, x))(jnp.array(2.0)))
        return raised, value(m.w), hasattr(m, "k")

    assert program(nnx) == (flax_errors.TraceContextError, 1.0, False)
    assert program(ab) == (None, *expected)  # R5
    assert program(mixed) == (None, *expected)


def test_deleting_from_a_captured_module_deletes() -> None:
    """Rule 32."""

    def program(lib: Library) -> tuple[Any, bool]:
        m = box(lib, w=lib.Param(jnp.array(1.0)))

        @lib.jit
        def f(x: Any) -> None:
            del m.w

        return outcome(lambda: f(jnp.array(2.0))), hasattr(m, "w")

    assert program(nnx) == (None, False)  # at trace time only, not when the call is cached
    assert program(ab) == (None, False)  # R5
    assert program(mixed) == (None, False)


def test_a_captured_object_does_not_come_back_as_a_copy() -> None:
    """Rule 32."""

    def program(lib: Library, captured: Any) -> Any:
        return outcome(lambda: lib.jit(lambda x: (captured, x))(jnp.array(2.0)))

    assert program(nnx, box(nnx, w=nnx.Param(1.0))) is ValueError
    assert program(nnx, nnx.Param(1.0)) is ValueError
    for m in (box(ab, w=ab.Param(1.0)), ab.Param(1.0), box(nnx, w=nnx.Param(1.0)), nnx.Param(1.0)):
        assert program(ab, m)[0] is m  # R3


def test_a_module_that_a_partial_holds_is_an_argument_only_here() -> None:
    """Rule 32."""

    def program(lib: Library) -> tuple[Any, float]:
        m = box(lib, w=lib.Param(jnp.array(1.0)))

        def f(m: Any, x: Any) -> Any:
            m.w[...] += x
            return m

        step = lib.jit(functools.partial(f, m))
        return outcome(lambda: step(jnp.array(2.0)) is m), value(m.w)

    assert program(nnx) == (flax_errors.TraceContextError, 1.0)
    assert program(ab) == (True, 3.0)  # R5, R3
    assert program(mixed) == (True, 3.0)


class _NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array(1.0))

    def __call__(self, x: Any) -> Any:
        self.w[...] += x
        return self.w[...]


class _Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.array(1.0))

    __call__ = _NnxModel.__call__


@pytest.mark.parametrize("as_method", [False, True])
def test_a_callable_module_or_bound_method_is_compiled_with_its_self_only_here(
    as_method: bool,
) -> None:
    """Rule 34."""

    def program(lib: Library) -> tuple[Any, float]:
        m = _Model() if lib is ab else _NnxModel()
        step = m.__call__ if as_method else m
        return outcome(lambda: value(lib.jit(step)(jnp.array(2.0)))), value(m.w)

    assert program(nnx) == (ValueError if as_method else flax_errors.TraceContextError, 1.0)
    assert program(ab) == (3.0, 3.0)  # R5: the self of a method is lifted
    assert program(mixed) == (3.0, 3.0)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_lanes_and_gradients_take_bound_methods_only_here(transform: str) -> None:
    """Rule 34."""

    def program(lib: Library) -> tuple[Any, float]:
        class Model(lib.Module):
            def __init__(self) -> None:
                self.n = lib.Variable(jnp.array(0.0))

            def square(self, x: Any) -> Any:
                self.n[...] += 1
                return x**2

        m = Model()
        x = jnp.array([3.0]) if transform == "vmap" else jnp.array(3.0)
        return outcome(lambda: value(getattr(lib, transform)(m.square)(x))), value(m.n)

    assert program(nnx) == (ValueError, 0.0)
    assert program(ab) == ([9.0] if transform == "vmap" else 6.0, 1.0)  # R5
    assert program(mixed) == ([9.0] if transform == "vmap" else 6.0, 1.0)


def test_an_object_made_inside_and_leaked_cannot_be_written() -> None:
    """Rule 33."""

    def program(lib: Library) -> tuple[Any, Any]:
        leaked: list[Any] = []

        @lib.jit
        def f(x: Any) -> Any:
            leaked.append(box(lib, w=lib.Param(x)))
            return x

        f(jnp.array(1.0))
        (m,) = leaked
        return outcome(lambda: setattr(m, "k", 1)), outcome(lambda: m.w + 1)

    tracer_error = jax.errors.UnexpectedTracerError
    assert program(nnx) == (flax_errors.TraceContextError, tracer_error)
    assert program(ab) == (CapturedWriteError, tracer_error)
    assert program(mixed) == (flax_errors.TraceContextError, tracer_error)


def test_the_inside_of_an_argument_that_leaked_says_so_only_here() -> None:
    """Rule 33."""

    def program(lib: Library) -> tuple[Any, Any]:
        leaked: list[Any] = []

        @lib.jit
        def f(m: Any) -> None:
            leaked.append(m)
            m.w[...] += 1

        f(box(lib, w=lib.Param(jnp.array(1.0))))
        (m,) = leaked
        return outcome(lambda: setattr(m, "k", 1)), outcome(lambda: m.w + 1)

    assert program(nnx) == (flax_errors.TraceContextError, jax.errors.UnexpectedTracerError)
    assert program(ab) == (SpentTwinError, SpentTwinError)  # no raw JAX error
    assert program(mixed) == (SpentTwinError, SpentTwinError)


def test_a_draw_from_captured_random_streams_counts() -> None:
    """Rule 33."""

    def program(lib: Library) -> tuple[Any, int]:
        rngs = lib.Rngs(0)

        @lib.jit
        def f(x: Any) -> Any:
            return jax.random.uniform(rngs()) + x

        return outcome(lambda: 0 <= f(1.0) - 1 <= 1), value(rngs.default.count)

    assert program(nnx) == (flax_errors.TraceContextError, 0)
    assert program(ab) == (True, 1)  # R5
    assert program(mixed) == (True, 1)


def test_an_update_of_a_captured_object_is_refused_by_nnx_and_made_here() -> None:
    """Rule 72."""

    def program(lib: Library) -> tuple[Any, float]:
        m = box(lib, w=lib.Param(jnp.array(1.0)))
        f = lib.jit(lambda x: lib.update(m, {"w": x}))
        return outcome(lambda: f(jnp.array(2.0))), value(m.w)

    assert program(nnx) == (flax_errors.TraceContextError, 1.0)
    assert program(ab) == (None, 2.0)  # R5
    assert program(mixed) == (None, 2.0)


def test_cached_partial_holds_a_copy_of_the_module_and_partial_the_module_itself() -> None:
    """Rule 44."""

    def program(lib: Library, bind: Any) -> tuple[list[float], bool, bool, int]:
        traces: list[int] = []
        m = box(lib, w=lib.Param(jnp.array(1.0)), scale=1)

        @lib.jit
        def f(m: Any, x: Any) -> Any:
            traces.append(1)
            m.w[...] += x
            return m, m.w[...] * m.scale

        step = bind(f, m)
        first, a = step(jnp.array(1.0))
        m.scale = 10
        second, b = step(jnp.array(1.0))
        return [value(a), value(b)], first is second, first is m, len(traces)

    # a static that changes outside is not seen
    assert program(nnx, nnx.cached_partial) == ([2.0, 3.0], True, False, 1)
    # R1: the plain call sees it; what makes calls cheap must not change a result
    assert program(ab, functools.partial) == ([2.0, 30.0], True, True, 2)
    assert program(mixed, functools.partial) == ([2.0, 30.0], True, True, 2)


def test_values_may_change_between_the_calls_of_a_bound_function() -> None:
    """Rule 45."""

    def program(lib: Library) -> tuple[list[float], int]:
        traces: list[int] = []
        m = box(lib, w=lib.Param(jnp.array(1.0)))

        def f(m: Any, x: Any) -> Any:
            traces.append(1)
            m.w[...] += x
            return m.w[...] * 2

        step = (
            nnx.jit_partial(f, m, graph=True, graph_updates=False)
            if lib is nnx
            else ab.jit(functools.partial(f, m))
        )
        results = [value(step(jnp.array(1.0)))]
        m.w[...] = jnp.array(10.0)
        results += [value(step(jnp.array(1.0))), value(m.w)]
        return results, len(traces)

    assert program(nnx) == ([4.0, 22.0, 11.0], 1)
    assert program(ab) == ([4.0, 22.0, 11.0], 1)
    assert program(mixed) == ([4.0, 22.0, 11.0], 1)


def test_one_variable_in_two_bound_modules_is_one_variable() -> None:
    """Rule 45."""

    def program(lib: Library, graph: bool = True) -> float:
        v = lib.Param(jnp.array(1.0))
        a, b = box(lib, w=v), box(lib, w=v)

        def f(a: Any, b: Any) -> None:
            a.w[...] += 1
            b.w[...] += 1

        if lib is nnx:
            nnx.jit_partial(f, a, b, graph=graph, graph_updates=False)()
        else:
            ab.jit(functools.partial(f, a, b))()
        return value(v)

    assert program(nnx) == 3.0
    assert outcome(lambda: program(nnx, graph=False)) is ValueError
    assert program(ab) == 3.0
    assert program(mixed) == 3.0
