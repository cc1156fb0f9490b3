"""Programs on structures: large models that do not fit, methods that are overridden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms


class Layer(ab.Module):
    def __init__(self, i):
        self.name = f"layer number {i} " * 20
        self.w = ab.Param(jnp.zeros(3))
        self.stats = [ab.BatchStat(jnp.zeros(3)), {"count": jnp.zeros(())}]


def large():
    return [Layer(i) for i in range(30)]


def adds(model):
    for layer in model[3:]:
        layer.extra = ab.Variable(jnp.zeros(()))
        layer.stats[1]["more"] = jnp.zeros(())
    return model


def renames(model):
    for layer in model[3:]:
        layer.name += "!"
    return model


def repoints(model):
    for layer in model[3:]:
        layer.w = model[0].w
    return model


def grows(model):
    for layer in model[3:]:
        layer.w.value = jnp.zeros((3, 3))
    return model


CHANGES = {adds: "extra", renames: "name", repoints: r"\bw\b", grows: r"\(3, ?3\)|\[3,3\]"}
NAMES = {"cond": "true_fun (", "switch": "branches[1] ("}
CALLS = {
    "scan": lambda f, m: transforms.scan(lambda m, _: (f(m), None), length=2)(m, None),
    "fori_loop": lambda f, m: transforms.fori_loop(0, 2, lambda i, m: f(m), m),
    "while_loop": lambda f, m: transforms.while_loop(lambda m: (m[0].w > 0).any(), f, m),
    "cond": lambda f, m: transforms.cond(True, f, lambda m: m, m),
    "switch": lambda f, m: transforms.switch(1, [lambda m: m, f, f], m),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_in_a_large_model_is_named_briefly(call, change):
    """C20: of thirty layers the fourth is the first that differs."""
    model = large()
    before = ab.graphdef(model)
    with pytest.raises(ab.errors.StructureError, match=CHANGES[change]) as error:
        CALLS[call](change, model)
    text = str(error.value)
    assert len(text) < 4000
    assert "[3]" in text.partition("[4]")[0]
    assert NAMES.get(call, call) in text
    assert ab.graphdef(model) is before


class Base(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.arange(1.0, 4.0))
        self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def forward(self, x):
        self.calls.value += 1
        return self.w * x

    @transforms.jit
    def jitted(self, x):
        return self.forward(x)

    @transforms.remat
    def again(self, x):
        return self.forward(x)

    @transforms.vmap(in_axes=(None, 0))
    def lanes(self, x):
        return self.forward(x)

    @transforms.grad
    def slope(self, x):
        return self.forward(x).sum()

    @transforms.scan(in_axes={"total": ab.Carry, "x": 0})
    def steps(self, total, x):
        return total + self.forward(x), None


class Child(Base):
    def __init__(self):
        super().__init__()
        self.scale = ab.Param(2.0)

    def forward(self, x):
        return self.scale * super().forward(x)

    @transforms.jit
    def jitted(self, x):
        return super().jitted(x) + 1

    @transforms.remat
    def again(self, x):
        return super().again(x) + 1

    @transforms.vmap(in_axes=(None, 0))
    def lanes(self, x):
        return super().lanes(jnp.stack([x, -x])).sum(0) + super().forward(x)


def test_decorated_methods_are_overridden_and_call_super():
    """C28."""
    m, w = Child(), jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(m.jitted(3.0), 6 * w + 1)
    np.testing.assert_allclose(m.again(3.0), 6 * w + 1)
    assert int(m.calls) == 2
    xs = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(m.lanes(xs), xs[:, None] * w)
    assert int(m.calls) == 4
    grads = m.slope(3.0)
    np.testing.assert_allclose(grads["w"], [6.0] * 3)
    np.testing.assert_allclose(grads["scale"], 18.0)
    total, _ = m.steps(jnp.zeros(3), xs)
    np.testing.assert_allclose(total, 6 * w)
    assert int(m.calls) == 7
    plain = Base()
    np.testing.assert_allclose(plain.jitted(3.0), 3 * w)
    np.testing.assert_allclose(plain.lanes(xs), xs[:, None] * w)
    assert int(plain.calls) == 2


def test_transformed_methods_and_functions_as_attributes():
    """C28: a module holds functions that are transformed, its own methods among them."""

    class Holder(ab.Module):
        def __init__(self):
            self.base = Child()
            self.run = transforms.jit(Base.forward)
            self.each = transforms.vmap(Base.forward, in_axes=(None, 0))
            self.scanned = transforms.scan(Base.steps.__wrapped__, in_axes=(None, ab.Carry, 0))

        def __call__(self, x):
            out = self.run(self.base, x) + self.each(self.base, jnp.stack([x, x])).sum(0)
            return out + self.scanned(self.base, 0 * out, jnp.stack([x, x]))[0]

    holder, w = Holder(), jnp.arange(1.0, 4.0)
    for run in (holder, transforms.jit(holder), transforms.jit(holder.__call__)):
        np.testing.assert_allclose(run(2.0), (2 + 4) * w + 2 * (2 + 2) * w)
    assert int(holder.base.calls) == 3 * (1 + 1 + 2)


class Agent(ab.Module):
    """Agent and world point at each other; the agent owns its stream, the world its state."""

    def __init__(self, seed):
        self.policy = ab.Param(jnp.array([0.3, -0.2]))
        self.rngs = ab.Rngs(act=seed)
        self.world = World(self)

    def act(self):
        noise = jax.random.normal(self.rngs.act(), ())
        return (self.policy * self.world.state).sum() + 0.1 * noise


class World(ab.Module):
    def __init__(self, agent):
        self.agent = agent
        self.state = ab.Variable(jnp.array([1.0, 0.5]))
        self.resets = ab.Variable(jnp.zeros((), jnp.int32))

    def step(self):
        action = self.agent.act()
        self.state.value = 1.1 * self.state + jnp.stack([action, -action])

        def reset(world):
            world.state.value = jnp.array([1.0, 0.5])
            world.resets.value += 1

        transforms.cond((self.state**2).sum() > 4, reset, lambda world: None, self)
        return action


def plain_rollout(policy, key, steps):
    state, actions, resets = jnp.array([1.0, 0.5]), [], 0
    for i in range(steps):
        action = (policy * state).sum() + 0.1 * jax.random.normal(jax.random.fold_in(key, i), ())
        state = 1.1 * state + jnp.stack([action, -action])
        if (state**2).sum() > 4:
            state, resets = jnp.array([1.0, 0.5]), resets + 1
        actions.append(action)
    return jnp.stack(actions), (state, resets)


def test_policy_gradient_through_a_cyclic_world_with_resets():
    def rollout(agent):
        def step(agent, _):
            return agent, agent.world.step()

        agent, actions = transforms.scan(step, length=8)(agent, None)
        return (actions**2).sum(), actions

    agent = Agent(1)
    world, key = agent.world, agent.rngs.act.key.value
    run = transforms.jit(transforms.value_and_grad(rollout, has_aux=True))
    (value, actions), grads = run(agent)

    def plain(policy):
        actions, rest = plain_rollout(policy, key, 8)
        return (actions**2).sum(), (actions, rest)

    (expected, (own, (state, resets))), own_grads = jax.value_and_grad(plain, has_aux=True)(
        agent.policy.value
    )
    np.testing.assert_allclose(actions, own, rtol=1e-5)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["policy"], own_grads, rtol=1e-4)
    np.testing.assert_allclose(world.state.value, state, rtol=1e-5)
    assert int(world.resets) == resets > 0
    assert agent.world is world
    assert world.agent is agent
    assert int(agent.rngs.act.count) == 8
