"""A function that is kept is not stale: what it captures is compared (C38)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms

SPEC = jax.sharding.PartitionSpec("i")


def sharded(f: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    return transforms.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC)


KEEPING = {
    "remat": transforms.remat,
    "gradient of remat": lambda f: transforms.grad(lambda x: transforms.remat(f)(x).sum()),
    "lift": transforms.lift(jax.checkpoint),
    "pmap": transforms.pmap,
    "shard_map": sharded,
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("kind", ["Variable", "list", "array"])
def test_a_captured_value_is_read_afresh(name, kind):
    held: Any = {"Variable": ab.Variable(jnp.array(1.0)), "list": [1.0], "array": None}[kind]
    one = jnp.array(1.0)

    def f(x):
        return x * (held.value if kind == "Variable" else held[0] if kind == "list" else one)

    run = KEEPING[name](f)
    before = run(jnp.ones(8))
    if kind == "Variable":
        held.value = jnp.array(5.0)
    elif kind == "list":
        held[0] = 5.0
    else:
        one = jnp.array(5.0)
    assert (run(jnp.ones(8)) == 5 * before).all()


@pytest.mark.parametrize("name", ["remat", "lift", "pmap", "shard_map"])
def test_what_captures_the_same_is_traced_once(name):
    traces: list[int] = []
    scale = jnp.array(2.0)

    def f(x):
        traces.append(1)
        return x * scale

    run = KEEPING[name](f)
    for _ in range(4):
        run(jnp.ones(8))
    assert len(traces) == 1
