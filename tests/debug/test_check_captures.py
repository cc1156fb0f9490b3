"""`debug.check_captures` finds constants that changed, and is silent about inputs."""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import StaleCaptureError


class Layer(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.ones(2))
        self.rate = 0.5
        self.scale = jnp.ones(())


def check(function: Any, change: Any, match: str) -> None:
    with ab.debug.check_captures(function):
        pass
    with (
        pytest.raises(StaleCaptureError, match=match),
        ab.debug.check_captures(function),
    ):
        change()


def test_a_captured_array_that_is_another_one():
    scale = jnp.ones(2)

    def change():
        nonlocal scale
        scale = jnp.zeros(2)

    check(ab.jit(lambda x: x * scale), change, r"scale: was array float32\[2\]")


def test_a_numpy_array_that_was_written():
    table = np.ones(2)
    check(ab.vmap(lambda x: x * table), lambda: table.fill(3.0), "table: was numpy")


def test_lists_and_dicts_without_objects():
    table: dict[str, Any] = {"rates": [1, 2]}
    step = ab.jit(lambda x: x * table["rates"][0])
    check(step, lambda: table["rates"].append(3), r"table\['rates'\]\[2\]: was <absent>, is 3")
    check(step, lambda: table["rates"].__setitem__(0, True), r"\[0\]: was 1, is True")


def test_attributes_of_instances_that_are_no_nodes():
    config = types.SimpleNamespace(rate=0.1, layer=Layer())
    step = ab.jit(lambda x: x * config.rate * config.layer.w * config.layer.scale)
    check(step, lambda: setattr(config, "rate", 0.2), "config.rate: was 0.1, is 0.2")
    check(step, lambda: setattr(config.layer, "rate", 9), "config.layer.rate: was 0.5, is 9")
    check(step, lambda: setattr(config.layer, "scale", jnp.zeros(())), "config.layer.scale")


def test_helpers_and_methods():
    rates = [1.0]

    def helper(x):
        return x * rates[0]

    class Net(ab.Module):
        def step(self, x):
            return helper(x)

    check(ab.jit(Net().step), lambda: rates.__setitem__(0, 2.0), r"helper.rates\[0\]")


def test_inputs_may_change():
    layer, held = Layer(), [Layer()]
    config = types.SimpleNamespace(layer=Layer())
    step = ab.jit(lambda x: x * layer.w * layer.rate * held[0].w * config.layer.w)
    with ab.debug.check_captures(step):
        layer.w.value = layer.w + 1
        layer.rate = 2.0
        held.append(Layer())
        config.layer.w.value = config.layer.w + 1
        step(1.0)


def test_an_exception_in_the_block_is_the_one_that_is_seen():
    rates = [1.0]
    step = ab.jit(lambda x: x * rates[0])
    with pytest.raises(KeyError), ab.debug.check_captures(step):
        rates[0] = 2.0
        raise KeyError("mine")


def test_messages_are_bounded():
    table = {f"{'x' * 500}{i}": i for i in range(1000)}
    step = ab.jit(lambda x: x * len(table))
    with pytest.raises(StaleCaptureError) as info, ab.debug.check_captures(step):
        table.update(dict.fromkeys(table, -1))
    assert len(str(info.value)) < 4000
