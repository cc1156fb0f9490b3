"""Handwritten digits: a classifier and an autoencoder that share their encoder.

Run `make demo`. It trains both in less than a minute on a CPU, prints a table, and writes the
learning curves to `examples/out/digits.png`. What it shows:

- **Ordinary objects.** `Trainer.train_step` assigns to attributes, draws random numbers and
  counts its calls, as Python methods do. `@transforms.jit` compiles it as it stands.
- **Sharing.** One `Encoder` has two owners, and the decoder multiplies with the transposed weights
  of the encoder: the same Variables. After hundreds of compiled steps they still are.
- **State of all kinds.** Weights (`Param`), running statistics (`BatchStat`), random streams
  (`Rngs`), the state of an optax optimiser and a step counter are written in place.
- **Transforms compose.** Gradients are taken inside the compiled step. An ensemble of five is the
  same class under `transforms.vmap`: made from five keys, trained and evaluated in lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from anabranch import transforms

try:
    import matplotlib.figure
    import optax
    import rich
    import sklearn.datasets
    import sklearn.model_selection
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"{error}: this example needs `pip install 'anabranch[examples]'`") from None

PICTURE = Path(__file__).parent / "out" / "digits.png"
CLASSES, PIXELS, HIDDEN, CODE = 10, 64, 128, 32
EPOCHS, BATCH, MEMBERS = 40, 64, 5

# -- the models -----------------------------------------------------------------------------------


class Linear(ab.Module):
    """A matrix, without a bias: each one is followed by something that has one."""

    def __init__(self, n_in: int, n_out: int, rngs: ab.Rngs) -> None:
        self.weight = ab.Param(jax.random.normal(rngs.params(), (n_in, n_out)) * (2 / n_in) ** 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.value


class BatchNorm(ab.Module):
    """Normalise by the statistics of the batch in training, by the running ones otherwise."""

    def __init__(self, size: int) -> None:
        self.scale, self.bias = ab.Param(jnp.ones(size)), ab.Param(jnp.zeros(size))
        self.mean, self.var = ab.BatchStat(jnp.zeros(size)), ab.BatchStat(jnp.ones(size))
        self.momentum = 0.95  # no array, so it is static: a constant of the compiled step

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        mean, var = self.mean.value, self.var.value
        if train:
            mean, var = x.mean(0), x.var(0)
            # A write in the middle of the forward pass. It takes part in no gradient.
            self.mean.value += (1 - self.momentum) * (mean - self.mean.value)
            self.var.value += (1 - self.momentum) * (var - self.var.value)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * self.scale.value + self.bias.value


class Dropout(ab.Module):
    """Drop activations in training. The streams belong to all layers that were given them."""

    def __init__(self, rate: float, rngs: ab.Rngs) -> None:
        self.rate, self.rngs = rate, rngs

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        if not train:
            return x
        kept = jax.random.bernoulli(self.rngs.dropout(), 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0.0)


class Encoder(ab.Module):
    """From 64 pixels to a code of 32 numbers."""

    def __init__(self, rngs: ab.Rngs) -> None:
        self.linears = [Linear(PIXELS, HIDDEN, rngs), Linear(HIDDEN, CODE, rngs)]
        self.norms = [BatchNorm(HIDDEN), BatchNorm(CODE)]
        self.dropout = Dropout(0.2, rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = self.dropout(jax.nn.relu(norm(linear(x), train=train)), train=train)
        return x


class Classifier(ab.Module):
    """An encoder with a linear layer on top."""

    def __init__(self, encoder: Encoder, rngs: ab.Rngs) -> None:
        self.encoder = encoder
        self.head, self.bias = Linear(CODE, CLASSES, rngs), ab.Param(jnp.zeros(CLASSES))

    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        return self.head(self.encoder(images, train=train)) + self.bias.value

    @transforms.jit
    def probabilities(self, images: jax.Array) -> jax.Array:
        return jax.nn.softmax(self(images, train=False))


class Autoencoder(ab.Module):
    """An encoder and, read backwards, its own weights as the decoder."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.weights = [linear.weight for linear in reversed(encoder.linears)]
        self.biases = [ab.Param(jnp.zeros(HIDDEN)), ab.Param(jnp.zeros(PIXELS))]

    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = self.encoder(images, train=train)
        hidden = jax.nn.relu(x @ self.weights[0].value.T + self.biases[0].value)
        return jax.nn.sigmoid(hidden @ self.weights[1].value.T + self.biases[1].value)

    @transforms.jit
    def reconstruct(self, images: jax.Array) -> jax.Array:
        return self(images, train=False)


class Models(ab.Module):
    """Both models, and the only place where it is said that they share an encoder."""

    def __init__(self, rngs: ab.Rngs) -> None:
        encoder = Encoder(rngs)
        self.classifier = Classifier(encoder, rngs)
        self.autoencoder = Autoencoder(encoder)


# -- training -------------------------------------------------------------------------------------


class Optimizer(ab.Module):
    """An optax optimiser as an object: its state is a pytree, which one Variable holds."""

    def __init__(self, tx: optax.GradientTransformation, model: ab.Module) -> None:
        self.tx = tx
        self.state = ab.Variable(tx.init(ab.state(model, ab.Param)))

    def update(self, model: ab.Module, grads: ab.State) -> None:
        params = ab.state(model, ab.Param)  # a shared Variable is in it once
        updates, self.state.value = self.tx.update(grads, self.state.value, params)
        ab.update(model, optax.apply_updates(params, updates))


# Made once: trainers with the same optimiser have the same structure, and share what is compiled.
ADAM = optax.adamw(optax.cosine_decay_schedule(4e-3, EPOCHS * 22), weight_decay=1e-3)


class Trainer(ab.Module):
    """Everything that training needs and changes."""

    def __init__(self, key: jax.Array) -> None:
        params, dropout = jax.random.split(key)
        self.models = Models(ab.Rngs(params=params, dropout=dropout))
        self.optimizer = Optimizer(ADAM, self.models)
        self.steps = ab.Variable(0)

    @transforms.jit
    def train_step(self, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Take a step, in place, and return the loss; undecorated it does the same, but slower."""

        def loss(models: Models) -> jax.Array:
            logits = models.classifier(images, train=True)
            errors = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            distances = (models.autoencoder(images, train=True) - images) ** 2
            return errors.mean() + 4.0 * distances.mean()

        # What the loss writes (statistics, streams) comes back out of the gradient, once.
        value, grads = transforms.value_and_grad(loss)(self.models)
        self.optimizer.update(self.models, grads)
        self.steps.value += 1
        return value


# Five trainers in one: every array has one more axis in front. The digits are broadcast.
make_ensemble = transforms.jit(transforms.vmap(Trainer))
train_ensemble_step = transforms.jit(transforms.vmap(Trainer.train_step, in_axes=(0, None, None)))
predict_ensemble = transforms.jit(transforms.vmap(Classifier.probabilities, in_axes=(0, None)))


# -- the data and the loop ------------------------------------------------------------------------


class Digits(NamedTuple):
    images: np.ndarray  # (n, 64), from 0 to 1
    labels: np.ndarray  # (n,)


def load_digits() -> tuple[Digits, Digits]:
    """Return 1,437 digits for training and 360 for testing, of all classes alike."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = sklearn.model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def batches(data: Digits, order: np.random.Generator) -> Iterator[Digits]:
    """Yield full batches in a random order; all of one size, so that one trace serves them all."""
    indices = order.permutation(len(data.labels))
    for start in range(0, len(indices) - BATCH + 1, BATCH):
        chosen = indices[start : start + BATCH]
        yield Digits(data.images[chosen], data.labels[chosen])


class History(NamedTuple):
    """What was measured after each epoch; of an ensemble, for each member."""

    loss: np.ndarray  # (epochs,) or (epochs, members)
    accuracy: np.ndarray  # the same
    seconds: float


def accuracy(probabilities: jax.Array, labels: np.ndarray) -> np.ndarray:
    return np.mean(np.argmax(probabilities, axis=-1) == labels, axis=-1)


def fit(
    name: str,
    trainer: Trainer,
    step: Callable[[Trainer, np.ndarray, np.ndarray], jax.Array],
    predict: Callable[[Classifier, np.ndarray], jax.Array],
    train: Digits,
    test: Digits,
) -> History:
    """Train one trainer, or an ensemble of them: to the loop it is the same."""
    losses, accuracies = [], []
    order, start = np.random.default_rng(0), time.perf_counter()
    shown = "loss {task.fields[loss]:.3f}  test accuracy {task.fields[accuracy]:.1%}"
    columns = (TextColumn("{task.description:9}"), BarColumn(), TextColumn(shown))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task(name, total=EPOCHS, loss=float("nan"), accuracy=0.0)
        for _ in range(EPOCHS):
            epoch = [step(trainer, *batch) for batch in batches(train, order)]
            # JAX computes in the background; reading a result waits for it, so once an epoch.
            losses.append(np.mean(jax.device_get(epoch), axis=0))
            probabilities = predict(trainer.models.classifier, test.images)
            accuracies.append(accuracy(probabilities, test.labels))
            mean = {"loss": losses[-1].mean(), "accuracy": accuracies[-1].mean()}
            progress.update(task, advance=1, **mean)
    return History(np.stack(losses), np.stack(accuracies), time.perf_counter() - start)


# -- the report -----------------------------------------------------------------------------------


def draw(single: History, ensemble: History, tiles: np.ndarray, path: Path) -> None:
    """Draw the learning curves, and digits above their reconstructions."""
    figure = matplotlib.figure.Figure(figsize=(12, 3.8), layout="constrained")  # drawn by Agg
    *axes, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.7))
    titles = {"loss": "training loss", "accuracy": "test accuracy"}
    for ax, (curve, title) in zip(axes, titles.items(), strict=True):
        ax.plot(getattr(ensemble, curve), color="tab:orange", alpha=0.5)
        ax.plot([], color="tab:orange", label="ensemble")  # one entry for all of its lines
        ax.plot(getattr(single, curve), color="tab:blue", label="single")
        ax.set(title=title, xlabel="epoch")
        ax.grid(alpha=0.3)
        ax.legend()
    axes[0].set_yscale("log")
    axes[1].set_ylim(0.9, 1.0)
    # (15, 2, 64) to three rows of five, each digit above its reconstruction, a pixel around each
    tiles = np.pad(tiles.reshape(3, 5, 2, 8, 8), [(0, 0)] * 3 + [(1, 1)] * 2)
    right.imshow(tiles.transpose(0, 2, 3, 1, 4).reshape(60, 50), cmap="gray_r")
    right.set(title="test digits, reconstructed", xticks=[], yticks=[])
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def check_sharing(models: Models) -> str:
    """Return what was found; raise if the two models do not share what they shared at first."""
    classifier, autoencoder = models.classifier, models.autoencoder
    if classifier.encoder is not autoencoder.encoder:
        raise SystemExit("the classifier and the autoencoder have different encoders")
    if ab.state(classifier.encoder) != ab.state(autoencoder.encoder):
        raise SystemExit("the encoder of the classifier and that of the autoencoder differ")
    tied = reversed(autoencoder.weights)
    if any(a.weight is not b for a, b in zip(classifier.encoder.linears, tied, strict=True)):
        raise SystemExit("the decoder is not tied to the encoder")
    return "Shared: one encoder object, equal for both owners, and the decoder is tied to it"


def main() -> None:
    train, test = load_digits()

    trainer = Trainer(jax.random.key(0))
    single = fit("single", trainer, Trainer.train_step, Classifier.probabilities, train, test)
    members = make_ensemble(jax.random.split(jax.random.key(1), MEMBERS))
    ensemble = fit("ensemble", members, train_ensemble_step, predict_ensemble, train, test)
    average = predict_ensemble(members.models.classifier, test.images).mean(axis=0)

    images = test.images[:15]
    restored = np.asarray(trainer.models.autoencoder.reconstruct(images))
    draw(single, ensemble, np.stack([images, restored], axis=1), PICTURE)

    table = Table("model", "test accuracy", "steps", "seconds")
    own, each, steps = single.accuracy[-1], ensemble.accuracy[-1], int(trainer.steps)
    between = f"{each.min():.2%} to {each.max():.2%}"
    table.add_row("classifier", f"{own:.2%}", f"{steps:,}", f"{single.seconds:.1f}")
    table.add_row("five under vmap", between, f"5 x {steps:,}", f"{ensemble.seconds:.1f}")
    table.add_row("average of the five", f"{accuracy(average, test.labels):.2%}")
    rich.print(table)
    rich.print(f"Reconstruction: mean squared error {np.mean((restored - images) ** 2):.3f}")
    rich.print(check_sharing(trainer.models))
    rich.print(f"Learning curves: {PICTURE.relative_to(Path(__file__).parent.parent)}")


if __name__ == "__main__":
    main()
