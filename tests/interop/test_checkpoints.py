"""A State goes to disk and comes back: through orbax as it is, and through `np.savez` by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import StructureError
from anabranch.interop import from_named_arrays, to_named_arrays


class Layer(ab.Module):
    def __init__(self, seed: int) -> None:
        self.w = ab.Param(jax.random.normal(jax.random.key(seed), (2, 3)))
        self.mean = ab.BatchStat(jnp.full(3, float(seed)))


class Model(ab.Module):
    def __init__(self, seed: int) -> None:
        self.layers = [Layer(seed), Layer(seed + 1)]
        self.tied = self.layers[0]
        self.steps = ab.Variable(jnp.array(seed))


def flax_model(seed: int) -> Any:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))


MODELS = {"ours": Model, "flax": flax_model}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


def numbers(model: Any) -> dict[Any, Any]:
    return {path: np.asarray(leaf).tolist() for path, leaf in ab.state(model).flat().items()}


def standard(path: Any, ocp: Any) -> tuple[Any, Any]:
    checkpointer = ocp.StandardCheckpointer()

    def save(tree: Any) -> None:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()

    return save, lambda like: checkpointer.restore(path / "state", like)


def pytree(path: Any, ocp: Any) -> tuple[Any, Any]:
    checkpointer = ocp.PyTreeCheckpointer()

    def restore(like: Any) -> Any:
        how = ocp.checkpoint_utils.construct_restore_args(like)
        return checkpointer.restore(path / "state", item=like, restore_args=how)

    return lambda tree: checkpointer.save(path / "state", tree), restore


def manager(path: Any, ocp: Any) -> tuple[Any, Any]:
    manager = ocp.CheckpointManager(path)

    def save(tree: Any) -> None:
        manager.save(3, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()

    def restore(like: Any) -> Any:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))

    return save, restore


class TestOrbax:
    @pytest.fixture
    def ocp(self):
        return pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")

    @pytest.fixture(params=[standard, pytree, manager])
    def orbax(self, request, ocp, tmp_path):
        return request.param(tmp_path, ocp)

    @pytest.fixture
    def checkpointer(self, ocp):
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer

    def test_a_state_is_saved_and_restored_as_it_is(self, make, orbax):
        save, restore = orbax
        model, other = make(0), make(5)
        save(ab.state(model))
        restored = restore(ab.state(other))
        assert restored == ab.state(model)
        ab.update(other, restored)
        assert numbers(other) == numbers(model)

    def test_states_in_other_trees_and_in_states_of_optax(self, make, orbax):
        optax = pytest.importorskip("optax", reason="optax is not installed")
        save, restore = orbax
        tx = optax.adam(0.1)
        params = ab.state(make(0), ab.Param)
        _, moved = tx.update(params, tx.init(params))
        save({"params": params, "moved": moved, "step": jnp.array(7)})
        blank = jax.tree.map(jnp.zeros_like, {"params": params, "moved": moved, "step": 0})
        restored = restore(blank)
        assert restored["params"] == params
        assert restored["moved"][0].mu == moved[0].mu
        assert restored["step"] == 7

    def test_random_keys_and_small_floats(self, orbax):
        def build(seed: int) -> Any:
            return [ab.Rngs(seed, noise=jax.random.key(seed, impl="rbg")), ab.Param(small(seed))]

        def small(seed: int) -> Any:
            return jnp.full(2, seed, jnp.bfloat16)

        save, restore = orbax
        old, new = build(1), build(2)
        save(ab.state(old))
        ab.update(new, restore(ab.state(new)))
        assert new[0]() == old[0]()
        assert new[0].noise() == old[0].noise()
        assert new[1].value.dtype == jnp.bfloat16
        assert new[1].value.tolist() == [1, 1]

    def test_a_model_is_restored_without_having_been_made(self, make, checkpointer, tmp_path):
        model = make(0)
        checkpointer.save(tmp_path / "state", ab.state(model))
        checkpointer.wait_until_finished()
        graphdef, shapes = ab.split(ab.eval_shape(lambda: make(5)))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        like = jax.tree.map(lambda x: x.update(sharding=device), shapes)
        restored = ab.merge(graphdef, checkpointer.restore(tmp_path / "state", like))
        assert numbers(restored) == numbers(model)
        assert {leaf.sharding for leaf in ab.state(restored).leaves} == {device}

    def test_a_part_is_restored_by_filter(self, make, orbax):
        save, restore = orbax
        model, other = make(0), make(5)
        before = ab.state(other, ab.Not(ab.Param))
        save(ab.state(model))
        ab.update(other, restore(ab.state(other)).filter(ab.Param))
        assert ab.state(other, ab.Param) == ab.state(model, ab.Param)
        assert ab.state(other, ab.Not(ab.Param)) == before

    @pytest.mark.filterwarnings("ignore:Sharding info not provided")
    def test_a_part_of_a_file_is_read(self, make, ocp, tmp_path):
        model, other = make(0), make(5)
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", ab.state(model))
            args = ocp.args.PyTreeRestore(ab.state(other, ab.Param), partial_restore=True)
            params = checkpointer.restore(tmp_path / "state", args=args)
        assert params == ab.state(model, ab.Param)

    def test_a_checkpoint_of_another_model_is_refused_by_name(self, checkpointer, tmp_path):
        model = Model(0)
        checkpointer.save(tmp_path / "state", ab.state(model))
        checkpointer.wait_until_finished()
        del model.layers[1].w
        model.late = ab.Param(jnp.array(1.0))
        with pytest.raises(ValueError, match=r"(?s)late.*layers/1/w"):
            checkpointer.restore(tmp_path / "state", ab.state(model))

    def test_without_a_like_the_arrays_come_back_by_name(self, make, checkpointer, tmp_path):
        model, other = make(0), make(5)
        state = ab.state(model, ab.Not(ab.RngKey))
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        named = checkpointer.restore(tmp_path / "state")
        assert sorted(named) == sorted(to_named_arrays(state))
        ab.update(other, from_named_arrays(named, like=ab.state(other, ab.Not(ab.RngKey))))
        assert numbers(other) == numbers(model)

    def test_nested_dicts_are_restored_into_their_like(self, make, checkpointer, tmp_path):
        model, other = make(0), make(5)
        checkpointer.save(tmp_path / "state", ab.state(model).to_dict())
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", ab.state(other).to_dict())
        ab.update(other, restored)
        assert numbers(other) == numbers(model)


def test_a_checkpoint_of_another_model_is_refused_by_name():
    model = Model(0)
    named = to_named_arrays(ab.state(model))
    del model.layers[1].w
    model.late = ab.Param(jnp.array(1.0))
    with pytest.raises(StructureError, match=r"late is missing\n.*layers/1/w belongs to no leaf"):
        from_named_arrays(named, like=ab.state(model))


def test_a_state_goes_through_a_file_of_numpy(make, tmp_path):
    model, other = make(0), make(5)
    np.savez(tmp_path / "state.npz", **to_named_arrays(ab.state(model)))
    with np.load(tmp_path / "state.npz") as found:
        ab.update(other, from_named_arrays(found, like=ab.state(other)))
    assert numbers(other) == numbers(model)


def test_random_keys_and_small_floats_go_through_a_file_of_numpy(tmp_path):
    def build(seed: int) -> Any:
        key = jax.random.key(seed, impl="rbg")
        return [ab.Rngs(key), ab.Param(jnp.full(2, seed, jnp.bfloat16))]

    old, new = build(0), build(1)
    np.savez(tmp_path / "state.npz", **to_named_arrays(ab.state(old)))
    with np.load(tmp_path / "state.npz") as found:
        ab.update(new, from_named_arrays(found, like=ab.state(new)))
    assert new[0]() == old[0]()
    assert new[1].value.dtype == jnp.bfloat16
    assert new[1].value.tolist() == [0, 0]


class Place:
    """A key that nothing tells from another one."""

    def __repr__(self) -> str:
        return "Place"


PLACES = Place(), Place()


def test_names_are_readable_and_no_two_are_alike():
    assert list(to_named_arrays(ab.state(Model(0)))) == [
        "layers/0/w",
        "layers/0/mean",
        "layers/1/w",
        "layers/1/mean",
        "steps",
    ]
    keys = [1, "1", 2.5, "2.5", (1, 2), "(1, 2)", "a", "'a'", "a/b", "_a", "_a/b", "", "-", None]
    nested = {key: ab.Param(float(i)) for i, key in enumerate(keys)}
    state = ab.state({"a": nested, "b": {"c": ab.Param(1.0)}, "b/c": ab.Param(2.0)})
    named = to_named_arrays(state)
    assert len(named) == len(keys) + 2
    assert [*named][:4] == ["a/1", "a/'1'", "a/(2.5)", "a/'2.5'"]
    assert from_named_arrays(named, like=state) == state
    assert list(to_named_arrays(ab.state(ab.Param(1.0)))) == ["()"]
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert keys == [f"{''.join(f'[{key!r}]' for key in path)}" for path in state.paths]


def test_keys_that_cannot_be_told_apart_are_refused():
    with pytest.raises(StructureError, match=r"a/\(Place\)"):
        to_named_arrays(ab.State.from_flat({("a", x): jnp.ones(1) for x in PLACES}))
