"""A State goes to disk and comes back: through orbax, and through `np.savez`."""

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


class TestOrbax:
    @pytest.fixture
    def checkpointer(self):
        ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer

    def test_a_state_is_restored_strictly(self, make, checkpointer, tmp_path):
        model, other = make(0), make(5)
        checkpointer.save(tmp_path / "state", to_named_arrays(ab.state(model)))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state")
        ab.update(other, from_named_arrays(found, like=ab.state(other)))
        assert numbers(other) == numbers(model)

    def test_a_part_is_restored_by_filter(self, make, checkpointer, tmp_path):
        model, other = make(0), make(5)
        before = ab.state(other, ab.Not(ab.Param))
        checkpointer.save(tmp_path / "state", to_named_arrays(ab.state(model)))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state")
        ab.update(other, from_named_arrays(found, like=ab.state(other)).filter(ab.Param))
        assert ab.state(other, ab.Param) == ab.state(model, ab.Param)
        assert ab.state(other, ab.Not(ab.Param)) == before

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


def test_names_are_readable_and_two_that_are_alike_are_refused():
    assert list(to_named_arrays(ab.state(Model(0)))) == [
        "layers/0/w",
        "layers/0/mean",
        "layers/1/w",
        "layers/1/mean",
        "steps",
    ]
    with pytest.raises(StructureError, match="'a/1'"):
        to_named_arrays(ab.state({"a": {1: ab.Param(1.0), "1": ab.Param(2.0)}}))
