"""Threads that find hidden Variables of flax, beside threads that use flax and nothing else."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab

ROUNDS = 12


def count(transform: Callable[[Any], Any]) -> Callable[[], None]:
    hidden = types.SimpleNamespace(v=nnx.Variable(jnp.array(0.0)))

    def work() -> None:
        for n in range(ROUNDS):

            def f(x):
                hidden.v[...] += x
                return hidden.v[...] * 1

            assert float(transform(f)(1.0)) == n + 1 == float(hidden.v[...])

    return work


def read() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    expected = model(jnp.ones(2))
    for _ in range(ROUNDS):
        assert jnp.allclose(ab.jit(lambda model, x: model(x))(model, jnp.ones(2)), expected)


def use_flax() -> None:
    mine = nnx.Variable(jnp.array(0.0))
    for n in range(ROUNDS):
        mine[...] += 1
        mine.set_metadata(n=n)
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        model.extra = nnx.Param(jnp.ones(2))
        nnx.jit(lambda v: v.set_value(v[...]))(mine)
        assert float(mine[...]) == n + 1
        assert mine.n == n


WORK = [
    count(ab.jit),
    count(lambda f: lambda x: ab.capture(f)(x)[0]),
    count(lambda f: lambda x: ab.value_and_grad(f)(x)[0]),
    read,
    use_flax,
    use_flax,
]


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_nobody_sees_what_another_thread_traces(frequent_switches):
    slots = [vars(nnx.Variable)[name] for name in nnx.Variable.__slots__]
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in WORK]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert [vars(nnx.Variable)[name] for name in nnx.Variable.__slots__] == slots
