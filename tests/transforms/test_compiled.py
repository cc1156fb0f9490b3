"""The number of outputs of a compiled function tells which report belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import anabranch as ab

SIZES = (2, 3, 4, 5)


class Model(ab.Module):
    def __init__(self) -> None:
        self.total = ab.Variable(jnp.array(0.0))
        self.mode, self.new = "none", None


def write(model: Any, x: Any) -> Any:
    """Return as many arrays for each size, and do something else to the model."""
    model.total.value += x.sum()
    if x.size == 2:
        model.mode = "two"
    elif x.size == 3:
        model.new = ab.Param(x * 2)
        return x
    elif x.size == 4:
        del model.new
        model.new = [model.total]
    return x + 1


def described(model: Any) -> list[Any]:
    new = model.new
    held = [float(new.value.sum())] if isinstance(new, ab.Param) else new is not None
    aliased = isinstance(new, list) and new[0] is model.total
    return [float(model.total.value), model.mode, type(new).__name__, held, aliased]


def of_a_mesh(function: Any) -> Any:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return ab.jit(function, out_shardings=NamedSharding(mesh, PartitionSpec()))


JITS: dict[str, Callable[[Any], Any]] = {
    "jit": ab.jit,
    "donating": lambda f: ab.jit(f, donate="written"),
    "in several groups": of_a_mesh,
}


@pytest.mark.parametrize("make", JITS.values(), ids=JITS.keys())
def test_each_size_does_what_it_did_when_it_was_traced(make: Any) -> None:
    jitted = make(write)
    model, twin = Model(), Model()
    for turn in range(8):
        for size in (*SIZES, *[SIZES[turn % 4]] * 5):
            x = jnp.arange(float(size))
            found, expected = jitted(model, x), write(twin, x)
            assert jnp.array_equal(found, expected)
            assert described(model) == described(twin)


def test_nothing_but_arrays_comes_out() -> None:
    jitted = ab.jit(write)
    model = Model()
    for size in SIZES:
        lowered = jitted.lower(model, jnp.arange(float(size)))
        assert len(jax.tree.leaves(lowered.out_info)) == 2
        assert jnp.array_equal(
            lowered.compile()(Model(), jnp.arange(float(size))),
            jnp.arange(float(size)) + (size != 3),
        )


def test_outputs_do_not_grow_when_a_function_is_traced_again() -> None:
    jitted = ab.jit(write)
    lengths: list[list[int]] = []
    for _ in range(3):
        jax.clear_caches()
        found: list[int] = []
        for size in SIZES:
            info = jitted.lower(Model(), jnp.arange(float(size))).out_info
            found.append(len(info))
        lengths.append(found)
    assert lengths[0] == lengths[1] == lengths[2]
    assert len({*lengths[0]}) == len(SIZES)
