"""What a type checker says about context variables; pyright reads this file, nobody runs it."""

from __future__ import annotations

from typing import assert_type

import jax

import anabranch as ab

training = ab.JitAwareContextVar[bool]("training")
depth = ab.JitAwareContextVar("depth", default=0)
names = ab.JitAwareContextVar[list[str]]("names", default_factory=list)


def check_get() -> None:
    assert_type(training.get(), bool)
    assert_type(training.get(None), bool | None)
    assert_type(depth, ab.JitAwareContextVar[int])
    assert_type(names.get(), list[str])
    assert_type(training.name, str | None)


def check_set() -> None:
    with training.set_on_enter(True) as value:
        assert_type(value, bool)
    training.set_on_enter("yes")  # pyright: ignore[reportArgumentType] - a bool


@training.set_on_enter(False)
def evaluate(n: int) -> str:
    return str(n)


def check_decorator() -> None:
    assert_type(evaluate(1), str)
    evaluate("1")  # pyright: ignore[reportArgumentType] - the signature is kept
    assert_type(ab.get_next_key(), jax.Array)


def check_hoist() -> None:
    assert_type(ab.hoist(evaluate, 1), str)
    assert_type(ab.hoist_concrete(lambda: 3), int)
    ab.hoist(evaluate, "1")  # pyright: ignore[reportArgumentType] - the signature is kept
    with ab.hoisting():
        pass
