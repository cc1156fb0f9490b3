"""`vmap`: axes of shared objects, broadcast writes, layouts, structure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import AliasError, BroadcastWriteError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, raw, value


def test_one_object_with_two_axes_is_refused() -> None:
    """Rule 46."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.ones((2, 2))))
        f = lib.vmap(lambda a, b: a.w[...] + b.w[...], in_axes=(0, 1))
        return f(m, m)

    with pytest.raises(ValueError, match=r"Inconsistent aliasing"):
        program(nnx)
    # R4: both paths are named, with the arguments that they belong to
    with pytest.raises(AliasError, match=r"args\[0\]\.w and args\[1\]\.w .* given 0 .*second 1"):
        program(ab)
    with pytest.raises(AliasError, match=r"args\[0\]\.w and args\[1\]\.w .* given 0 .*second 1"):
        program(mixed)


def test_a_shared_child_with_two_axes_is_refused() -> None:
    """Rule 46."""

    def program(lib: Library) -> Any:
        shared = box(lib, w=lib.Param(jnp.ones((2, 2))))
        f = lib.vmap(lambda a, b: a.s.w[...] + b.s.w[...], in_axes=(0, None))
        return f(box(lib, s=shared), box(lib, s=shared))

    with pytest.raises(ValueError, match=r"Inconsistent aliasing"):
        program(nnx)
    with pytest.raises(AliasError, match=r"args\[0\]\.s\.w and args\[1\]\.s\.w"):
        program(ab)
    with pytest.raises(AliasError, match=r"args\[0\]\.s\.w and args\[1\]\.s\.w"):
        program(mixed)


def test_an_input_cannot_be_returned_along_another_axis() -> None:
    """Rule 46."""

    def program(lib: Library, **options: Any) -> bool:
        m = box(lib, w=lib.Param(jnp.ones((2, 2))))
        return lib.vmap(lambda m: m, in_axes=0, **options)(m) is m

    for lib, error in ((nnx, ValueError), (ab, AliasError)):
        assert program(lib)
        assert outcome(lambda lib=lib: program(lib, out_axes=1)) is error


def test_an_input_that_is_returned_needs_no_axis_here() -> None:
    """Rule 46."""

    def program(lib: Library) -> Any:
        v = lib.Param(jnp.arange(6.0).reshape(3, 2))
        return lib.vmap(lambda v: v, in_axes=1)(v) is v

    assert outcome(lambda: program(nnx)) is ValueError  # out_axes is 0 unless it is given
    assert program(ab)  # S6: it comes back along the axis that it was given
    assert program(mixed)


def test_a_broadcast_module_can_be_returned_only_here() -> None:
    """Rule 46."""

    def program(lib: Library) -> bool:
        m = box(lib, w=lib.Param(jnp.array(1.0)))
        return lib.vmap(lambda m, x: m, in_axes=(None, 0))(m, jnp.ones(3)) is m

    assert outcome(lambda: program(nnx)) is ValueError
    assert program(ab)  # R3: an input that is returned is the caller's object
    assert program(mixed)


def test_prefixes_that_are_written_differently_but_agree_are_accepted() -> None:
    """Rule 47."""

    def program(lib: Library) -> tuple[list[bool], list[Any]]:
        inside: list[bool] = []

        def f(a: Any, b: Any, c: Any) -> None:
            inside.append(a is b is c)
            a.w[...] += 1

        m = box(lib, w=lib.Param(jnp.ones((2, 1))))
        axes = (0, lib.StateAxes({...: 0}), lib.StateAxes({lib.Param: 0}))
        lib.vmap(f, in_axes=axes)(m, m, m)
        return inside, value(m.w)

    assert program(nnx) == ([True], [[2.0], [2.0]])
    assert program(ab) == ([True], [[2.0], [2.0]])
    assert program(mixed) == ([True], [[2.0], [2.0]])


def test_a_broadcast_variable_may_be_written_alike_in_all_lanes() -> None:
    """Rule 48."""

    def program(lib: Library) -> float:
        def f(m: Any, x: Any) -> None:
            m.w[...] += 1

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        lib.vmap(f, in_axes=(None, 0))(m, jnp.arange(3.0))
        return value(m.w)

    assert program(nnx) == 2.0
    assert program(ab) == 2.0
    assert program(mixed) == 2.0


def test_a_broadcast_variable_that_lanes_leave_different_is_refused_by_name() -> None:
    """Rule 48."""

    def program(lib: Library) -> None:
        def f(m: Any, x: Any) -> None:
            m.w[...] += x

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        try:
            lib.vmap(f, in_axes=(None, 0))(m, jnp.arange(3.0))
        finally:
            assert value(m.w) == 1.0

    with pytest.raises(ValueError, match=r"out_axes\[0\]\[0\]\.states\[0\]\['w'\]"):
        program(nnx)
    with pytest.raises(BroadcastWriteError, match=r"args\[0\]\.w\n"):  # as the caller knows it
        program(ab)
    with pytest.raises(BroadcastWriteError, match=r"args\[0\]\.w\n"):
        program(mixed)
    assert issubclass(BroadcastWriteError, ValueError)


def test_a_write_keeps_the_layout() -> None:
    """Rule 49."""

    def program(lib: Library) -> tuple[Any, Any]:
        def f(v: Any) -> Any:
            v[...] *= 2
            return v[...]

        v = lib.Param(jnp.arange(6.0).reshape(3, 2))
        return lib.vmap(f, in_axes=1)(v).shape, value(v)

    assert program(nnx) == ((2, 3), [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]])
    assert program(ab) == ((2, 3), [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]])
    assert program(mixed) == ((2, 3), [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]])


def test_kinds_choose_their_axes() -> None:
    """Rule 47."""

    def program(lib: Library) -> tuple[list[float], int]:
        def f(m: Any) -> None:
            m.n[...] += 1
            m.w[...] *= 2

        m = box(lib, w=lib.Param(jnp.arange(3.0)), n=lib.BatchStat(jnp.array(0)))
        lib.vmap(f, in_axes=(lib.StateAxes({lib.Param: 0, ...: None}),))(m)
        return value(m.w), value(m.n)

    assert program(nnx) == ([0.0, 2.0, 4.0], 1)
    assert program(ab) == ([0.0, 2.0, 4.0], 1)
    assert program(mixed) == ([0.0, 2.0, 4.0], 1)


def test_an_ensemble_is_made_by_mapping_over_random_streams() -> None:
    """Rule 50."""

    def program(lib: Library) -> tuple[Any, int, int]:
        rngs = lib.Rngs(0)
        keys = rngs.split(3) if lib is not ab else ab.Rngs(jax.random.split(rngs(), 3))
        make = lib.vmap(lambda r: box(lib, w=lib.Param(jax.random.normal(r(), (2,)))))
        w = make(keys).w
        return raw(w).shape, len({tuple(row) for row in value(w)}), value(rngs.default.count)

    assert program(nnx) == ((3, 2), 3, 1)
    assert program(ab) == ((3, 2), 3, 1)
    assert program(mixed) == ((3, 2), 3, 1)


def test_attributes_added_in_the_lanes_are_stacked() -> None:
    """Rule 49."""

    def program(lib: Library) -> tuple[list[float], str]:
        def f(m: Any) -> None:
            m.new = lib.Param(m.w[...] * 2)
            m.s = "x"

        m = box(lib, w=lib.Param(jnp.arange(3.0)))
        lib.vmap(f)(m)
        return value(m.new), m.s

    assert program(nnx) == ([0.0, 2.0, 4.0], "x")
    assert program(ab) == ([0.0, 2.0, 4.0], "x")
    assert program(mixed) == ([0.0, 2.0, 4.0], "x")


def test_attributes_swapped_in_the_lanes_are_swapped_outside() -> None:
    """Rule 49."""

    def program(lib: Library) -> tuple[bool, bool]:
        def swap(m: Any) -> None:
            m.a, m.b = m.b, m.a

        a, b = lib.Param(jnp.arange(3.0)), lib.Param(jnp.ones(3))
        m = box(lib, a=a, b=b)
        lib.vmap(swap)(m)
        return m.a is b, m.b is a

    assert program(nnx) == (True, True)
    assert program(ab) == (True, True)
    assert program(mixed) == (True, True)


def test_containers_of_axes_match_containers_of_objects() -> None:
    """Rule 47."""

    def program(lib: Library) -> tuple[list[float], float]:
        def f(d: Any) -> None:
            d["a"][...] *= d["b"][...]

        d = {"a": lib.Param(jnp.arange(3.0)), "b": lib.Param(jnp.array(2.0))}
        lib.vmap(f, in_axes=({"a": 0, "b": None},))(d)
        return value(d["a"]), value(d["b"])

    assert program(nnx) == ([0.0, 2.0, 4.0], 2.0)
    assert program(ab) == ([0.0, 2.0, 4.0], 2.0)
    assert program(mixed) == ([0.0, 2.0, 4.0], 2.0)


def test_new_objects_get_the_axes_that_filters_give_them() -> None:
    """Rule 50."""

    def program(lib: Library) -> tuple[Any, Any]:
        def f(x: Any) -> Any:
            return box(lib, w=lib.Param(x * jnp.ones(2)), n=lib.BatchStat(jnp.array(1.0)))

        axes = lib.StateAxes({lib.Param: 1, ...: None})
        m = lib.vmap(f, out_axes=axes)(jnp.arange(3.0))
        return value(m.w), value(m.n)

    assert program(nnx) == ([[0.0, 1.0, 2.0]] * 2, 1.0)
    assert program(ab) == ([[0.0, 1.0, 2.0]] * 2, 1.0)
    assert program(mixed) == ([[0.0, 1.0, 2.0]] * 2, 1.0)


def test_nested_lanes_may_write_what_only_the_outer_one_maps() -> None:
    """Rule 48."""

    def program(lib: Library) -> list[float]:
        def inner(m: Any, y: Any) -> None:
            m.w[...] += 1

        def outer(m: Any, x: Any) -> None:
            lib.vmap(inner, in_axes=(None, 0))(m, jnp.ones(4))
            m.w[...] += x

        m = box(lib, w=lib.Param(jnp.zeros(2)))
        lib.vmap(outer)(m, jnp.array([10.0, 20.0]))
        return value(m.w)

    assert program(nnx) == [11.0, 21.0]
    assert program(ab) == [11.0, 21.0]
    assert program(mixed) == [11.0, 21.0]


def test_keyword_arguments_that_can_only_be_named_are_mapped_only_here() -> None:
    """Rule 35."""

    def program(lib: Library) -> list[float]:
        def f(x: Any, *, m: Any) -> None:
            m.w[...] += x

        m = box(lib, w=lib.Param(jnp.arange(3.0)))
        lib.vmap(f)(jnp.ones(3), m=m)
        return value(m.w)

    assert outcome(lambda: program(nnx)) is TypeError
    assert program(ab) == [1.0, 2.0, 3.0]  # as in jax.vmap: along axis 0
    assert program(mixed) == [1.0, 2.0, 3.0]
