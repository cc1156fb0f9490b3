"""Random streams of flax, split and forked by our functions, as ours are and as flax does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import anabranch as ab
from anabranch.errors import FilterError, SharedStreamError, StructureError

LANES = 4
MESH = Mesh(np.array(jax.devices()[:LANES]), "i")


class Noisy(nnx.Module):
    def __init__(self) -> None:
        self.noise = nnx.Rngs(dropout=3)
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)), self.noise])


MADE = {
    "Rngs": (lambda: nnx.Rngs(0, dropout=1), lambda: ab.Rngs(0, dropout=1)),
    "RngStream": (lambda: nnx.RngStream(5, tag="dropout"), lambda: ab.RngStream(5, name="dropout")),
}


@pytest.fixture(params=MADE)
def both(request):
    theirs, ours = MADE[request.param]
    return theirs(), ours()


def bits(x: Any) -> Any:
    leaves = []
    for leaf in ab.state(x).leaves:
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves.append(np.asarray(jax.random.key_data(leaf) if key else leaf).tolist())
    return sorted(leaves, key=str)


def draw(rngs: Any) -> Any:
    stream = rngs.dropout if hasattr(rngs, "dropout") else rngs
    return jax.random.normal(stream(), (2,)) + jax.random.normal(stream(), (2,))


SPLITS = [None, 3, (2, 3), {"dropout": 2}, {"dropout": (2, 2), ...: None}, {nnx.RngKey: 3}]


class TestForks:
    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_a_copy_has_the_streams_that_ours_have(self, both, split):
        theirs, ours = both
        if split == {nnx.RngKey: 3}:
            forked = ab.fork_rngs(theirs, split=split), ab.fork_rngs(ours, split=3)
        else:
            forked = ab.fork_rngs(theirs, split=split), ab.fork_rngs(ours, split=split)
        assert bits(forked[0]) == bits(forked[1])
        assert bits(theirs) == bits(ours)
        assert type(forked[0]) is type(theirs)
        assert forked[0] is not theirs
        assert {int(x) for x in ab.state(theirs, ab.RngCount).leaves} == {1}

    def test_they_are_those_of_flax(self):
        ours, theirs = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
        assert bits(ab.fork_rngs(ours)) == bits(theirs.fork())
        assert bits(ab.fork_rngs(ours, split=3)) == bits(theirs.split(3))
        assert bits(ours) == bits(theirs)

    def test_of_a_model_all_streams_are_new_in_the_copy_and_shared_ones_stay_shared(self):
        model = Noisy()
        copy = ab.fork_rngs(model)
        assert copy.layers[1] is copy.noise
        assert model.noise.dropout.count[...] == 1
        assert copy.noise.dropout.count[...] == 0
        assert copy.layers[0].rngs.count[...] == 0
        assert copy.noise.dropout() != model.noise.dropout()

    @pytest.mark.filterwarnings("ignore:The 'split' argument:DeprecationWarning")  # within flax
    @pytest.mark.parametrize("split", [{"dropout": LANES}, {"dropout": None}], ids=str)
    def test_a_decorated_function_does_what_flax_does(self, split):
        def f(rngs):
            return rngs.dropout.key[...], rngs.dropout.count[...]

        ours, theirs = nnx.Rngs(dropout=1), nnx.Rngs(dropout=1)
        found, expected = ab.fork_rngs(split=split)(f)(ours), nnx.fork_rngs(split=split)(f)(theirs)
        assert (found[0] == expected[0]).all()
        assert found[1].tolist() == expected[1].tolist()
        assert bits(ours) == bits(theirs)

    def test_a_function_that_raises_leaves_the_streams_as_they_were(self):
        rngs = nnx.Rngs(dropout=1)
        before = bits(rngs)

        @ab.fork_rngs
        def f(rngs):
            rngs.dropout()
            raise RuntimeError("late")

        with pytest.raises(RuntimeError, match="late"):
            f(rngs)
        assert bits(rngs) == before

    def test_inside_of_a_compiled_function_and_of_lanes(self, both):
        def f(rngs):
            return draw(ab.fork_rngs(rngs)), ab.vmap(draw)(ab.fork_rngs(rngs, split=LANES))

        theirs, ours = both
        found, expected = ab.jit(f)(theirs), f(ours)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
        assert bits(theirs) == bits(ours)

    def test_what_is_not_there_is_refused(self, both):
        for rngs in both:
            before = bits(rngs)
            with pytest.raises(StructureError, match="'drop'"):
                ab.fork_rngs(rngs, split={"drop": 2})
            with pytest.raises(StructureError, match="several keys"):
                ab.fork_rngs(ab.fork_rngs(rngs, split=2))
            assert bits(rngs) != before  # (the fork that did succeed)
        with pytest.raises(FilterError, match="there are none"):
            ab.fork_rngs(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


class TestSplits:
    @pytest.mark.parametrize("splits", [3, (2, 3)])
    def test_a_block_sees_the_keys_that_ours_and_flax_would_see(self, both, splits):
        with ab.split_rngs(both[0], splits=splits), ab.split_rngs(both[1], splits=splits):
            assert bits(both[0]) == bits(both[1])
        assert bits(both[0]) == bits(both[1])
        ours, theirs = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
        with ab.split_rngs(ours, splits=splits), nnx.split_rngs(theirs, splits=splits):
            assert bits(ours) == bits(theirs)
        assert bits(ours) == bits(theirs)

    def test_a_function_that_captures_streams_is_a_function(self):
        captured = nnx.Rngs(7)

        def f(rngs):
            return rngs.dropout.key.shape, captured.default.key.shape

        assert ab.split_rngs(f, splits=2)(nnx.Rngs(dropout=0)) == ((2,), (2,))
        assert ab.fork_rngs(f, split={"dropout": 3})(nnx.Rngs(dropout=0)) == ((3,), ())
        assert captured.default.count[...] == 2


IN_LANES = {
    "vmap": lambda f, **rngs: ab.vmap(f, in_axes=(None, 0), **rngs),
    "pmap": lambda f, **rngs: ab.pmap(f, in_axes=(None, 0), **rngs),
    "shard_map": lambda f, **rngs: ab.shard_map(
        f,
        mesh=MESH,
        in_specs=(PartitionSpec(), PartitionSpec("i")),
        out_specs=PartitionSpec("i"),
        **rngs,
    ),
}
OWN = {
    "vmap": lambda f: ab.vmap(f, in_axes=0),
    "pmap": lambda f: ab.pmap(f, in_axes=0),
}


@pytest.mark.parametrize("transform", IN_LANES)
class TestLanes:
    @pytest.mark.parametrize("policy", ["split", "share"])
    def test_a_shared_stream_does_what_ours_does(self, both, transform, policy):
        def f(rngs, x):
            return x + draw(rngs)

        run = IN_LANES[transform](f, rngs=policy)
        xs = jnp.zeros((LANES, 2))
        for _ in range(2):
            found, expected = run(both[0], xs), run(both[1], xs)
            np.testing.assert_array_equal(found, expected)
            assert bits(both[0]) == bits(both[1])
            assert len({tuple(row) for row in found.tolist()}) == (
                LANES if policy == "split" else 1
            )

    def test_without_a_policy_it_is_refused(self, both, transform):
        for rngs in both:
            before = bits(rngs)
            with pytest.raises(SharedStreamError):
                IN_LANES[transform](lambda rngs, x: x + draw(rngs))(rngs, jnp.zeros((LANES, 2)))
            assert bits(rngs) == before


@pytest.mark.parametrize("transform", OWN)
@pytest.mark.parametrize("by_hand", [ab.split_rngs(splits=LANES), ab.fork_rngs(split=LANES)])
def test_streams_that_are_split_by_hand_have_a_key_in_each_lane(both, transform, by_hand):
    run = by_hand(OWN[transform](draw))
    for _ in range(2):
        found, expected = run(both[0]), run(both[1])
        np.testing.assert_array_equal(found, expected)
        assert bits(both[0]) == bits(both[1])
        assert len({tuple(row) for row in found.tolist()}) == LANES


def test_a_dropout_layer_of_flax_in_lanes():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x = jnp.ones((LANES, 16))
    split = ab.vmap(lambda m, x: m(x), in_axes=(None, 0), rngs="split")(layer, x)
    assert len({tuple(row) for row in split.tolist()}) == LANES
    by_hand = ab.split_rngs(splits=LANES)(
        ab.vmap(lambda m, x: m(x), in_axes=(ab.StateAxes({nnx.RngState: 0, ...: None}), 0))
    )
    assert len({tuple(row) for row in by_hand(layer, x).tolist()}) == LANES
    assert layer.rngs.count[...] == 2
