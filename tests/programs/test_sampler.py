"""A while_loop sampler that owns its random stream, against the Python loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms


class Sampler(ab.Module):
    """A random walk that accepts or rejects, until it has accepted enough."""

    def __init__(self, seed, wanted=5):
        self.rngs = ab.Rngs(walk=seed)
        self.x = ab.Variable(jnp.zeros(2))
        self.accepted = ab.Variable(jnp.zeros((), jnp.int32))
        self.tried = ab.Variable(jnp.zeros((), jnp.int32))
        self.wanted = wanted
        self.history = {"last": jnp.zeros(2)}
        self.me = self

    def density(self, x):
        return -0.5 * (x**2).sum()

    def running(self):
        return self.accepted < self.wanted

    def step(self):
        proposal = self.x + jax.random.normal(self.rngs.walk(), (2,))
        accept = jnp.log(jax.random.uniform(self.rngs.walk())) < (
            self.density(proposal) - self.density(self.x.value)
        )
        self.x.value = jnp.where(accept, proposal, self.x.value)
        self.history["last"] = proposal
        self.accepted.value += accept.astype(jnp.int32)
        self.tried.value += 1


def contents(s):
    arrays = [s.x.value, s.accepted.value, s.tried.value, s.history["last"]]
    return [np.asarray(a).tolist() for a in (*arrays, s.rngs.walk.count.value)]


def run(sampler):
    def body(s):
        s.step()
        return s

    return transforms.while_loop(lambda s: s.running(), body, sampler)


def plain(key, wanted, start=0):
    """The same walk on arrays; key number n is the n-th draw."""
    x, accepted, tried, draws = jnp.zeros(2), 0, 0, start
    last = x
    while accepted < wanted:
        last = x + jax.random.normal(jax.random.fold_in(key, draws), (2,))
        level = jnp.log(jax.random.uniform(jax.random.fold_in(key, draws + 1)))
        draws += 2
        if level < 0.5 * ((x**2).sum() - (last**2).sum()):
            x, accepted = last, accepted + 1
        tried += 1
    return [x.tolist(), accepted, tried, last.tolist(), draws]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, transforms.jit], ids=["eager", "jit"])
def test_equals_the_python_loop_with_identity(wrap):
    sampler = Sampler(3)
    key = sampler.rngs.walk.key.value
    parts = [sampler.x, sampler.accepted, sampler.history, sampler.rngs, sampler.rngs.walk.count]
    assert wrap(run)(sampler) is sampler
    close(contents(sampler), plain(key, 5))
    assert int(sampler.tried) > 5  # something was rejected
    assert sampler.rngs.walk.key.value is key
    after = [sampler.x, sampler.accepted, sampler.history, sampler.rngs, sampler.rngs.walk.count]
    assert all(a is b for a, b in zip(parts, after, strict=True))
    assert sampler.me is sampler


def test_goes_on_where_it_stopped():
    one, other = Sampler(3), Sampler(3)
    go = transforms.jit(run)
    for wanted in (2, 5, 5):
        one.wanted = wanted
        go(one)
    other.wanted = 5
    run(other)
    assert contents(one) == contents(other)


def test_methods_are_traced_once():
    traces = []

    class Counting(Sampler):
        def running(self):
            traces.append("cond")
            return super().running()

        def step(self):
            traces.append("body")
            super().step()

    def body(s):
        s.step()
        return s

    samplers = [Counting(i) for i in range(4)]
    for sampler in samplers:
        transforms.while_loop(Counting.running, body, sampler)
    assert sorted(traces) == ["body", "cond"]
    for i, sampler in enumerate(samplers):
        close(contents(sampler), plain(jax.random.key(i), 5))


def test_chains_under_vmap_stop_one_by_one():
    chains = transforms.vmap(lambda key: Sampler(key, wanted=4))(
        jax.random.split(jax.random.key(0), 3)
    )
    keys = chains.rngs.walk.key.value
    lanes = transforms.jit(transforms.vmap(run))
    assert lanes(chains) is chains
    expected = [plain(key, 4) for key in keys]
    for i, found in enumerate(zip(*contents(chains), strict=True)):
        close(found, expected[i])
    assert len({row[2] for row in expected}) > 1  # they take different numbers of steps


def test_one_sampler_split_over_lanes():
    sampler = Sampler(1)
    key = sampler.rngs.walk.key.value

    def once(s):
        return s.x + jax.random.normal(s.rngs.walk(), (2,))

    with pytest.raises(ab.errors.SharedStreamError, match="walk"):
        transforms.vmap(once, in_axes=None, axis_size=3)(sampler)
    for draw in range(2):
        run_lanes = transforms.vmap(once, in_axes=None, axis_size=3, rngs="split")
        found = transforms.jit(run_lanes)(sampler)
        lanes = jax.random.split(jax.random.fold_in(key, draw), 3)
        each = [jax.random.normal(jax.random.fold_in(k, 0), (2,)) for k in lanes]
        np.testing.assert_allclose(found, jnp.stack(each), rtol=1e-6)
    assert int(sampler.rngs.walk.count) == 2


def test_samples_are_collected_by_a_scan_around_it():
    def sweep(sampler, _):
        sampler.accepted.value = sampler.accepted * 0
        run(sampler)
        return sampler, (sampler.x * 1, sampler.tried * 1)

    sampler, other = Sampler(3, wanted=2), Sampler(3, wanted=2)
    found, (xs, tried) = transforms.jit(transforms.scan(sweep, length=2))(sampler, None)
    assert found is sampler
    expected = [sweep(other, None)[1] for _ in range(2)]
    np.testing.assert_allclose(xs, jnp.stack([x for x, _ in expected]), rtol=1e-6)
    assert tried.tolist() == [int(n) for _, n in expected]
    close(contents(sampler), contents(other))


def test_rejection_inside_cond_inside_fori():
    """A draw in one branch only: the stream advances where the branch is taken."""

    def draw(s):
        return jax.random.uniform(s.rngs.walk())

    def body(i, state):
        s, total = state
        total = total + transforms.cond(i % 2 == 0, draw, lambda s: 0.0, s)
        return s, total

    sampler = Sampler(2)
    s, total = transforms.fori_loop(0, 5, body, (sampler, 0.0))
    assert s is sampler
    assert int(sampler.rngs.walk.count) == 3
    key = sampler.rngs.walk.key.value
    expected = sum(float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(3))
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_a_failure_inside_leaves_the_stream_alone():
    def body(s):
        s.step()
        raise RuntimeError("body")

    sampler = Sampler(3)
    before = contents(sampler)
    for wrap in (lambda f: f, transforms.jit):
        with pytest.raises(RuntimeError, match="body"):
            wrap(lambda s: transforms.while_loop(Sampler.running, body, s))(sampler)
        assert contents(sampler) == before
