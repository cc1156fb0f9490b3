"""States, Variables and GraphDefs of flax as arguments: followed, and any change is seen."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch as ab
from tests.transforms.plan_worlds import Walks


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.count = nnx.Variable(jnp.array(0))


def look(*things: Any) -> tuple[str, Any]:
    """Return all that can be seen of States and Variables: structure as text, arrays as a sum."""
    text: list[str] = []
    total: Any = jnp.zeros(())
    seen: dict[int, int] = {}

    def visit(x: Any) -> None:
        nonlocal total
        if isinstance(x, jax.Array):
            text.append(f"{x.shape}{x.dtype}")
            total = total + len(text) * x.astype(float).sum()
        elif isinstance(x, (nnx.Variable, nnx.State, dict, list)):
            if id(x) in seen:
                text.append(f"#{seen[id(x)]}")
                return
            seen[id(x)] = len(seen)
            text.append(f"{type(x).__name__}(")
            if isinstance(x, nnx.Variable):
                text.append(repr([*x.get_metadata().items()]))
                visit(x[...])
            else:
                held = x.raw_mapping if isinstance(x, nnx.State) else x
                for key, y in held.items() if isinstance(held, dict) else enumerate(held):
                    text.append(f"{key!r}=")
                    visit(y)
            text.append(")")
        elif isinstance(x, nnx.GraphDef):
            text.append(str(hash(x)))
        else:
            text.append(repr(x))

    for thing in things:
        visit(thing)
    return " ".join(text), total


def same(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1])


def world() -> list[Any]:
    graphdef, state = nnx.split(Net())
    variables = [nnx.Param(jnp.full(2, float(i)), tag="x") for i in range(10)]
    return [graphdef, state, nnx.BatchStat(jnp.ones(2)), variables]


def write(rng: random.Random, args: list[Any]) -> str:
    _, state, variable, variables = args
    held = state.raw_mapping
    layer = held["layers"][0]
    return rng.choice(
        [
            lambda: variable.set_value(jnp.full(2, float(rng.randrange(9)))) or "a value",
            lambda: variable.set_value(jnp.ones((rng.randrange(1, 4), 2))) or "another shape",
            lambda: variable.set_metadata("tag", rng.choice([1, True, "a"])) or "metadata",
            lambda: variables[3].set_metadata("tag", rng.choice(["x", "y"])) or "metadata",
            lambda: variables.append(nnx.Param(jnp.ones(2), tag="x")) or "one more",
            lambda: variables.__setitem__(1, variables[rng.randrange(3)]) or "an alias",
            lambda: variables.reverse() or "the other way round",
            lambda: layer["kernel"].set_value(jnp.ones((2, 2))) or "a value in the State",
            lambda: layer.update(extra=nnx.Param(jnp.ones(2))) or "one more in the State",
            lambda: layer.pop("extra", None) and "one less",
            lambda: layer.update(bias=layer.pop("bias")) or "another order",
            lambda: held["layers"].update({rng.choice(["x", 7]): "text"}) or "a key",
            lambda: args.__setitem__(0, nnx.split(Net())[0]) or "an equal GraphDef",
            lambda: args.__setitem__(0, nnx.split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))[0]),
            lambda: args.__setitem__(2, nnx.Param(jnp.ones(2))) or "another class",
        ]
    )()


@pytest.mark.parametrize("seed", range(4))
def test_random_writes_between_calls_are_seen(seed):
    rng = random.Random(seed)
    jitted = ab.jit(look)
    args, history = world(), list[Any]()
    for _ in range(30):
        for _ in range(3):
            assert same(jitted(*args), look(*args)), history
        history.append(write(rng, args))


def test_calls_are_followed(monkeypatch):
    walks = Walks(monkeypatch)
    args = world()
    jitted = ab.jit(look)
    for _ in range(3):
        jitted(*args)
    assert jitted._followers
    monkeypatch.setattr(type(jitted._plans), "call", None)  # followers do not ask it
    assert walks.of(jitted, *args) == 0


def test_what_a_call_writes_is_written():
    def step(variable, state, x):
        variable[...] += x
        kernel = state["layers"][1]["kernel"]
        kernel[...] = kernel[...] * x
        return {"loss": variable[...].sum()}

    jitted = ab.jit(step)
    ours, plain = world(), world()
    for i in range(6):
        found = jitted(ours[2], ours[1], float(i))
        expected = step(plain[2], plain[1], float(i))
        np.testing.assert_allclose(found["loss"], expected["loss"])
        assert same(look(*ours[1:]), look(*plain[1:]))
    assert jitted._followers
