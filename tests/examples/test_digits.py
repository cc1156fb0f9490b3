"""The parts of `examples/digits.py`: a few steps of it, compiled, in plain Python, and in lanes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
STEPS = 3


def _load():
    spec = importlib.util.spec_from_file_location("digits_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes look their module up
    spec.loader.exec_module(module)
    return module


digits = _load()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    # A few steps are computed at once; a third of the time is XLA looking for better code.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def data():
    return digits.load_digits()


@pytest.fixture(scope="module")
def batches(data):
    found = digits.batches(data[0], np.random.default_rng(0))
    return [next(found) for _ in range(STEPS)]


def _train(step, batches):
    trainer = digits.Trainer(jax.random.key(0))
    losses = [float(step(trainer, *batch)) for batch in batches]
    return trainer, losses


@pytest.fixture(scope="module")
def trained(batches):
    return _train(digits.Trainer.train_step, batches)


def _arrays(node):
    # in plain Python a counter stays an int
    arrays = {path: jnp.asarray(leaf) for path, leaf in ab.state(node).flat().items()}
    return {
        path: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for path, x in arrays.items()
    }


def test_the_split_is_fixed_and_even(data):
    train, test = data
    assert (len(train.labels), len(test.labels)) == (1437, 360)
    assert np.bincount(test.labels).min() >= 34
    assert 0 == train.images.min() < train.images.max() == 1
    again, _ = digits.load_digits()
    np.testing.assert_array_equal(train.images, again.images)


def test_batches_are_full_and_do_not_overlap(data):
    train, _ = data
    found = [*digits.batches(train, np.random.default_rng(1))]
    assert {len(batch.labels) for batch in found} == {digits.BATCH}
    assert len(found) == len(train.labels) // digits.BATCH
    labels = np.bincount(np.concatenate([batch.labels for batch in found]), minlength=10)
    assert (labels <= np.bincount(train.labels)).all()


def test_the_encoder_stays_one_object(batches):
    trainer = digits.Trainer(jax.random.key(0))
    classifier, autoencoder = trainer.models.classifier, trainer.models.autoencoder
    encoder = classifier.encoder
    weights = [linear.weight for linear in encoder.linears]
    before = [np.asarray(weight.value) for weight in weights]
    trainer.train_step(*batches[0])
    assert classifier.encoder is encoder is autoencoder.encoder
    assert all(a.weight is b for a, b in zip(encoder.linears, weights, strict=True))
    assert all(a is b for a, b in zip(autoencoder.weights, reversed(weights), strict=True))
    assert encoder.dropout.rngs.params.count.value == 3  # no stream was drawn from twice or copied
    assert all((a != b.value).any() for a, b in zip(before, weights, strict=True))
    assert "one encoder object" in digits.check_sharing(trainer.models)


def test_a_broken_tie_is_reported():
    models = digits.Models(ab.Rngs(0))
    models.autoencoder.weights[0] = ab.Param(models.autoencoder.weights[0].value)
    with pytest.raises(SystemExit, match="not tied"):
        digits.check_sharing(models)
    models.autoencoder.encoder = ab.clone(models.classifier.encoder)
    with pytest.raises(SystemExit, match="different encoders"):
        digits.check_sharing(models)


def test_steps_statistics_and_streams_move(trained):
    trainer, losses = trained
    assert int(trainer.steps) == STEPS
    assert losses[-1] < losses[0]
    encoder = trainer.models.classifier.encoder
    for norm in encoder.norms:
        assert (norm.mean.value != 0).any() and (norm.var.value != 1).any()
    # two layers with dropout, in each of two forward passes
    assert int(encoder.dropout.rngs.dropout.count) == 4 * STEPS
    assert int(trainer.optimizer.state.value[0].count) == STEPS


def test_evaluation_writes_nothing(trained, data):
    trainer, _ = trained
    before = _arrays(trainer)
    probabilities = trainer.models.classifier.probabilities(data[1].images)
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)
    assert trainer.models.autoencoder.reconstruct(data[1].images).shape == (360, digits.PIXELS)
    after = _arrays(trainer)
    assert all((after[path] == array).all() for path, array in before.items())


def test_the_compiled_step_equals_the_plain_one(trained, batches):
    trainer, losses = trained
    plain_step = digits.Trainer.train_step.__wrapped__
    assert not hasattr(plain_step, "lower")
    plain, plain_losses = _train(plain_step, batches)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert ab.graphdef(trainer) == ab.graphdef(plain)
    compiled = _arrays(trainer)
    for path, array in _arrays(plain).items():
        np.testing.assert_allclose(compiled[path], array, atol=1e-5, err_msg=str(path))


def test_one_trace_serves_all_trainers(trained, batches, monkeypatch):
    def update(self, model, grads):
        raise AssertionError("traced again")

    monkeypatch.setattr(digits.Optimizer, "update", update)
    trainer, losses = _train(digits.Trainer.train_step, batches)
    assert trainer is not trained[0]
    assert losses == trained[1]
    with pytest.raises(AssertionError, match="traced again"):
        trainer.train_step(*jax.tree.map(lambda x: x[1:], batches[0]))
    assert int(trainer.steps) == STEPS


def test_each_member_of_an_ensemble_equals_a_trainer_of_its_own(batches, data):
    keys = jax.random.split(jax.random.key(1), digits.MEMBERS)
    members = digits.make_ensemble(keys)
    losses = [digits.train_ensemble_step(members, *batch) for batch in batches]
    assert members.steps.value.tolist() == [STEPS] * digits.MEMBERS
    assert "one encoder object" in digits.check_sharing(members.models)
    probabilities = digits.predict_ensemble(members.models.classifier, data[1].images)
    assert probabilities.shape == (digits.MEMBERS, 360, digits.CLASSES)
    assert len({float(loss) for loss in losses[0]}) == digits.MEMBERS

    own = digits.Trainer(keys[3])
    own_losses = [own.train_step(*batch) for batch in batches]
    np.testing.assert_allclose([loss[3] for loss in losses], own_losses, rtol=1e-5)
    stacked = _arrays(members)
    for path, array in _arrays(own).items():
        np.testing.assert_allclose(stacked[path][3], array, atol=1e-5, err_msg=str(path))


def test_history_and_picture(tmp_path):
    epochs = 4
    single = digits.History(np.geomspace(2, 0.1, epochs), np.linspace(0.9, 0.98, epochs), 1.0)
    ensemble = digits.History(
        np.tile(single.loss[:, None], 5), np.tile(single.accuracy[:, None], 5), 1.0
    )
    path = tmp_path / "out" / "digits.png"
    digits.draw(single, ensemble, np.zeros((15, 2, digits.PIXELS)), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(SystemExit, match=r"optax.*pip install 'anabranch\[examples\]'"):
        _load()
