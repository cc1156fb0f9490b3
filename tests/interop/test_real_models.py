"""Whole trainings of flax models: by the transforms of flax and by ours, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import anabranch as ab
from tests.interop.models import TRAININGS, Training, batches
from tests.interop.programs import PROGRAMS

ALL = TRAININGS | PROGRAMS
STEPS = 20


def numbers(objects: Any) -> dict[Any, Any]:
    """Return all arrays of some objects by path; of random keys, their bits."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(objects)):
        x = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found[path] = np.asarray(x)
    return found


class Count:
    """Counts how often a function is called, which in a transform is how often it is traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def train(training: Training, lib: Any) -> tuple[tuple[Any, ...], list[float], int]:
    """Return the objects, the losses, and the number of traces."""
    objects = training.make()
    count = Count(training.step(lib))

    def step(*args: Any) -> Any:
        return count(*args)

    jitted = lib.jit(step)
    losses = [float(jitted(*objects, batch)) for batch in batches(training, STEPS)]
    return objects, losses, count.calls


@pytest.mark.parametrize("name", ALL)
def test_a_training_is_what_it_is_with_the_transforms_of_flax(name):
    theirs, expected, their_traces = train(ALL[name], nnx)
    ours, losses, traces = train(ALL[name], ab)
    np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=1e-5)
    assert len(set(losses)) == STEPS  # it moves
    state, expected_state = numbers(list(ours)), numbers(list(theirs))
    assert state.keys() == expected_state.keys()
    for path, x in expected_state.items():
        np.testing.assert_allclose(state[path], x, rtol=2e-3, atol=1e-4, err_msg=str(path))
    # (flax itself puts the attributes of a cell in order when it scans over it)
    assert traces == 1 + (name == "recurrent layers of flax")
    assert their_traces == 1
