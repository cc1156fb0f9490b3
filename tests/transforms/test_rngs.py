"""Random streams that lanes share: refused, split, shared; split and forked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab

LANES = 8
BOTH = pytest.mark.parametrize("lanes", [ab.vmap, ab.pmap], ids=["vmap", "pmap"])


class Net(ab.Module):
    def __init__(self, seed=0):
        self.w = ab.Param(jnp.ones(3))
        self.rngs = ab.Rngs(params=seed, dropout=seed + 1)


def mask(net, x):
    return jax.random.bernoulli(net.rngs.dropout(), 0.5, (16,)) + x


def noise(rngs, x):
    return jax.random.normal(rngs()) + x


def keys_of(stream, lanes=LANES):
    return jax.random.split(jax.random.fold_in(stream.key.value, stream.count.value), lanes)


@BOTH
class TestPolicies:
    def test_without_a_policy_the_error_names_the_stream_and_both_policies(self, lanes):
        """C8."""
        net = Net()
        with pytest.raises(ab.errors.SharedStreamError) as caught:
            lanes(mask, in_axes=(None, 0))(net, jnp.zeros(LANES))
        for part in ("args[0].rngs.dropout.count", 'rngs="split"', 'rngs="share"'):
            assert part in str(caught.value)
        assert int(net.rngs.dropout.count.value) == 0

    def test_filters_that_broadcast_a_stream_are_no_way_around(self, lanes):
        net = Net()
        axes = ab.StateAxes({ab.Param: None, ...: None})
        with pytest.raises(ab.errors.SharedStreamError):
            lanes(mask, in_axes=(axes, 0))(net, jnp.zeros(LANES))

    def test_split_gives_each_lane_numbers_of_its_own(self, lanes):
        """C8."""
        net = Net()
        net.rngs.dropout()  # so that the count matters
        stream = net.rngs.dropout
        key, count = stream.key.value, stream.count
        expected = [
            jax.random.bernoulli(jax.random.fold_in(k, 0), 0.5, (16,)).tolist()
            for k in keys_of(stream)
        ]
        out = lanes(mask, in_axes=(None, 0), rngs="split")(net, jnp.zeros(LANES))
        assert out.astype(bool).tolist() == expected
        assert len({tuple(row) for row in expected}) > 1
        assert net.rngs.dropout is stream
        assert stream.key.value is key
        assert stream.count is count
        assert int(count.value) == 2
        assert count.value.dtype == jnp.uint32
        assert count.value.shape == ()
        assert int(net.rngs.params.count.value) == 0

    def test_split_advances_by_one_however_often_lanes_draw(self, lanes):
        def f(rngs, x):
            return jnp.stack([jax.random.normal(rngs()) for _ in range(3)]) + x

        rngs = ab.Rngs(0)
        mapped = lanes(f, in_axes=(None, 0), rngs="split")
        first = mapped(rngs, jnp.zeros(LANES))
        second = mapped(rngs, jnp.zeros(LANES))
        assert int(rngs.default.count.value) == 2
        assert len({*first.ravel().tolist(), *second.ravel().tolist()}) == 2 * 3 * LANES

    def test_share_gives_all_lanes_the_same_numbers(self, lanes):
        """C8."""
        rngs = ab.Rngs(0)
        expected = jax.random.normal(jax.random.fold_in(rngs.default.key.value, 0))
        out = lanes(noise, in_axes=(None, 0), rngs="share")(rngs, jnp.zeros(LANES))
        assert jnp.allclose(out, expected)
        assert len(set(out.tolist())) == 1
        assert int(rngs.default.count.value) == 1

    def test_mapped_streams_are_just_mapped(self, lanes):
        stream = ab.RngStream(jax.random.split(jax.random.key(0), LANES))
        for policy in (None, "split", "share"):
            out = lanes(lambda s: jax.random.normal(s()), rngs=policy)(stream)
            assert len(set(out.tolist())) == LANES
        assert stream.count.value.tolist() == [3] * LANES

    def test_mapped_keys_may_have_one_count(self, lanes):
        stream = ab.RngStream(jax.random.split(jax.random.key(0), LANES))
        stream.count.value = jnp.zeros((), jnp.uint32)
        axes = ab.StateAxes({ab.RngKey: 0, ...: None})
        out = lanes(lambda s: jax.random.normal(s()), in_axes=(axes,))(stream)
        assert len(set(out.tolist())) == LANES
        assert int(stream.count.value) == 1

    def test_a_stream_that_is_split_already_cannot_be_split_again(self, lanes):
        stream = ab.RngStream(jax.random.split(jax.random.key(0), 3))

        def f(stream, x):
            stream.count.value = stream.count.value + 1
            return x

        with pytest.raises(ab.errors.SharedStreamError, match="several keys"):
            lanes(f, in_axes=(None, 0), rngs="split")(stream, jnp.zeros(LANES))

    def test_the_key_of_a_lane_is_not_the_key_of_the_stream(self, lanes):
        """What a lane returns of its own key is stacked; what it leaves there is refused."""
        rngs = ab.Rngs(0)
        keys = keys_of(rngs.default)
        out = lanes(lambda r, x: r.default.key.value, in_axes=(None, 0), rngs="split")(
            rngs, jnp.zeros(LANES)
        )
        assert (out == keys).all()
        holder = {"v": ab.Variable(0.0), "rngs": rngs}

        def leave(holder, x):
            holder["v"].value = holder["rngs"].default.key.value
            return x

        with pytest.raises(ab.errors.BroadcastWriteError, match="'v'"):
            lanes(leave, in_axes=(None, 0), rngs="split")(holder, jnp.zeros(LANES))

    def test_legacy_keys(self, lanes):
        rngs = ab.Rngs(jax.random.PRNGKey(0))
        out = lanes(noise, in_axes=(None, 0), rngs="split")(rngs, jnp.zeros(LANES))
        assert len(set(out.tolist())) == LANES
        assert int(rngs.default.count.value) == 1
        assert rngs.default.key.value.shape == (2,)

    def test_a_bound_object_can_own_the_stream(self, lanes):
        class Sampler(ab.Module):
            def __init__(self):
                self.rngs = ab.Rngs(0)

            def draw(self, x):
                return jax.random.normal(self.rngs()) + x

        sampler = Sampler()
        out = lanes(sampler.draw, rngs="split")(jnp.zeros(LANES))
        assert len(set(out.tolist())) == LANES
        assert int(sampler.rngs.default.count.value) == 1

    def test_a_failure_leaves_the_stream_alone(self, lanes):
        def f(rngs, x):
            rngs()
            raise RuntimeError("lane")

        rngs = ab.Rngs(0)
        key = rngs.default.key.value
        with pytest.raises(RuntimeError, match="lane"):
            lanes(f, in_axes=(None, 0), rngs="split")(rngs, jnp.zeros(LANES))
        assert rngs.default.key.value is key
        assert int(rngs.default.count.value) == 0

    def test_an_unknown_policy_is_refused_at_once(self, lanes):
        with pytest.raises(ab.errors.StructureError, match="splits"):
            lanes(noise, rngs="splits")


class TestNested:
    def test_each_level_has_its_policy(self):
        rngs = ab.Rngs(0)
        inner = ab.vmap(noise, in_axes=(None, 0), rngs="split")
        x = jnp.zeros((2, 3))
        both = ab.vmap(inner, in_axes=(None, 0), rngs="split")(rngs, x)
        assert len(set(both.ravel().tolist())) == 6
        assert int(rngs.default.count.value) == 1
        rows = ab.vmap(inner, in_axes=(None, 0), rngs="share")(rngs, x)
        assert rows[0].tolist() == rows[1].tolist()
        assert len(set(rows[0].tolist())) == 3

    def test_under_jit_and_in_a_conditional_lane(self):
        def f(rngs, x):
            return jax.lax.cond(x > 0, lambda: 1.0, lambda: 0.0) + jax.random.normal(rngs())

        rngs, other = ab.Rngs(0), ab.Rngs(0)
        mapped = ab.vmap(f, in_axes=(None, 0), rngs="split")
        out = mapped(rngs, jnp.arange(4.0))
        compiled = ab.jit(mapped)(other, jnp.arange(4.0))
        assert jnp.allclose(out, compiled)
        assert int(other.default.count.value) == 1


class TestSplitRngs:
    def test_decorates_a_function_of_lanes(self):
        @ab.split_rngs(splits=5)
        @ab.vmap(in_axes=(ab.StateAxes({(ab.RngKey, ab.RngCount): 0, ...: None}), 0))
        def f(net, x):
            return mask(net, x)

        net = Net()
        key = net.rngs.dropout.key.value
        expected = [
            jax.random.bernoulli(jax.random.fold_in(k, 0), 0.5, (16,)).tolist()
            for k in keys_of(net.rngs.dropout, 5)
        ]
        assert f(net, jnp.zeros(5)).astype(bool).tolist() == expected
        assert net.rngs.dropout.key.value is key
        assert int(net.rngs.dropout.count.value) == 1
        assert int(net.rngs.params.count.value) == 1  # it was split as well
        assert f.__name__ == "f"

    def test_only_selects_streams(self):
        net = Net()
        with ab.split_rngs(net, splits=(2, 3), only="dropout"):
            assert net.rngs.dropout.key.value.shape == (2, 3)
            assert net.rngs.dropout.count.value.shape == (2, 3)
            assert net.rngs.params.key.value.shape == ()
            with pytest.raises(ValueError, match="no single next key"):
                net.rngs.dropout()
        assert int(net.rngs.dropout.count.value) == 1
        assert int(net.rngs.params.count.value) == 0

    def test_makes_ensembles(self):
        rngs = ab.Rngs(0)

        @ab.split_rngs(splits=4)
        @ab.vmap
        def make(rngs):
            return ab.Param(jax.random.normal(rngs(), (2,)))

        assert make(rngs).value.shape == (4, 2)
        assert int(rngs.default.count.value) == 1

    def test_works_on_methods_keyword_arguments_and_inside_jit(self):
        class Sampler(ab.Module):
            def __init__(self):
                self.rngs = ab.Rngs(0)

            @ab.split_rngs(splits=3)
            def draw(self, *, scale=1.0):
                return ab.vmap(lambda r: jax.random.normal(r()) * scale)(self.rngs)

        sampler, other = Sampler(), Sampler()
        out = sampler.draw(scale=2.0)
        assert jnp.allclose(ab.jit(lambda s: s.draw(scale=2.0))(other), out)
        assert int(sampler.rngs.default.count.value) == int(other.rngs.default.count.value) == 1
        assert other.rngs.default.key.value.shape == ()

    def test_a_failure_leaves_the_streams_as_they_were(self):
        net = Net()
        key = net.rngs.dropout.key.value
        with pytest.raises(RuntimeError, match="body"), ab.split_rngs(net, splits=2):
            raise RuntimeError("body")
        assert net.rngs.dropout.key.value is key
        assert int(net.rngs.dropout.count.value) == 0

    def test_a_stream_is_split_once(self):
        net = Net()
        with ab.split_rngs(net, splits=2, only="dropout"):
            with pytest.raises(ab.errors.StructureError, match=r"rngs\.dropout\.key"):
                ab.split_rngs(net, splits=2).__enter__()
            assert net.rngs.params.key.value.shape == ()  # all or nothing

    def test_a_selection_of_nothing_is_refused(self):
        with pytest.raises(ab.errors.FilterError, match=r"rngs\.dropout\.key"):
            ab.split_rngs(Net(), splits=2, only="drop").__enter__()
        with pytest.raises(ab.errors.FilterError, match="there are none"):
            ab.split_rngs(lambda x: x, splits=2)(1.0)

    def test_a_key_that_is_written_meanwhile_is_not_lost_silently(self):
        rngs = ab.Rngs(0)
        key = rngs.default.key.value
        refused = pytest.raises(ab.errors.StructureError, match="were written")
        with refused, ab.split_rngs(rngs, splits=2):
            rngs.default.key.value = jax.random.split(jax.random.key(5), 2)
        assert rngs.default.key.value is key


class TestForkRngs:
    def test_forks_from_the_next_key(self):
        rngs = ab.Rngs(0, dropout=1)
        next_key = jax.random.fold_in(rngs.dropout.key.value, 0)
        forked = ab.fork_rngs(rngs)
        assert (forked.dropout.key.value == next_key).all()
        assert list(forked) == list(rngs)
        assert forked.dropout is not rngs.dropout
        assert int(rngs.dropout.count.value) == 1
        assert int(forked.dropout.count.value) == 0
        assert forked.dropout.key.tag == "dropout"

    def test_splits_all_or_by_name(self):
        rngs = ab.Rngs(0, dropout=1)
        assert ab.fork_rngs(rngs, split=3).default.key.value.shape == (3,)
        forked = ab.fork_rngs(rngs, split={"dropout": (2, 2)})
        assert forked.dropout.key.value.shape == (2, 2)
        assert forked.dropout.count.value.shape == (2, 2)
        assert forked.default.key.value.shape == ()
        out = ab.vmap(lambda r: jax.random.normal(r()))(ab.fork_rngs(rngs, split=4))
        assert len(set(out.tolist())) == 4

    def test_refuses_unknown_names_and_split_streams(self):
        rngs = ab.Rngs(0)
        with pytest.raises(ab.errors.StructureError, match="'drop'"):
            ab.fork_rngs(rngs, split={"drop": 2})
        with pytest.raises(ab.errors.StructureError, match="several keys"):
            ab.fork_rngs(ab.fork_rngs(rngs, split=2))
