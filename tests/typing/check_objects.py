"""What a type checker says about objects and their state; pyright reads this, nobody runs it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, assert_type

import jax

import anabranch as ab


class Scale(ab.Param):
    """A kind of the user's own."""


@ab.node
class Plain:
    def __init__(self, n: int) -> None:
        self.n = n


def check_variable(x: jax.Array) -> None:
    scale = Scale(x, unit="m")
    assert_type(scale.value, Any)
    assert_type(scale.replace(x), Scale)
    assert_type(scale.get_metadata(), dict[str, Any])
    assert_type(scale.unit, Any)
    scale.value = x * 2
    scale[0] = 1.0
    assert_type(float(scale), float)


def check_operators(x: jax.Array) -> None:
    scale = Scale(x)
    assert_type(scale * 2, Any)
    assert_type(2 * scale, Any)
    assert_type(-scale, Any)
    assert_type(abs(scale), Any)
    assert_type(scale == 2, Any)
    assert_type(scale < 2, Any)
    scale += x
    assert_type(scale, Scale)


def check_nodes(plain: Plain) -> None:
    assert_type(Plain(1).n, int)
    assert_type(ab.clone(plain), Plain)
    assert_type(ab.iter_nodes(plain), Iterator[tuple[tuple[Hashable, ...], Any]])
    assert_type(ab.equal(plain, plain), bool)
    assert_type(ab.graphdef(plain), ab.GraphDef)


def check_state(x: jax.Array) -> None:
    state = ab.State.from_flat({("w",): x}, kinds=ab.Param)
    assert_type(state, ab.State)
    assert_type(state["w"], Any)
    assert_type(jax.tree.map(lambda y: y, state), Any)
    ab.State.from_flat({"w": x})  # pyright: ignore[reportArgumentType] - paths are tuples
