"""Random streams: which keys they give out, and that they behave as nodes."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import CapturedWriteError


def data(key):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key).tolist()


def keys_of(seed, n=4):
    key = jax.random.key(seed)
    return [data(jax.random.fold_in(key, i)) for i in range(n)]


def draw(stream, n=4):
    return [data(stream()) for _ in range(n)]


class TestStream:
    def test_key_number_n_is_the_seed_folded_with_n(self):
        stream = ab.RngStream(7)
        assert draw(stream) == keys_of(7)
        assert stream.count.value.dtype == jnp.uint32
        assert int(stream.count) == 4
        assert data(stream.key.value) == data(jax.random.key(7))

    def test_keys_differ(self):
        drawn = draw(ab.RngStream(0), 50)
        assert len({tuple(key) for key in drawn}) == 50

    @pytest.mark.parametrize(
        "seed",
        [7, np.int64(7), np.uint32(7), jnp.array(7), jax.random.key(7)],
        ids=lambda seed: type(seed).__name__,
    )
    def test_a_seed_is_an_integer_or_a_key(self, seed):
        assert draw(ab.RngStream(seed)) == keys_of(7)

    def test_a_typed_key_gives_typed_keys_of_its_implementation(self):
        key = ab.RngStream(jax.random.key(0, impl="rbg"))()
        assert str(jax.random.key_impl(key)) == "rbg"
        assert key.shape == ()

    @pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
    def test_a_legacy_key_gives_legacy_keys(self, array):
        seed = array(jax.random.key_data(jax.random.key(3)))
        stream = ab.RngStream(seed)
        key = stream()
        assert (key.dtype, key.shape) == (jnp.uint32, (2,))
        assert data(key) == keys_of(3)[0]
        assert draw(stream, 3) == keys_of(3)[1:]
        assert stream.count.shape == ()

    @pytest.mark.parametrize(
        ("seed", "found"),
        [
            (1.5, "float"),
            (True, "bool"),
            ("seed", "str"),
            (None, "NoneType"),
            (jnp.zeros(2), r"float32\[2\]"),
            (jnp.zeros(2, jnp.int32), r"int32\[2\]"),
            (jnp.zeros(3, jnp.uint32), r"uint32\[3\]"),
        ],
        ids=repr,
    )
    def test_anything_else_is_no_seed(self, seed, found):
        with pytest.raises(TypeError, match=f"expected a seed, found {found}"):
            ab.RngStream(seed)

    def test_the_name_is_the_tag_of_both_variables(self):
        stream = ab.RngStream(0, name="params")
        assert stream.key.get_metadata() == {"tag": "params"} == stream.count.get_metadata()
        assert ab.RngStream(0).key.get_metadata() == {}

    def test_the_name_does_not_change_the_keys(self):
        assert draw(ab.RngStream(0, name="a")) == draw(ab.RngStream(0, name="b")) == keys_of(0)

    @pytest.mark.parametrize("legacy", [False, True])
    def test_several_keys_in_one_stream_are_drawn_lane_by_lane(self, legacy):
        keys = jax.random.split(jax.random.key(0), 3)
        stream = ab.RngStream(jax.random.key_data(keys) if legacy else keys, name="noise")
        assert stream.count.value.tolist() == [0, 0, 0]
        with pytest.raises(ValueError, match=r"stream 'noise' holds keys of shape \(3,\)"):
            stream()
        assert stream.count.value.tolist() == [0, 0, 0]


class TestRngs:
    def test_streams_are_reached_as_attributes_and_as_items(self):
        rngs = ab.Rngs(0, params=1)
        assert rngs.params is rngs["params"]
        assert rngs.default is rngs["default"]
        assert isinstance(rngs.params, ab.RngStream)
        assert [data(rngs.params()), data(rngs["params"]())] == keys_of(1, 2)
        assert [data(rngs()), data(rngs.default())] == keys_of(0, 2)

    def test_streams_are_independent_of_each_other(self):
        rngs = ab.Rngs(0, a=1, b=1, c=2)
        draw(rngs.a)
        draw(rngs)
        assert draw(rngs.b) == keys_of(1)
        assert draw(rngs.c) == keys_of(2)

    def test_unknown_names_draw_from_the_default_stream(self):
        rngs = ab.Rngs(0, params=1)
        drawn = [data(rngs.dropout()), data(rngs["noise"]()), data(rngs()), data(rngs.dropout())]
        assert drawn == keys_of(0)
        assert rngs.dropout is rngs.default
        assert int(rngs.params.count) == 0

    def test_default_may_be_written_by_name(self):
        assert draw(ab.Rngs(default=5)) == draw(ab.Rngs(5)) == keys_of(5)

    def test_without_default_an_unknown_name_raises_and_names_the_streams(self):
        rngs = ab.Rngs(params=1, dropout=2)
        expected = r"no stream 'noise' and no default stream; its streams: params, dropout\."
        with pytest.raises(AttributeError, match=expected):
            rngs.noise
        with pytest.raises(KeyError, match=expected):
            rngs["noise"]
        with pytest.raises(AttributeError, match="no stream 'default'"):
            rngs()
        with pytest.raises(AttributeError, match="its streams: none"):
            ab.Rngs().params

    def test_it_knows_the_names_of_its_own_streams(self):
        rngs = ab.Rngs(0, params=1)
        assert list(rngs) == ["default", "params"]
        assert "params" in rngs
        assert "dropout" not in rngs

    @pytest.mark.parametrize("name", ["_hidden", "__len__", "_missing_text"])
    def test_a_name_that_python_or_rngs_needs_is_refused(self, name):
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
            ab.Rngs(**{name: 0})

    def test_python_does_not_get_streams_for_its_own_questions(self):
        rngs = ab.Rngs(0)
        assert not hasattr(rngs, "__array__")
        assert not hasattr(rngs, "__jax_array__")
        assert not hasattr(rngs, "_private")

    def test_streams_can_be_added_and_deleted(self):
        rngs = ab.Rngs(0)
        rngs.params = ab.RngStream(1, name="params")
        assert data(rngs.params()) == keys_of(1)[0]
        del rngs.params
        assert data(rngs.params()) == keys_of(0)[0]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": ab.clone,
    "split and merge": lambda x: ab.merge(*ab.split(x)),
}


class TestNodes:
    @pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
    def test_a_copy_goes_on_where_the_original_was_and_leaves_it_alone(self, make_copy):
        rngs = ab.Rngs(0, params=1)
        draw(rngs.params, 2)
        new = make_copy(rngs)
        assert type(new) is ab.Rngs
        assert list(new) == ["default", "params"]
        assert draw(new.params, 2) == keys_of(1)[2:]
        assert int(rngs.params.count) == 2
        assert draw(new.unknown, 1) == keys_of(0, 1)
        assert new.params.key.tag == "params"

    @pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
    def test_a_shared_stream_stays_shared(self, make_copy):
        rngs = ab.Rngs(0)
        rngs.alias = rngs.default
        new = make_copy([rngs, rngs])
        assert new[0] is new[1]
        assert new[0].alias is new[0].default
        draw(new[0], 3)
        assert int(new[1].alias.count) == 3

    def test_the_state_holds_a_key_and_a_count_for_each_stream(self):
        state = ab.state(ab.Rngs(0, params=1))
        assert state.paths == (
            ("default", "key"),
            ("default", "count"),
            ("params", "key"),
            ("params", "count"),
        )
        assert [info.kind for info in state.infos] == [ab.RngKey, ab.RngCount] * 2

    def test_filters_find_streams_by_name_and_by_kind(self):
        rngs = ab.Rngs(0, params=1)
        params, keys = ab.state(rngs, "params", ab.RngKey)
        assert params.paths == (("params", "key"), ("params", "count"))
        assert keys.paths == (("default", "key"),)

    def test_a_seed_may_be_a_tracer(self):
        @jax.jit
        def f(seed, key, legacy):
            streams = [ab.RngStream(x) for x in (seed, key, legacy)]
            return [[stream() for _ in range(4)] for stream in streams]

        key = jax.random.key(3)
        drawn = f(3, key, jax.random.key_data(key))
        assert [[data(key) for key in keys] for keys in drawn] == [keys_of(3)] * 3

    def test_a_draw_is_a_write_of_the_count_that_other_traces_refuse(self):
        rngs = ab.Rngs(0)
        with pytest.raises(CapturedWriteError, match="RngCount"):
            jax.jit(rngs.params)()
        assert int(rngs.default.count) == 0
        assert draw(rngs) == keys_of(0)

    def test_split_and_merge_by_hand_carry_the_count(self):
        rngs = ab.Rngs(0)
        graphdef, state = ab.split(rngs)

        @jax.jit
        def f(state):
            inner = ab.merge(graphdef, state)
            return inner.noise(), ab.state(inner)

        first, state = f(state)
        second, state = f(state)
        assert [data(first), data(second)] == keys_of(0, 2)
        ab.update(rngs, state)
        assert draw(rngs, 2) == keys_of(0)[2:]

    def test_lanes_of_a_split_stream_draw_their_own_keys(self):
        keys = jax.random.split(jax.random.key(0), 3)
        graphdef, state = ab.split(ab.RngStream(keys))

        @jax.vmap
        def f(state):
            stream = ab.merge(graphdef, state)
            return jax.random.key_data(stream()), ab.state(stream)

        drawn, state = f(state)
        assert drawn.tolist() == [data(jax.random.fold_in(key, 0)) for key in keys]
        assert state["count"].tolist() == [1, 1, 1]
