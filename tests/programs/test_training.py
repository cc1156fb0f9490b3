"""Training programs: accumulated, per-example and meta gradients, and ensembles.

Each is compared with Python loops over lists of arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms


class Net(ab.Module):
    def __init__(self, rngs, width=3):
        self.w = ab.Param(jax.random.normal(rngs.params(), (2, width)))
        self.out = ab.Param(jax.random.normal(rngs.params(), (width,)))
        self.mean = ab.BatchStat(jnp.zeros(width))
        self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        h = jnp.tanh(x @ self.w)
        self.calls.value += 1
        self.mean.value = 0.5 * self.mean + 0.5 * h.mean(tuple(range(h.ndim - 1)))
        return h @ self.out


def loss(net, x, y):
    return ((net(x) - y) ** 2).mean()


def plain_loss(params, x, y):
    w, out = params
    return ((jnp.tanh(x @ w) @ out - y) ** 2).mean()


plain_gradients = jax.jit(jax.value_and_grad(plain_loss))


@jax.jit
def plain_mean(mean, w, x):
    return 0.5 * mean + 0.5 * jnp.tanh(x @ w).mean(tuple(range(x.ndim - 1)))


def data(*shape):
    x = jax.random.normal(jax.random.key(3), (*shape, 2))
    return x, jnp.sin(x[..., 0]) - x[..., 1]


def params_of(net):
    return net.w.value, net.out.value


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def descend(net, grads, rate=0.1):
    params = ab.state(net, ab.Param)
    ab.update(net, jax.tree.map(lambda p, g: p - rate * g, params, grads))


class TestAccumulation:
    @pytest.mark.parametrize("wrap", [lambda f: f, transforms.jit], ids=["eager", "jit"])
    def test_gradients_of_micro_batches_are_summed_by_scan(self, wrap):
        traces = []

        def micro(total, batch, net):
            traces.append(1)
            value, grads = transforms.value_and_grad(loss)(net, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        def step(net, xs, ys):
            zeros = jax.tree.map(jnp.zeros_like, ab.state(net, ab.Param))
            total, values = transforms.scan(micro, in_axes=(ab.Carry, 0, None))(
                zeros, (xs, ys), net
            )
            descend(net, total, 0.1 / len(xs))
            return values

        run = wrap(step)
        net = Net(ab.Rngs(0))
        cells = [net.w, net.out, net.mean, net.calls]
        params, mean = params_of(net), net.mean.value
        xs, ys = data(4, 5)
        for _ in range(3):
            values = run(net, xs, ys)
            total, expected = (jnp.zeros((2, 3)), jnp.zeros(3)), []
            for x, y in zip(xs, ys, strict=True):
                value, grads = plain_gradients(params, x, y)
                total = jax.tree.map(jnp.add, total, grads)
                mean = plain_mean(mean, params[0], x)
                expected.append(value)
            params = jax.tree.map(lambda p, g: p - 0.1 / 4 * g, params, total)
            close(values, jnp.stack(expected))
            close((params_of(net), net.mean.value), (params, mean))
        assert int(net.calls) == 12
        assert all(
            a is b for a, b in zip(cells, [net.w, net.out, net.mean, net.calls], strict=True)
        )
        assert len(traces) == 1

    def test_a_module_can_be_the_accumulator(self):
        class Sum(ab.Module):
            def __init__(self):
                self.total = ab.Variable({"w": jnp.zeros((2, 3)), "out": jnp.zeros(3)})
                self.steps = 0 * jnp.ones((), jnp.int32)

        def micro(state, batch):
            net, sums = state
            grads = transforms.grad(loss)(net, *batch)
            new = {"w": grads["w"], "out": grads["out"]}
            sums.total.value = jax.tree.map(jnp.add, sums.total.value, new)
            sums.steps = sums.steps + 1
            return (net, sums), None

        net, sums = Net(ab.Rngs(0)), Sum()
        xs, ys = data(4, 5)
        (net_out, sums_out), _ = transforms.jit(transforms.scan(micro))((net, sums), (xs, ys))
        assert net_out is net
        assert sums_out is sums
        expected = [plain_gradients(params_of(net), x, y)[1] for x, y in zip(xs, ys, strict=True)]
        w, out = jax.tree.map(lambda *g: sum(g), *expected)
        close(sums.total.value, {"w": w, "out": out})
        assert int(sums.steps) == 4


class TestPerExample:
    def check(self, net, found, xs, ys):
        expected = [plain_gradients(params_of(net), x, y)[1] for x, y in zip(xs, ys, strict=True)]
        w, out = jax.tree.map(lambda *g: jnp.stack(g), *expected)
        close((found["w"], found["out"]), (w, out))

    def test_vmap_of_grad_with_statistics_of_each_example(self):
        net = Net(ab.Rngs(0))
        net.mean.value = jnp.zeros((6, 3))
        xs, ys = data(6)
        w = net.w.value
        axes = ab.StateAxes({ab.BatchStat: 0, ...: None})
        run = transforms.jit(transforms.vmap(transforms.grad(loss), in_axes=(axes, 0, 0)))
        found = run(net, xs, ys)
        self.check(net, found, xs, ys)
        assert net.w.value is w
        assert int(net.calls) == 1
        close(net.mean.value, jnp.stack([plain_mean(jnp.zeros(3), w, x) for x in xs]))

    def test_shared_statistics_are_refused_by_name(self):
        net = Net(ab.Rngs(0))
        values = [net.w.value, net.mean.value, net.calls.value]
        per_example = transforms.vmap(transforms.grad(loss), in_axes=(None, 0, 0))
        for run in (per_example, transforms.jit(per_example)):
            with pytest.raises(ab.errors.BroadcastWriteError, match=r"mean[^\n]*\n(.*\n)*.*axis"):
                run(net, *data(6))
        after = [net.w.value, net.mean.value, net.calls.value]
        assert all(a is b for a, b in zip(values, after, strict=True))

    def test_shared_statistics_that_are_averaged_over_the_examples(self):
        def averaged(net, x, y):
            value = loss(net, x, y)
            net.mean.value = jax.lax.pmean(net.mean.value, "batch")
            return value

        net = Net(ab.Rngs(0))
        xs, ys = data(6)
        run = transforms.vmap(transforms.grad(averaged), in_axes=(None, 0, 0), axis_name="batch")
        found = transforms.jit(run)(net, xs, ys)
        self.check(net, found, xs, ys)
        close(net.mean.value, plain_mean(jnp.zeros(3), net.w.value, xs))

    def test_clipped_and_noisy_descent_with_a_mask_for_each_example(self):
        def noisy(w, x, rngs):
            keep = jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)
            return jnp.where(keep, x, 0.0) @ w**2

        def clip(g):
            return g / jnp.maximum(1.0, jnp.linalg.norm(g))

        @transforms.jit
        def step(w, xs, rngs):
            one = transforms.vmap(transforms.grad(noisy), in_axes=(None, 0, None), rngs="split")
            grads = jax.vmap(clip)(one(w, xs, rngs)[()])
            noise = jax.random.normal(rngs.noise(), w.value.shape)
            w.value = w - 0.1 * (grads.mean(0) + 0.01 * noise)

        w, rngs, xs = ab.Param(jnp.array([1.0, -2.0])), ab.Rngs(dropout=1, noise=2), data(6)[0]
        value = w.value
        dropout, noise = rngs.dropout.key.value, rngs.noise.key.value
        for i in range(3):
            step(w, xs, rngs)
            keys = jax.random.split(jax.random.fold_in(dropout, i), 6)
            total = jnp.zeros(2)
            for x, k in zip(xs, keys, strict=True):
                keep = jax.random.bernoulli(jax.random.fold_in(k, 0), 0.5, x.shape)
                total = total + clip(jnp.where(keep, x, 0.0) * 2 * value)
            drawn = jax.random.normal(jax.random.fold_in(noise, i), (2,))
            value = value - 0.1 * (total / 6 + 0.01 * drawn)
            close(w.value, value)
        assert int(rngs.dropout.count) == int(rngs.noise.count) == 3


def plain_adapt(params, rate, xs, ys):
    for x, y in zip(xs, ys, strict=True):
        _, grads = plain_gradients(params, x, y)
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params


class TestMetaLearning:
    def adapted(self, net, rate, xs, ys):
        fast = ab.clone(net)

        def inner(fast, batch, rate):
            grads = transforms.grad(loss)(fast, *batch)
            descend(fast, grads, rate)
            return fast, None

        return transforms.scan(inner, in_axes=(ab.Carry, 0, None))(fast, (xs, ys), rate)[0]

    def test_gradients_through_an_inner_scan_of_updates(self):
        def meta_loss(net, rate, xs, ys):
            fast = self.adapted(net, rate, xs[:-1], ys[:-1])
            return loss(fast, xs[-1], ys[-1]), fast

        def plain(params, rate, xs, ys):
            return plain_loss(plain_adapt(params, rate, xs[:-1], ys[:-1]), xs[-1], ys[-1])

        net, rate, (xs, ys) = Net(ab.Rngs(0)), jnp.array(0.3), data(3, 5)
        values = [net.w.value, net.out.value, net.mean.value, net.calls.value]
        run = transforms.jit(transforms.value_and_grad(meta_loss, argnums=(0, 1), has_aux=True))
        (value, fast), (grads, rate_grad) = run(net, rate, xs, ys)
        expected, (own, own_rate) = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(
            params_of(net), rate, xs, ys
        )
        close((value, (grads["w"], grads["out"]), rate_grad), (expected, own, own_rate))
        after = [net.w.value, net.out.value, net.mean.value, net.calls.value]
        assert all(a is b for a, b in zip(values, after, strict=True))  # only the copy is written
        assert fast is not net
        assert int(fast.calls) == 3
        close(params_of(fast), plain_adapt(params_of(net), rate, xs[:-1], ys[:-1]))

    def test_a_batch_of_tasks_under_vmap(self):
        def task_loss(net, xs, ys):
            fast = self.adapted(net, 0.3, xs[:-1], ys[:-1])
            return loss(fast, xs[-1], ys[-1])

        def meta_loss(net, xs, ys):
            return transforms.vmap(task_loss, in_axes=(None, 0, 0))(net, xs, ys).mean()

        @transforms.jit
        def meta_step(net, xs, ys):
            value, grads = transforms.value_and_grad(meta_loss)(net, xs, ys)
            descend(net, grads)
            return value

        def plain(params, xs, ys):
            each = [
                plain_loss(plain_adapt(params, 0.3, x[:-1], y[:-1]), x[-1], y[-1])
                for x, y in zip(xs, ys, strict=True)
            ]
            return sum(each) / len(each)

        plain_step = jax.jit(jax.value_and_grad(plain))
        net, (xs, ys) = Net(ab.Rngs(0)), data(2, 3, 5)
        params = params_of(net)
        for _ in range(2):
            value = meta_step(net, xs, ys)
            expected, grads = plain_step(params, xs, ys)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            close((value, params_of(net)), (expected, params))
        assert int(net.calls) == 0

    def test_hessian_vector_products_of_a_module(self):
        net, (x, y) = Net(ab.Rngs(0)), data(5)
        direction = jax.tree.map(jnp.ones_like, ab.state(net, ab.Param))

        def slope(net):
            return transforms.jvp(lambda n: loss(n, x, y), (net,), (direction,))[1]

        grads = transforms.jit(transforms.grad(slope))(net)
        ones = jax.tree.map(jnp.ones_like, params_of(net))
        own = jax.jvp(jax.grad(lambda p: plain_loss(p, x, y)), (params_of(net),), (ones,))[1]
        close((grads["w"], grads["out"]), own)
        assert int(net.calls) == 1


class TestEnsemble:
    def test_created_under_vmap_trained_under_jit_of_vmap(self):
        traces = []

        def step(net, x, y):
            traces.append(1)
            value, grads = transforms.value_and_grad(loss)(net, x, y)
            descend(net, grads)
            return value

        rngs = ab.Rngs(params=5)
        keys = jax.random.split(jax.random.fold_in(rngs.params.key.value, 0), 3)
        make = transforms.vmap(Net, in_axes=None, axis_size=3, rngs="split")
        ensemble = make(rngs)
        members = [Net(ab.Rngs(params=key)) for key in keys]
        assert type(ensemble) is Net
        assert type(ensemble.mean) is ab.BatchStat
        assert int(rngs.params.count) == 1

        train = transforms.jit(transforms.vmap(step, in_axes=(0, None, None)))
        cells = [ensemble.w, ensemble.out, ensemble.mean, ensemble.calls]
        x, y = data(6)
        for _ in range(2):
            losses = train(ensemble, x, y)
            close(losses, jnp.stack([step(member, x, y) for member in members]))
        for i, member in enumerate(members):
            for cell in ("w", "out", "mean", "calls"):
                close(getattr(ensemble, cell).value[i], getattr(member, cell).value)
        after = [ensemble.w, ensemble.out, ensemble.mean, ensemble.calls]
        assert all(a is b for a, b in zip(cells, after, strict=True))
        assert len(traces) == 1 + 2 * len(members)

        predict = transforms.jit(transforms.vmap(Net.__call__, in_axes=(0, None)))
        close(predict(ensemble, x), jnp.stack([member(x) for member in members]))

    def test_members_share_a_part_that_has_no_axis(self):
        class Member(ab.Module):
            def __init__(self, shared, rngs):
                self.shared = shared
                self.head = ab.Param(jax.random.normal(rngs(), (3,)))

            def __call__(self, x):
                return self.shared(x) @ self.head

        class Shared(ab.Module):
            def __init__(self, rngs):
                self.kernel = ab.Variable(jax.random.normal(rngs(), (2, 3)))

            def __call__(self, x):
                return jnp.tanh(x @ self.kernel)

        rngs = ab.Rngs(0)
        shared = Shared(rngs)
        out_axes = ab.StateAxes({ab.Param: 0, ...: None})
        make = transforms.vmap(Member, in_axes=None, out_axes=out_axes, axis_size=4, rngs="split")
        ensemble = make(shared, rngs)
        assert ensemble.shared is shared
        assert ensemble.head.value.shape == (4, 3)

        @transforms.jit
        def total(net, x):
            each = transforms.vmap(lambda m, x: m(x), in_axes=(out_axes, None))
            return (each(net, x) ** 2).sum()

        x = data(6)[0]
        grads = transforms.grad(total, argnums=ab.DiffState(0, ...))(ensemble, x)

        def plain(kernel, heads):
            return sum(((jnp.tanh(x @ kernel) @ head) ** 2).sum() for head in heads)

        kernel, heads = jax.grad(plain, argnums=(0, 1))(shared.kernel.value, ensemble.head.value)
        close((grads["shared", "kernel"], grads["head"]), (kernel, heads))
