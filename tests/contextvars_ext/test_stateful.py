"""Stateful nodes: ids, registration with JAX, reading and writing states."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch import contextvars_ext as cx
from anabranch.errors import (
    BehindBoundaryError,
    ContextValueNotSetError,
    MissingStateError,
    TraceLevelError,
)


class Counter(cx.StatefulNode[jax.Array], static=("label",)):
    def __init__(self, step, label="plain"):
        self.step = step
        self.label = label

    def tick(self):
        self.update_state(self.get_cur_state() + self.step)


@dataclasses.dataclass(frozen=True)
class Mean(cx.StatefulNode[dict[str, jax.Array]], static=("decay",)):
    scale: Any
    decay: float = 0.5

    def __call__(self, x):
        state = self.get_cur_state()
        mean = self.decay * state["mean"] + (1 - self.decay) * x.mean()
        self.update_state({"mean": mean, "seen": state["seen"] + 1})
        return (x - mean) * self.scale


def initial():
    return {"mean": jnp.zeros(()), "seen": jnp.zeros((), jnp.int32)}


def test_ids_differ_and_hash_and_sort():
    nodes = [Counter(1) for _ in range(5)]
    ids = [node.unique_id for node in nodes]
    assert len(set(ids)) == 5
    assert max(ids) == ids[-1]
    assert min(ids) == ids[0]
    assert all(repr(node_id).startswith("<node ") for node_id in ids)


def test_ids_differ_across_threads():
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: Counter(1).unique_id, range(400)))
    assert len(set(ids)) == 400


def test_ids_differ_across_a_fork():
    # In a process of its own: forking this one, with the threads of JAX, would warn.
    program = (
        "import os\n"
        "from anabranch.contextvars_ext._node_id import next_node_id\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(write, next_node_id().origin.encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "assert os.read(read, 99).decode() != next_node_id().origin\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "through",
    [
        lambda node: jax.tree.unflatten(jax.tree.structure(node), jax.tree.leaves(node)),
        lambda node: jax.tree.map(lambda x: x, node),
        jax.jit(lambda n: n),
        copy.copy,
        copy.deepcopy,
        lambda node: pickle.loads(pickle.dumps(node)),
        jax.device_get,
    ],
    ids=["unflatten", "map", "jit", "copy", "deepcopy", "pickle", "device_get"],
)
def test_an_id_survives(through):
    for node in (Counter(2.0, "named"), Mean(jnp.ones(2))):
        twin = through(node)
        assert twin is not node
        assert type(twin) is type(node)
        assert twin.unique_id == node.unique_id
        assert hash(twin.unique_id) == hash(node.unique_id)
    assert through(Counter(2.0, "named")).label == "named"
    np.testing.assert_allclose(through(Counter(2.0)).step, 2.0)


def test_children_are_the_attributes_that_are_not_static():
    counter = Counter(3)
    paths = jax.tree_util.tree_flatten_with_path(counter)[0]
    assert [(jax.tree_util.keystr(path), leaf) for path, leaf in paths] == [(".step", 3)]
    assert jax.tree.leaves(Mean(jnp.ones(2), 0.9))[0].shape == (2,)
    assert len(jax.tree.leaves(Mean(jnp.ones(2), 0.9))) == 1


def test_the_order_of_assignment_is_no_structure():
    class Pair(cx.StatefulNode[None]):
        pass

    one, other = Pair(), copy.copy(Pair())
    other.unique_id = one.unique_id
    one.a, one.b = 1, 2
    other.b, other.a = 2, 1
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.leaves(one) == jax.tree.leaves(other) == [1, 2]


def test_a_static_attribute_is_structure():
    node = Counter(1, "a")
    other = copy.copy(node)
    other.label = "b"
    assert jax.tree.structure(node) != jax.tree.structure(other)


def test_subclasses_inherit_static_names():
    class Special(Counter, static=("extra",)):
        pass

    node = Special(1.0, "label")
    node.extra = "extra"
    assert jax.tree.leaves(node) == [1.0]
    assert jax.tree.map(lambda x: x, node).extra == "extra"


def test_nodes_nest():
    outer = Counter(Counter(1.0))
    twin = jax.tree.map(lambda x: x + 1.0, outer)
    assert (twin.unique_id, twin.step.unique_id) == (outer.unique_id, outer.step.unique_id)
    assert twin.step.step == 2.0


def test_a_class_can_be_registered_by_hand():
    class Bare(cx.StatefulNode[int], register=False):
        pass

    node = Bare()
    assert jax.tree.leaves(node) == [node]
    with cx.set_state_dict_on_enter({node.unique_id: 1}):
        assert node.get_cur_state() == 1


def test_slots_and_a_bare_string_are_refused():
    with pytest.raises(TypeError, match="declares __slots__"):

        class Slotted(cx.StatefulNode[int]):
            __slots__ = ("x",)

    with pytest.raises(TypeError, match=r"static=\('label',\)"):

        class Named(cx.StatefulNode[int], static="label"):
            pass


def test_states_are_read_and_written_through_jit_with_one_trace():
    model = {"norm": Mean(jnp.array(2.0)), "counter": Counter(1)}
    traces = []

    @jax.jit
    def step(model, states, x):
        traces.append(1)
        with cx.set_state_dict_on_enter(states):
            model["counter"].tick()
            y = model["norm"](x)
            model["counter"].tick()
            return y, cx.get_state_dict()

    states = {
        model["norm"].unique_id: initial(),
        model["counter"].unique_id: jnp.zeros((), jnp.int32),
    }
    first = states
    y, states = step(model, states, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(y, [0.0, 4.0])
    y, states = step(model, states, jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(states[model["norm"].unique_id]["mean"], 1.5)
    np.testing.assert_allclose(y, [-1.0, 3.0])
    assert int(states[model["norm"].unique_id]["seen"]) == 2
    assert int(states[model["counter"].unique_id]) == 4
    assert int(first[model["counter"].unique_id]) == 0
    assert len(traces) == 1


def test_states_are_plumbed_in_and_out():
    counter = Counter(1)
    tick = cx.plumb_and_transform(
        lambda node: node.tick(),
        transform_to_apply=jax.jit,
        compute_extra_input_before=cx.get_state_dict,
        create_context_managers_after=lambda states: [cx.set_state_dict_on_enter(states)],
        compute_extra_output_after=cx.get_state_dict,
        consume_extra_output=lambda states: cx.get_state_dict().update(states),
    )
    with cx.set_state_dict_on_enter({counter.unique_id: jnp.array(0)}) as states:
        tick(counter)
        tick(counter)
    assert int(states[counter.unique_id]) == 2


def test_a_missing_state_is_an_error_that_lists_what_is_there():
    node, other = Counter(1), Counter(2)
    with cx.set_state_dict_on_enter({other.unique_id: 1}):
        with pytest.raises(MissingStateError, match=r"no state for a Counter \(<node") as info:
            node.get_cur_state()
        assert repr(other.unique_id) in str(info.value)
        assert "It has states for 1 nodes" in str(info.value)
        node.update_state(5)
        assert node.get_cur_state() == 5


def test_without_a_dictionary_and_behind_a_boundary_states_are_refused():
    node = Counter(1)
    with pytest.raises(ContextValueNotSetError, match="'state_dict'"):
        node.get_cur_state()
    states = {node.unique_id: 0}
    in_jit = pytest.raises(BehindBoundaryError, match="was read in jit of")
    with cx.set_state_dict_on_enter(states), in_jit:
        jax.jit(lambda n: n.tick())(node)
    assert states == {node.unique_id: 0}
    with pytest.raises(TypeError, match="mutable mapping, not None"):
        cx.set_state_dict_on_enter(None)


@pytest.mark.parametrize("transform", [jax.vmap, jax.grad], ids=["vmap", "grad"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_state_that_would_leak_out_of_a_transform_is_refused(transform, wrap):
    node = Counter(1.0)

    def leak(x):
        node.update_state(x * 2.0)
        return x

    def program(states, x):
        with cx.set_state_dict_on_enter(states):
            return transform(leak)(x)

    x = jnp.ones(2) if transform is jax.vmap else 1.0
    states = {node.unique_id: 0}
    with pytest.raises(TraceLevelError, match=r"belongs to (vmap|grad).* was set outside of it"):
        wrap(program)(states, x)
    assert states == {node.unique_id: 0}


def test_a_state_that_does_not_depend_on_the_transform_may_be_written_in_it():
    node = Counter(1.0)

    @jax.jit
    def program(states, x, y):
        with cx.set_state_dict_on_enter(states):

            def loss(x):
                node.update_state(node.get_cur_state() + y)
                return x**2

            return jax.grad(loss)(x), states

    gradient, states = program({node.unique_id: 1.0}, 3.0, 10.0)
    assert float(gradient) == 6.0
    assert float(states[node.unique_id]) == 11.0


def test_states_carry_gradients_and_lanes_when_the_dictionary_is_inside():
    node = Counter(1.0)

    def loss(step):
        with cx.set_state_dict_on_enter({node.unique_id: step * 2.0}) as states:
            node.update_state(node.get_cur_state() * step)
            return states[node.unique_id]

    np.testing.assert_allclose(jax.grad(loss)(3.0), 12.0)
    np.testing.assert_allclose(jax.vmap(loss)(jnp.arange(3.0)), [0.0, 2.0, 8.0])
