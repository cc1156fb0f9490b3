"""Small programs in which objects refer to each other across transforms, against Python loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import Carry, transforms

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


class Model(ab.Module):
    def __init__(self, a=1.0, b=3.0):
        self.a, self.b = ab.Param(jnp.array([a, 2.0])), ab.Param(jnp.array(b))
        self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.value += 1
        return (self.a * x).sum() * self.b


class Optimiser(ab.Module):
    """Hold the very Params of a model."""

    def __init__(self, params):
        self.params = params
        self.momentum = [ab.Variable(jnp.zeros_like(p.value)) for p in params]

    def step(self, grads):
        for p, m, g in zip(self.params, self.momentum, grads, strict=True):
            m.value = 0.9 * m + g
            p.value = p - 0.01 * m


def test_an_optimiser_that_shares_the_params_is_carried_with_the_model():
    def train(state, x):
        model, optimiser = state
        value, grads = transforms.value_and_grad(lambda m: (m(x) - 1) ** 2)(model)
        optimiser.step([grads["a"], grads["b"]])
        return state, value

    def make():
        model = Model()
        return model, Optimiser([model.a, model.b])

    one, other, xs = make(), make(), jnp.array([1.0, 0.5, 0.2])
    found, values = transforms.jit(transforms.scan(train))(one, xs)
    assert found[0] is one[0]
    assert found[1] is one[1]
    assert one[1].params[0] is one[0].a
    close(values, jnp.stack([train(other, x)[1] for x in xs]))
    close(one[0].a.value, other[0].a.value)
    close(one[1].momentum[1].value, other[1].momentum[1].value)


def test_adam_of_optax_is_carried_as_a_value():
    import optax

    tx = optax.adam(0.1)

    def train(state, x):
        model, inner = state
        value, grads = transforms.value_and_grad(lambda m: (m(x) - 1) ** 2)(model)
        params = ab.state(model, ab.Param)
        updates, inner = tx.update(grads, inner, params)
        ab.update(model, optax.apply_updates(params, updates))
        return (model, inner), value

    model, xs = Model(), jnp.array([1.0, 0.5, 0.2])
    start = tx.init(ab.state(model, ab.Param))
    params = {"a": model.a.value, "b": model.b.value}
    (found, inner), values = transforms.jit(transforms.scan(train))((model, start), xs)
    assert found is model

    plain, expected = tx.init(params), []
    for x in xs:
        value, grads = jax.value_and_grad(lambda p, x: ((p["a"] * x).sum() * p["b"] - 1) ** 2)(
            params, x
        )
        updates, plain = tx.update(grads, plain, params)
        params = optax.apply_updates(params, updates)
        expected.append(value)
    close(values, jnp.stack(expected))
    close(model.a.value, params["a"])
    close(inner[0].mu["b"], plain[0].mu["b"])
    assert int(model.calls) == 3


def test_a_teacher_copies_the_student_every_second_step():
    def copy(teacher, student):
        teacher.a.value = student.a.value

    def body(i, state):
        student, teacher = state
        student.a.value = student.a * 1.5
        student.calls.value += 1
        even = student.calls % 2 == 0
        transforms.cond(even, copy, lambda teacher, student: None, teacher, student)
        return student, teacher

    def run(student, teacher):
        return transforms.fori_loop(0, 5, body, (student, teacher))

    student, teacher = Model(), Model()
    before = ab.graphdef((student, teacher))
    found = transforms.jit(run)(student, teacher)
    assert found[0] is student
    assert found[1] is teacher
    close(student.a.value, 1.5**5 * np.array([1.0, 2.0]))
    close(teacher.a.value, 1.5**4 * np.array([1.0, 2.0]))
    assert ab.graphdef((student, teacher)) is before  # the same arrays, not the same Variables


def test_two_players_take_turns():
    def first(one, two):
        grads = transforms.grad(lambda m, n: (m.b * n.b - 1) ** 2)(one, two)
        one.b.value = one.b - 0.02 * grads["b"]

    def second(one, two):
        grads = transforms.grad(lambda n, m: -((m.b * n.b - 2) ** 2))(two, one)
        two.b.value = two.b - 0.02 * grads["b"]

    traces = []

    def body(i, state):
        traces.append(1)
        transforms.switch(i % 2, [first, second], *state)
        return state

    pair, other = (Model(), Model(b=0.5)), (Model(), Model(b=0.5))
    for _ in range(2):
        transforms.fori_loop(0, 4, body, pair)
    for i in range(8):
        (first, second)[i % 2](*other)
    close(pair[0].b.value, other[0].b.value)
    close(pair[1].b.value, other[1].b.value)
    assert len(traces) == 1


class Node(ab.Module):
    def __init__(self, value, rest):
        self.value, self.rest = ab.Param(value), rest


def test_a_list_that_jit_has_built_is_differentiated_through_a_scan():
    def total(head, xs):
        def step(sum_, x, head):
            node = head
            while node is not None:
                sum_ = sum_ * 0.5 + node.value * x
                node.value.value = node.value + 1
                node = node.rest
            return sum_, None

        return transforms.scan(step, in_axes=(Carry, 0, None))(0.0, xs, head)[0]

    def plain(values, xs):
        sum_ = 0.0
        for x in xs:
            for i in range(4):
                sum_ = sum_ * 0.5 + values[i] * x
            values = values + 1
        return sum_

    push = transforms.jit(Node)
    head, xs = None, jnp.array([1.0, 2.0])
    for i in range(4):
        rest, head = head, push(float(i), head)
        assert head.rest is rest
    grads = transforms.jit(transforms.grad(total))(head, xs)
    paths = [("rest",) * i + ("value",) for i in range(4)]
    expected = jax.grad(plain)(jnp.array([3.0, 2.0, 1.0, 0.0]), xs)
    close(jnp.stack([grads.flat()[path] for path in paths]), expected)
    assert float(head.value) == 5.0


class Walk(ab.Module):
    def __init__(self, key):
        self.rngs = ab.Rngs(walk=key)
        self.draws = ab.Variable(jnp.zeros((), jnp.int32))


def test_a_while_loop_in_a_scan_in_a_vmap_in_jit():
    """Draw until it is positive, three times, in each lane."""

    def again(state):
        walk, _ = state
        walk.draws.value += 1
        return walk, jax.random.normal(walk.rngs.walk())

    def step(walk, _):
        return walk, transforms.while_loop(lambda state: state[1] < 0, again, (walk, -1.0))[1]

    def run(walk):
        return transforms.scan(step, length=3)(walk, None)[1]

    keys = jax.random.split(jax.random.key(0), 3)
    walks = transforms.vmap(Walk)(keys)
    found = transforms.jit(transforms.vmap(run))(walks)
    for lane, key in enumerate(keys):
        count, expected = 0, []
        for _ in range(3):
            value = -1.0
            while value < 0:
                value = jax.random.normal(jax.random.fold_in(key, count))
                count += 1
            expected.append(value)
        close(found[lane], jnp.stack(expected))
        assert int(walks.draws.value[lane]) == int(walks.rngs.walk.count.value[lane]) == count


def test_streams_that_are_split_in_each_step():
    @transforms.split_rngs(splits=3)
    def lanes(rngs):
        return transforms.vmap(lambda rngs: jax.random.normal(rngs.a()))(rngs)

    rngs = ab.Rngs(a=0)
    key = rngs.a.key.value
    found, ys = transforms.jit(transforms.scan(lambda r, _: (r, lanes(r)), length=2))(rngs, None)
    assert found is rngs
    assert int(rngs.a.count) == 2
    for i in range(2):
        keys = jax.random.split(jax.random.fold_in(key, i), 3)
        expected = [jax.random.normal(jax.random.fold_in(k, 0)) for k in keys]
        close(ys[i], jnp.stack(expected))


def test_a_shard_map_in_a_scan_in_grad_in_jit():
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))

    @transforms.shard_map(mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec())
    def mean(model, x):
        return model(jax.lax.pmean(x.sum(), "i"))

    def loss(model, xs):
        def step(total, x, model):
            return total + mean(model, x), None

        return transforms.scan(step, in_axes=(Carry, 0, None))(0.0, xs, model)[0]

    model, xs = Model(), jnp.arange(16.0).reshape(2, 8)
    value, grads = transforms.jit(transforms.value_and_grad(loss))(model, xs)
    close(value, xs.sum() / 8 * 3 * 3)
    close(grads["b"], xs.sum() / 8 * 3)
    close(grads["a"], [xs.sum() / 8 * 3] * 2)
    assert int(model.calls) == 2


def test_a_call_after_a_failed_one_is_right():
    fails = [True]

    def step(model, x):
        y = model(x)
        if fails[0]:
            raise RuntimeError("step")
        return model, y

    def loss(model, xs):
        return transforms.scan(transforms.remat(step))(model, xs)[1].sum()

    model, run = Model(), transforms.jit(transforms.grad(loss))
    values = [model.a.value, model.calls.value]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="step"):
            run(model, jnp.ones(3))
        assert model.a.value is values[0]
        assert model.calls.value is values[1]
    fails[0] = False
    close(run(model, jnp.ones(3))["b"], 9.0)
    assert int(model.calls) == 3
