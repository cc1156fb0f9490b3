"""Small models of every kind, written with flax nnx as anybody would write them.

Each has a `step(lib)`: the training step as a user has it, in terms of the transforms of `lib`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass(frozen=True)
class Training:
    """How one kind of model is trained."""

    make: Callable[[], tuple[Any, ...]]
    """Make the objects: models, optimizers, metrics."""
    step: Callable[[Any], Callable[..., Any]]
    """From a library to the function of the objects and a batch that does one step."""
    batches: Callable[[np.random.Generator], Any]
    """Make a batch."""


def squared(x: Any, y: Any) -> Any:
    return ((x - y) ** 2).mean()


def regression(shape: tuple[int, ...], out: int) -> Callable[[np.random.Generator], Any]:
    def batches(rng: np.random.Generator) -> Any:
        x = rng.normal(size=shape).astype(np.float32)
        return x, np.tanh(x.reshape(shape[0], -1)[:, :out])

    return batches


# -- an MLP with BatchNorm and Dropout --------------------------------------------------------


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def make_mlp() -> tuple[Any, ...]:
    model = MLP(nnx.Rngs(0, dropout=1))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param), metrics


def mlp_step(lib: Any) -> Any:
    def step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = lib.value_and_grad(lambda model: squared(model(x), y))(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss)
        return loss

    return step


# -- a small ConvNet --------------------------------------------------------------------------


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.head = nnx.Sequential(nnx.Linear(4 * 9, 6, rngs=rngs), nnx.gelu)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        return self.last(self.head(x.reshape(x.shape[0], -1)))


def make_convnet() -> tuple[Any, ...]:
    model = ConvNet(nnx.Rngs(0))
    metrics = nnx.metrics.Accuracy()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return model, optimizer, metrics


def convnet_step(lib: Any) -> Any:
    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    def step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        x, y = batch
        (loss, logits), grads = lib.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        optimizer.update(model, grads)
        metrics.update(logits=logits, labels=y)
        return loss

    return step


def images(rng: np.random.Generator) -> Any:
    x = rng.normal(size=(6, 6, 6, 1)).astype(np.float32)
    return x, (x.sum((1, 2, 3)) > 0).astype(np.int32)


# -- a language model with tied embeddings ----------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + nnx.gelu(self.mlp(x))


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(8, 11, use_bias=False, rngs=rngs)
        self.decoder = self.embed  # the same module at two places, and flax visits this one first

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.decoder.attend(x) + self.head(x)


def make_lm() -> tuple[Any, ...]:
    model = LM(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)


def lm_step(lib: Any) -> Any:
    def loss_fn(model: Any, tokens: Any) -> Any:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss, grads = lib.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return loss

    return step


def sentences(rng: np.random.Generator) -> Any:
    start = rng.integers(0, 11, size=(4, 1))
    return ((start + np.arange(7)) % 11).astype(np.int32)


# -- an LSTM, scanned over time ---------------------------------------------------------------


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cell = nnx.LSTMCell(2, 6, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)


def make_lstm() -> tuple[Any, ...]:
    model = Recurrent(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.rmsprop(1e-2, eps=1e-3), wrt=nnx.Param)


def lstm_step(lib: Any) -> Any:
    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        carry = model.cell.initialize_carry((x.shape[0], 2), nnx.Rngs(0))

        @lib.scan(in_axes=(lib.Carry, None, 1), out_axes=(lib.Carry, 1))
        def unroll(carry: Any, cell: Any, x: Any) -> Any:
            return cell(carry, x)

        _, outputs = unroll(carry, model.cell, x)
        return squared(model.head(outputs[:, -1])[:, 0], y)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = lib.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


def series(rng: np.random.Generator) -> Any:
    x = rng.normal(size=(4, 5, 2)).astype(np.float32)
    return x, x.sum((1, 2))


# -- LoRA: only the adapters of a model are trained -------------------------------------------


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(4, 6, rngs=rngs)
        self.adapter = nnx.LoRA(4, 2, 6, base_module=self.base, rngs=rngs)
        self.head = nnx.LoRALinear(6, 2, lora_rank=1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.tanh(self.adapter(x)))


def make_lora() -> tuple[Any, ...]:
    model = Adapted(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-1, eps=1e-3), wrt=nnx.LoRAParam)


def lora_step(lib: Any) -> Any:
    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return squared(model(x), y)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        adapters = lib.DiffState(0, nnx.LoRAParam)
        loss, grads = lib.value_and_grad(loss_fn, argnums=adapters)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


# -- a GAN: two models, two optimizers --------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, n: int, out: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(n, 6, rngs=rngs)
        self.last = nnx.Linear(6, out, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.first(x)))


class Generator(Net):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(3, 2, rngs)
        self.noise = rngs.noise.fork()

    def sample(self, n: int) -> Any:
        return self(jax.random.normal(self.noise(), (n, 3)))


def make_gan() -> tuple[Any, ...]:
    rngs = nnx.Rngs(0, noise=1)
    generator, critic = Generator(rngs), Net(2, 1, rngs)
    return (
        generator,
        critic,
        nnx.Optimizer(generator, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param),
        nnx.Optimizer(critic, optax.adam(2e-2, eps=1e-3), wrt=nnx.Param),
    )


def gan_step(lib: Any) -> Any:
    def critic_loss(critic: Any, generator: Any, real: Any) -> Any:
        fake = jax.lax.stop_gradient(generator.sample(real.shape[0]))
        return jax.nn.softplus(-critic(real)).mean() + jax.nn.softplus(critic(fake)).mean()

    def generator_loss(generator: Any, critic: Any) -> Any:
        return jax.nn.softplus(-critic(generator.sample(4))).mean()

    def step(generator: Any, critic: Any, of_generator: Any, of_critic: Any, batch: Any) -> Any:
        real, _ = batch
        first, grads = lib.value_and_grad(critic_loss)(critic, generator, real)
        of_critic.update(critic, grads)
        second, grads = lib.value_and_grad(generator_loss)(generator, critic)
        of_generator.update(generator, grads)
        return first + second

    return step


# -- an actor and a critic with a target network that is updated in place ---------------------


class Agent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.actor, self.critic = Net(3, 2, rngs), Net(3, 1, rngs)
        self.target = nnx.clone(self.critic)
        self.updates = nnx.Variable(jnp.array(0))


def make_agent() -> tuple[Any, ...]:
    agent = Agent(nnx.Rngs(0))
    learned = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("target")))
    return agent, nnx.Optimizer(agent, optax.adam(1e-2, eps=1e-3), wrt=learned)


def agent_step(lib: Any) -> Any:
    def loss_fn(agent: Any, states: Any, rewards: Any) -> Any:
        after = jax.lax.stop_gradient(agent.target(states[1:])[:, 0])
        advantage = rewards[:-1] + 0.9 * after - agent.critic(states[:-1])[:, 0]
        policy = jax.nn.log_softmax(agent.actor(states[:-1]))[:, 0]
        return (advantage**2 - policy * jax.lax.stop_gradient(advantage)).mean()

    def step(agent: Any, optimizer: Any, batch: Any) -> Any:
        states, rewards = batch
        learned = lib.All(nnx.Param, lib.Not(lib.PathContains("target")))
        chosen = lib.DiffState(0, learned)
        loss, grads = lib.value_and_grad(loss_fn, argnums=chosen)(agent, states, rewards[:, 0])
        optimizer.update(agent, grads)
        for target, source in (
            (agent.target.first, agent.critic.first),
            (agent.target.last, agent.critic.last),
        ):
            target.kernel[...] = 0.9 * target.kernel[...] + 0.1 * source.kernel[...]
            target.bias[...] = 0.9 * target.bias[...] + 0.1 * source.bias[...]
        agent.updates[...] += 1
        return loss

    return step


TRAININGS: dict[str, Training] = {
    "MLP with BatchNorm and Dropout": Training(make_mlp, mlp_step, regression((8, 4), 2)),
    "ConvNet": Training(make_convnet, convnet_step, images),
    "language model with tied embeddings": Training(make_lm, lm_step, sentences),
    "LSTM": Training(make_lstm, lstm_step, series),
    "LoRA": Training(make_lora, lora_step, regression((8, 4), 2)),
    "GAN": Training(make_gan, gan_step, regression((8, 2), 1)),
    "actor and critic": Training(make_agent, agent_step, regression((8, 3), 2)),
}


def batches(training: Training, count: int) -> Iterator[Any]:
    """Yield the same batches each time."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield training.batches(rng)
