"""Longer programs as users of flax nnx write them: a few objects, and a step that does a lot.

Like the models in `models.py`, in terms of the transforms of `lib`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.interop.models import Training, regression, squared

LAYERS, MEMBERS, ENVIRONMENTS = 3, 4, 3


class MLP(nnx.Module):
    def __init__(self, n: int, hidden: int, out: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(n, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, out, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.first(x)))


def adam(model: Any) -> Any:
    return nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)


# -- layers made by vmap, with streams of their own, and scanned over ---------------------------


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return self.dropout(nnx.gelu(self.linear(x)))


class Stack(nnx.Module):
    def __init__(self, lib: Any, rngs: nnx.Rngs) -> None:
        make = lib.split_rngs(splits=LAYERS)(lib.vmap(Layer, in_axes=0, out_axes=0))
        self.layers = make(rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)


def make_stack() -> tuple[Any, ...]:
    model = Stack(nnx, nnx.Rngs(0, dropout=1))
    return model, adam(model)


def stack_step(lib: Any) -> Any:
    @lib.scan(in_axes=(lib.Carry, 0), out_axes=lib.Carry)
    def forward(x: Any, layer: Any) -> Any:
        return lib.remat(lambda layer, x: layer(x))(layer, x)

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return squared(model.head(forward(x, model.layers)).mean(1), y)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = lib.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step


# -- a variational autoencoder that records a loss and takes it out again -----------------------


class Loss(nnx.Variable[Any]):
    pass


class VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = MLP(4, 6, 4, rngs), MLP(2, 6, 4, rngs)
        self.rngs = rngs.fork()

    def __call__(self, x: Any) -> Any:
        mean, log_std = jnp.split(self.encoder(x), 2, axis=-1)
        self.kl = Loss((mean**2 + jnp.exp(2 * log_std) - 2 * log_std - 1).mean() / 2)
        z = mean + jnp.exp(log_std) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder(z)


def make_vae() -> tuple[Any, ...]:
    model = VAE(nnx.Rngs(0, noise=1))
    return model, adam(model)


def vae_step(lib: Any) -> Any:
    def loss_fn(model: Any, x: Any) -> Any:
        reconstruction = squared(model(x), x)
        return reconstruction + 0.1 * sum(jax.tree.leaves(lib.pop(model, Loss)))

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = lib.value_and_grad(loss_fn)(model, batch[0])
        optimizer.update(model, grads)
        return loss

    return step


# -- environments in lanes, a rollout, and epochs that carry model and optimizer ------------------


class Environment(nnx.Module):
    def __init__(self, key: Any) -> None:
        self.state = nnx.Variable(jnp.zeros(3))
        self.rngs = nnx.Rngs(key)

    def __call__(self, action: Any) -> Any:
        noise = jax.random.normal(self.rngs(), (3,))
        self.state[...] = jnp.tanh(0.9 * self.state[...] + 0.1 * noise + 0.2 * action)
        return self.state[...].sum()


class ActorCritic(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.actor, self.critic = MLP(3, 6, 2, rngs), MLP(3, 6, 1, rngs)


def make_policy() -> tuple[Any, ...]:
    model = ActorCritic(nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(0), ENVIRONMENTS)
    return model, adam(model), nnx.vmap(Environment)(keys)


def policy_step(lib: Any) -> Any:
    def act(environment: Any, model: Any, key: Any) -> Any:
        state = environment.state[...]
        logits = model.actor(state)
        action = jax.random.categorical(key, logits)
        return state, action, jax.nn.log_softmax(logits)[action], environment(action)

    @lib.scan(in_axes=(lib.Carry, None, 0), out_axes=(lib.Carry, 0))
    def rollout(environments: Any, model: Any, key: Any) -> Any:
        keys = jax.random.split(key, ENVIRONMENTS)
        return environments, lib.vmap(act, in_axes=(0, None, 0))(environments, model, keys)

    def loss_fn(model: Any, states: Any, actions: Any, before: Any, returns: Any) -> Any:
        log_p = jax.nn.log_softmax(model.actor(states))
        ratio = jnp.exp(jnp.take_along_axis(log_p, actions[..., None], -1)[..., 0] - before)
        value = model.critic(states)[..., 0]
        advantage = returns - jax.lax.stop_gradient(value)
        clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
        return squared(value, returns) - jnp.minimum(ratio * advantage, clipped).mean()

    def step(model: Any, optimizer: Any, environments: Any, key: Any) -> Any:
        _, (states, actions, before, rewards) = rollout(
            environments, model, jax.random.split(key, 5)
        )
        returns = jax.lax.associative_scan(lambda a, b: 0.9 * a + b, rewards, reverse=True)

        @lib.scan(in_axes=(lib.Carry, 0), out_axes=(lib.Carry, 0))
        def epoch(carry: Any, _: Any) -> Any:
            model, optimizer = carry
            grad_fn = lib.value_and_grad(loss_fn)
            loss, grads = grad_fn(model, states, actions, before, returns)
            optimizer.update(model, grads)
            return (model, optimizer), loss

        _, losses = epoch((model, optimizer), jnp.arange(3))
        return losses.mean()

    return step


def keys(rng: np.random.Generator) -> Any:
    return jax.random.key(rng.integers(1000))


# -- an ensemble: models and optimizers in lanes, statistics of each its own ----------------------


class Member(nnx.Module):
    def __init__(self, key: Any) -> None:
        rngs = nnx.Rngs(key)
        self.norm, self.mlp = nnx.BatchNorm(4, rngs=rngs), MLP(4, 6, 2, rngs)

    def __call__(self, x: Any) -> Any:
        return self.mlp(self.norm(x))


def make_ensemble() -> tuple[Any, ...]:
    def make(key: Any) -> Any:
        model = Member(key)
        return model, adam(model)

    return nnx.vmap(make)(jax.random.split(jax.random.key(0), MEMBERS))


def ensemble_step(lib: Any) -> Any:
    @lib.vmap(in_axes=(0, 0, None))
    def member_step(model: Any, optimizer: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = lib.value_and_grad(lambda model: squared(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        return member_step(model, optimizer, batch).mean()

    return step


# -- recurrent layers of flax, which scan by themselves; steps are accumulated, weights averaged ---


class Tagger(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(2, 4, rngs=rngs))
        self.both = nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs)), nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs))
        )
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.both(self.rnn(x))[:, -1])


def make_tagger() -> tuple[Any, ...]:
    model = Tagger(nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
    accumulated = optax.MultiSteps(tx, every_k_schedule=2)
    return model, nnx.clone(model), nnx.Optimizer(model, accumulated, wrt=nnx.Param)


def tagger_step(lib: Any) -> Any:
    def step(model: Any, average: Any, optimizer: Any, batch: Any) -> Any:
        x, y = batch
        loss, grads = lib.value_and_grad(lambda model: squared(model(x)[:, 0], y))(model)
        optimizer.update(model, grads)
        new, old = nnx.state(model, nnx.Param), nnx.state(average, nnx.Param)
        nnx.update(average, optax.incremental_update(new, old, 0.1))
        return loss

    return step


def series(rng: np.random.Generator) -> Any:
    x = rng.normal(size=(4, 5, 2)).astype(np.float32)
    return x, x.sum((1, 2))


PROGRAMS: dict[str, Training] = {
    "layers made by vmap and scanned over": Training(
        make_stack, stack_step, regression((4, 3, 4), 1)
    ),
    "variational autoencoder": Training(make_vae, vae_step, regression((8, 4), 1)),
    "policy with environments in lanes": Training(make_policy, policy_step, keys),
    "ensemble": Training(make_ensemble, ensemble_step, regression((8, 4), 2)),
    "recurrent layers of flax": Training(make_tagger, tagger_step, series),
}
