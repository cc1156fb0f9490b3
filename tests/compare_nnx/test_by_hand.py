"""The four steps by hand, around plain JAX transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, value


def _merging(lib: Library, *, inner: bool) -> Any:
    """Open a merge context; nnx has to be told which side it is on."""
    return nnx.merge_context("t", inner=inner) if lib is nnx else ab.merge_context("t")


def test_structure_changed_under_plain_jit_comes_back() -> None:
    """Rule 22."""

    def program(lib: Library) -> tuple[bool, bool, list[float]]:
        @jax.jit
        def inside(graphdef: Any, state: Any) -> Any:
            with _merging(lib, inner=True) as ctx:
                m = ctx.merge(graphdef, state)
            m.a, m.b = m.b, m.a
            m.a[...] += 1
            m.c = lib.Param(jnp.array(7.0))
            with lib.split_context("t") as ctx:
                return ctx.split(m)

        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.BatchStat(jnp.array(2.0)))
        a = m.a
        with lib.update_context("t"):
            with lib.split_context("t") as ctx:
                graphdef, state = ctx.split(m)
            graphdef, state = inside(graphdef, state)
            with _merging(lib, inner=False) as ctx:
                same = ctx.merge(graphdef, state)
        return same is m, m.b is a, [value(m.a), value(m.b), value(m.c)]

    assert program(nnx) == (True, True, [3.0, 1.0, 7.0])
    assert program(ab) == (True, True, [3.0, 1.0, 7.0])
    assert program(mixed) == (True, True, [3.0, 1.0, 7.0])


def test_structure_changed_under_plain_vmap_comes_back() -> None:
    """Rule 22."""

    def program(lib: Library) -> tuple[bool, bool, list[float]]:
        graphdefs: list[Any] = []

        def inside(state: Any) -> Any:
            with _merging(lib, inner=True) as ctx:
                m = ctx.merge(graphdefs[0], state)
            m.a, m.b = m.b, m.a
            m.a[...] += 1
            with lib.split_context("t") as ctx:
                graphdef, state = ctx.split(m)
            graphdefs.append(graphdef)
            return state

        m = box(lib, a=lib.Param(jnp.arange(2.0)), b=lib.BatchStat(jnp.ones(2)))
        a = m.a
        with lib.update_context("t"):
            with lib.split_context("t") as ctx:
                graphdef, state = ctx.split(m)
            graphdefs.append(graphdef)
            state = jax.vmap(inside)(state)
            with _merging(lib, inner=False) as ctx:
                same = ctx.merge(graphdefs[1], state)
        return same is m, m.b is a, value(m.a)

    assert program(nnx) == (True, True, [2.0, 2.0])
    assert program(ab) == (True, True, [2.0, 2.0])
    assert program(mixed) == (True, True, [2.0, 2.0])


def test_entering_the_context_again_does_not_trace_again() -> None:
    """Rule 18."""

    def program(lib: Library) -> tuple[float, int]:
        traces: list[int] = []

        @jax.jit
        def inside(graphdef: Any, state: Any) -> Any:
            traces.append(1)
            with _merging(lib, inner=True) as ctx:
                m = ctx.merge(graphdef, state)
            m.w[...] += 1
            with lib.split_context("t") as ctx:
                return ctx.split(m)

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        for _ in range(3):
            with lib.update_context("t"):
                with lib.split_context("t") as ctx:
                    parts = ctx.split(m)
                parts = inside(*parts)
                with _merging(lib, inner=False) as ctx:
                    ctx.merge(*parts)
        return value(m.w), len(traces)

    assert program(nnx) == (4.0, 1)
    assert program(ab) == (4.0, 1)
    assert program(mixed) == (4.0, 1)


def test_a_context_needs_its_update_context() -> None:
    """Rule 17."""

    def program(lib: Library) -> Any:
        def split() -> Any:
            with lib.split_context("nobody opened this") as ctx:
                return ctx.split(box(lib, w=lib.Param(jnp.ones(2))))

        return outcome(split)

    assert program(nnx) is ValueError
    assert program(ab) is ab.errors.ContextTagError
    assert program(mixed) is ab.errors.ContextTagError
