"""Random streams: what they are, and how lanes share or split them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import SharedStreamError
from tests.compare_nnx.worlds import Library, key_data, mixed, value


def test_both_give_out_the_same_keys() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[list[Any], list[int]]:
        rngs = lib.Rngs(0, params=1)
        keys = [key_data(k) for k in (rngs(), rngs(), rngs.params(), rngs.dropout())]
        return keys, [value(rngs.default.count), value(rngs.params.count)]

    expected = [
        jax.random.fold_in(jax.random.key(s), n) for s, n in ((0, 0), (0, 1), (1, 0), (0, 2))
    ]
    assert program(nnx) == ([key_data(k) for k in expected], [3, 1])
    assert program(ab) == ([key_data(k) for k in expected], [3, 1])
    assert program(mixed) == ([key_data(k) for k in expected], [3, 1])


def test_a_draw_under_jit_advances_the_stream_outside() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[list[Any], int, int]:
        traces: list[int] = []

        @lib.jit
        def draw(rngs: Any) -> Any:
            traces.append(1)
            return rngs()

        rngs = lib.Rngs(0)
        keys = [key_data(draw(rngs)) for _ in range(3)]
        return keys, value(rngs.default.count), len(traces)

    expected = [key_data(jax.random.fold_in(jax.random.key(0), n)) for n in range(3)]
    assert program(nnx) == (expected, 3, 1)
    assert program(ab) == (expected, 3, 1)
    assert program(mixed) == (expected, 3, 1)


def _draw(rngs: Any, x: Any) -> Any:
    return jax.random.key_data(rngs())


def test_a_stream_that_is_broadcast_gives_one_key_in_nnx_and_an_error_here() -> None:
    """Rule 52."""
    rngs = nnx.Rngs(0)
    first, second = value(nnx.vmap(_draw, in_axes=(None, 0))(rngs, jnp.arange(2)))
    assert (first == second, value(rngs.default.count)) == (True, 1)

    # DESIGN.md section 5, R4: no two lanes share a dropout mask by accident
    ours = ab.Rngs(0)
    with pytest.raises(SharedStreamError, match=r"args\[0\]\.default"):
        ab.vmap(_draw, in_axes=(None, 0))(ours, jnp.arange(2))
    assert value(ours.default.count) == 0


def test_a_key_drawn_before_the_lanes_can_be_shared_in_both() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[bool, int]:
        rngs = lib.Rngs(0)
        draw = lib.vmap(lambda key, x: jax.random.uniform(key) + x, in_axes=(None, 0))
        a, b = value(draw(rngs(), jnp.zeros(2)))
        return a == b, value(rngs.default.count)

    assert program(nnx) == (True, 1)
    assert program(ab) == (True, 1)
    assert program(mixed) == (True, 1)


def test_a_stream_that_is_split_gives_each_lane_its_own_keys() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[bool, list[int], int]:
        rngs = lib.Rngs(0)
        lanes = rngs.split(2) if lib is not ab else ab.Rngs(jax.random.split(rngs(), 2))
        first, second = value(lib.vmap(_draw)(lanes, jnp.arange(2)))
        return first == second, value(lanes.default.count), value(rngs.default.count)

    assert program(nnx) == (False, [1, 1], 1)
    assert program(ab) == (False, [1, 1], 1)
    assert program(mixed) == (False, [1, 1], 1)


def test_after_split_lanes_the_stream_outside_has_its_key_and_one_draw_more() -> None:
    """Rule 51."""
    rngs = nnx.Rngs(0)
    key = key_data(rngs.default.key[...])
    first, second = value(nnx.split_rngs(splits=2)(nnx.vmap(_draw))(rngs, jnp.arange(2)))
    assert (first == second, value(rngs.default.count)) == (False, 1)
    assert key_data(rngs.default.key[...]) == key

    # R4: no decorator; that the keys of the lanes are one draw, split, stands in the program
    ours = ab.Rngs(0)
    lanes = ab.Rngs(jax.random.split(ours(), 2))
    assert value(ab.vmap(_draw)(lanes, jnp.arange(2))) == [first, second]
    assert value(ours.default.count) == 1
    assert key_data(ours.default.key.value) == key


def test_only_the_stream_that_lanes_draw_from_has_to_be_split() -> None:
    """Rule 52."""

    def program(lib: Library) -> tuple[bool, Any, Any]:
        if lib is not ab:
            rngs = nnx.Rngs(params=0, dropout=1).split({"dropout": 2})
        else:
            rngs = ab.Rngs(params=0, dropout=jax.random.split(jax.random.key(1), 2))

        def f(rngs: Any, x: Any) -> Any:
            return jax.random.key_data(rngs.dropout())

        by_tag = lib.StateAxes({"dropout": 0, ...: None})
        first, second = value(lib.vmap(f, in_axes=(by_tag, 0))(rngs, jnp.arange(2)))
        return first == second, value(rngs.params.count), value(rngs.dropout.count)

    assert program(nnx) == (False, 0, [1, 1])
    assert program(ab) == (False, 0, [1, 1])
    assert program(mixed) == (False, 0, [1, 1])


def test_a_clone_of_a_stream_draws_on_its_own() -> None:
    """Rule 2."""

    def program(lib: Library) -> tuple[bool, int, int]:
        rngs = lib.Rngs(0)
        twin = lib.clone(rngs)
        a, b = key_data(rngs()), key_data(twin())
        twin()
        return a == b, value(rngs.default.count), value(twin.default.count)

    assert program(nnx) == (True, 1, 2)
    assert program(ab) == (True, 1, 2)
    assert program(mixed) == (True, 1, 2)


def test_a_forked_stream_leaves_the_original_advanced_by_one() -> None:
    """Rule 50."""

    def program(lib: Library) -> tuple[int, int, bool]:
        rngs = lib.Rngs(0)
        forked = rngs.fork() if lib is not ab else ab.Rngs(rngs())
        forked(), forked()
        return (
            value(rngs.default.count),
            value(forked.default.count),
            key_data(forked()) == key_data(rngs()),
        )

    assert program(nnx) == (1, 2, False)
    assert program(ab) == (1, 2, False)
    assert program(mixed) == (1, 2, False)
