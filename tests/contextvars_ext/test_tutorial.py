"""A walk through everything that the tutorial of context variables promises, with its numbers."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.contextvars_ext import (
    JitAwareContextVar,
    KeyStream,
    StatefulNode,
    get_next_key,
    get_state_dict,
    normal,
    plumb_and_transform,
    plumb_rng_key_and_jit,
    set_keystream_on_enter,
    set_state_dict_on_enter,
)

X = JitAwareContextVar("x")

EAGER = [-0.1265627, 0.41922864, -6.4566073, 25.958435]
COMPILED = [-0.12656265, 0.41922864, -6.456607, 25.958435]
KEYS_SEED, INPUTS = 42, np.arange(1.0, 5.0, dtype=np.float32)


def log_of_context():
    return jnp.log(X.get())


def squared(value):
    """Pure, although what it calls is not."""
    with X.set_on_enter(value):
        return log_of_context() ** 2


def test_reading_before_setting_raises():
    with pytest.raises(LookupError, match="No value is set"):
        X.get()


def test_setting_nesting_and_resetting():
    with X.set_on_enter(1):
        with X.set_on_enter(2):
            assert X.get() == 2
        assert X.get() == 1
    with pytest.raises(LookupError, match="No value is set"):
        X.get()


def test_mutable_values_are_mutated_in_place_and_reverting_gives_the_same_object():
    with X.set_on_enter([1]) as outer:
        X.get().append(2)
        with X.set_on_enter({"a": 1}):
            X.get()["b"] = 2
            assert X.get() == {"a": 1, "b": 2}
        with X.set_on_enter(X.get()):
            X.get().append(3)
        X.get().append(4)
        assert X.get() is outer
    assert outer == [1, 2, 3, 4]


def test_a_function_that_sets_what_it_reads_is_pure_and_traced_once():
    traces = []

    @jax.jit
    def jitted(value):
        traces.append(value)
        return squared(value)

    for value in np.arange(1.0, 11.0):
        np.testing.assert_allclose(jitted(value), np.log(value) ** 2, rtol=1e-6)
        np.testing.assert_allclose(squared(value), np.log(value) ** 2, rtol=1e-6)
    assert len(traces) == 1


def test_jitting_the_impure_function_is_refused():
    jitted = jax.jit(log_of_context)
    with X.set_on_enter(5.0), pytest.raises(LookupError, match=r"jit of log_of_context.*outside"):
        jitted()


def test_wrapping_twice_by_hand_works():
    traces = []

    @jax.jit
    def pure(value):
        traces.append(1)
        with X.set_on_enter(value):
            return log_of_context()

    for value in np.arange(1.0, 11.0):
        with X.set_on_enter(value):
            np.testing.assert_allclose(pure(X.get()), np.log(value), rtol=1e-6)
    assert len(traces) == 1


def test_plumb_and_transform_wraps_twice():
    traces = []

    @plumb_and_transform(
        transform_to_apply=jax.jit,
        compute_extra_input_before=lambda: X.get(),  # noqa: PLW0108 (as a user writes it)
        create_context_managers_after=lambda value: [X.set_on_enter(value)],
    )
    def plumbed():
        traces.append(1)
        return log_of_context()

    for value in jnp.arange(1.0, 11.0):
        with X.set_on_enter(value):
            np.testing.assert_allclose(plumbed(), np.log(value), rtol=1e-6)
    assert len(traces) == 1
    assert type(plumbed.__closure__[2].cell_contents).__name__ == "PjitFunction"


# Random keys: four draws per call, none with a key in sight.


def noise():
    return normal()


def noisy_sum(x):
    return x + jax.random.normal(get_next_key()) + noise()


def program(x):
    return x * noisy_sum(x) * noise()


def pure_program(x, key):
    with set_keystream_on_enter(KeyStream(key)):
        return program(x)


def keys():
    return jax.random.split(jax.random.key(KEYS_SEED), 4)


def test_eager_numbers():
    results = [pure_program(x, key) for x, key in zip(jnp.asarray(INPUTS), keys(), strict=True)]
    np.testing.assert_allclose(results, EAGER, rtol=1e-6)


def test_numbers_under_jit_with_one_trace():
    traces = []

    @jax.jit
    def jitted(x, key):
        traces.append(1)
        return pure_program(x, key)

    results = [jitted(x, key) for x, key in zip(jnp.asarray(INPUTS), keys(), strict=True)]
    np.testing.assert_allclose(results, COMPILED, rtol=1e-6)
    assert len(traces) == 1


def test_numbers_under_jit_of_vmap_with_one_trace():
    traces = []

    @jax.jit
    @jax.vmap
    def batched(x, key):
        traces.append(1)
        return pure_program(x, key)

    results = [batched(INPUTS[i : i + 2], keys()[i : i + 2]) for i in (0, 2)]
    np.testing.assert_allclose(np.concatenate(results), COMPILED, rtol=1e-6)
    assert len(traces) == 1


def test_jitting_without_tracing_over_the_key_is_refused():
    jitted = jax.jit(program)
    for context in (
        contextlib.nullcontext(),
        set_keystream_on_enter(KeyStream(jax.random.key(KEYS_SEED))),
    ):
        with context, pytest.raises(LookupError, match="plumb_rng_key_and_jit"):
            jitted(1.0)


def test_plumbing_the_key_gives_the_number_of_the_tutorial():
    # One level of keys more: key 0 of the stream outside is the base key inside.
    with set_keystream_on_enter(KeyStream(jax.random.key(KEYS_SEED))):
        result = plumb_rng_key_and_jit(program)(jnp.array(1.0))
    np.testing.assert_allclose(result, -0.12656265, rtol=1e-6)


class RunningSum(StatefulNode[jax.Array]):
    def __init__(self, weight):
        self.weight = weight

    def add(self, x):
        self.update_state(self.get_cur_state() + self.weight * x)
        return self.get_cur_state()


def test_states_of_nodes_are_plumbed_through_jit():
    nodes = [RunningSum(1.0), RunningSum(10.0)]

    @jax.jit
    def run(nodes, states, x):
        with set_state_dict_on_enter(states):
            return [node.add(x) for node in nodes], get_state_dict()

    states = {node.unique_id: jnp.zeros(()) for node in nodes}
    _, states = run(nodes, states, 2.0)
    sums, states = run(nodes, states, 3.0)
    np.testing.assert_allclose(sums, [5.0, 50.0])
    np.testing.assert_allclose([states[node.unique_id] for node in nodes], [5.0, 50.0])
