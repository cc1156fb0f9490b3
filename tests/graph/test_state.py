"""State: a flat pytree that reads like nested dicts."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import anabranch as ab
from anabranch.errors import FilterError, StructureError
from anabranch.graph import _static
from anabranch.graph._leaf_info import LeafInfo, LeafInfos


def tagged(name):
    return (("tag", _static.encode(name)),)


INFOS = (
    LeafInfo(("layers", 0, "w"), ab.Param, tagged("frozen")),
    LeafInfo(("layers", 0, "b"), ab.Param),
    LeafInfo(("layers", 1, "w"), ab.Param),
    LeafInfo(("mean",), ab.BatchStat),
    LeafInfo(("scale",), jax.Array),
)
LEAVES = tuple(jnp.full(2, i, jnp.float32) for i in range(5))


@pytest.fixture
def state():
    return ab.State(INFOS, LEAVES)


def paths(*states):
    return [[path[-1] if path else () for path in state.paths] for state in states]


class TestReading:
    def test_keys_are_in_the_order_of_the_infos(self, state):
        assert list(state) == ["layers", "mean", "scale"]
        assert list(state["layers"]) == [0, 1]
        assert list(state["layers"][0]) == ["w", "b"]
        assert len(state) == 3

    def test_a_leaf_is_read_level_by_level_or_by_its_whole_path(self, state):
        assert state["layers"][0]["b"] is LEAVES[1]
        assert state["layers", 0, "b"] is LEAVES[1]
        assert state["layers"][0, "b"] is LEAVES[1]
        assert state["mean"] is state[("mean",)] is LEAVES[3]

    def test_what_is_below_a_key_is_a_state_with_shorter_paths(self, state):
        below = state["layers"]
        assert below.paths == ((0, "w"), (0, "b"), (1, "w"))
        assert below.infos[0] == LeafInfo((0, "w"), ab.Param, tagged("frozen"))
        assert below is state["layers"]
        assert state["layers", 1] is below[1]
        assert state[()] is state

    def test_items_values_get_and_in(self, state):
        assert [key for key, _ in state.items()] == list(state.keys())
        assert list(state.values())[1] is LEAVES[3]
        assert "layers" in state
        assert ("layers", 0, "w") in state
        assert ("layers", 0) in state
        assert ("layers", 2) not in state
        assert ("mean", 0) not in state
        assert "w" not in state
        assert state.get("mean") is LEAVES[3]
        assert state.get("none") is None
        assert state.get(("layers", 7), 1.5) == 1.5

    def test_a_root_leaf_has_the_empty_path(self):
        root = ab.State((LeafInfo((), ab.Param),), LEAVES[:1])
        assert root[()] is LEAVES[0]
        assert list(root.items()) == [((), LEAVES[0])]
        assert root.flat() == {(): LEAVES[0]} == root.to_dict()
        assert len(root) == 1

    def test_a_key_that_is_a_tuple_comes_before_a_path(self):
        state = ab.State.from_dict({("a", "b"): 1.0, "a": {"b": 2.0, ("c",): 3.0}})
        assert state["a", "b"] == 1.0
        assert state["a"]["b"] == 2.0
        assert state["a", ("c",)] == 3.0
        assert [state[key] for key in state] == [1.0, state["a"]]

    def test_flat_and_to_dict_hold_every_leaf(self, state):
        assert list(state.flat().values()) == list(LEAVES)
        assert tuple(state.flat()) == state.paths == tuple(info.path for info in INFOS)
        assert state.to_dict() == {
            "layers": {0: {"w": LEAVES[0], "b": LEAVES[1]}, 1: {"w": LEAVES[2]}},
            "mean": LEAVES[3],
            "scale": LEAVES[4],
        }

    def test_an_empty_state_is_false_and_has_no_keys(self):
        empty = ab.State((), ())
        assert not empty
        assert list(empty) == []
        assert empty.to_dict() == {}
        assert repr(empty) == "State()"

    @pytest.mark.parametrize("none_such", ["layer", ("layers", 0, "c"), ("mean", "w"), 3])
    def test_an_unknown_key_is_a_key_error_that_names_near_ones(self, state, none_such):
        with pytest.raises(KeyError) as error:
            state[none_such]
        message = error.value.args[0]
        text = "".join(
            f"[{k!r}]" for k in (none_such if isinstance(none_such, tuple) else [none_such])
        )
        assert message.startswith(f"State has nothing at {text}; it has ['")

    def test_near_keys_come_first_and_are_few(self):
        state = ab.State.from_flat({(f"weight_{i:04}",): 1.0 for i in range(2_000)})
        with pytest.raises(KeyError) as error:
            state["weight_0777x"]
        message = error.value.args[0]
        assert message.split("it has ")[1].startswith("['weight_0777'], ")
        assert len(message) < 300


class TestSnapshot:
    def test_it_cannot_be_written(self, state):
        with pytest.raises(TypeError):
            state["mean"] = 0.0
        with pytest.raises(AttributeError):
            state.leaves = ()
        with pytest.raises(AttributeError):
            state.mean = 0.0
        assert state["mean"] is LEAVES[3]

    def test_the_number_of_leaves_is_checked(self):
        with pytest.raises(ValueError, match="5 infos but 4 leaves"):
            ab.State(INFOS, LEAVES[:4])

    def test_copy_is_the_state_itself_and_deepcopy_copies_arrays(self):
        leaf = np.ones(3)
        state = ab.State(INFOS[:2], (leaf, LEAVES[1]))
        assert copy.copy(state) is state
        deep = copy.deepcopy(state)
        leaf[0] = 7.0
        assert deep["layers", 0, "w"].tolist() == [1.0, 1.0, 1.0]
        assert deep["layers", 0, "b"] is not LEAVES[1]
        assert deep["layers", 0, "b"].tolist() == LEAVES[1].tolist()
        assert deep.infos == state.infos

    def test_it_survives_pickling(self, state):
        again = pickle.loads(pickle.dumps(state))
        assert again == state
        assert again.infos[0].kind is ab.Param

    def test_a_read_state_is_collected_without_the_cycle_collector(self):
        state = ab.State.from_dict({"a": {"b": np.ones(2)}})
        assert state["a"]["b"] is state["a", "b"]
        dropped = weakref.ref(state)
        gc.disable()
        try:
            del state
            assert dropped() is None
        finally:
            gc.enable()


class TestEquality:
    def test_it_is_a_bool_over_infos_and_all_elements(self, state):
        assert (state == jax.tree.map(jnp.copy, state)) is True
        assert (state == state.replace({"mean": jnp.zeros(2)})) is False
        assert (state == state.filter(ab.Param)) is False
        assert state != {"mean": LEAVES[3]}

    @pytest.mark.parametrize(
        ("a", "b", "same"),
        [
            (np.float32([1, 2]), jnp.array([1.0, 2.0]), True),
            (np.float32([1, 2]), np.float64([1, 2]), False),
            (np.ones((1, 2)), np.ones((2, 1)), False),
            (np.array([np.nan]), np.array([np.nan]), True),
            (np.array([0.0]), np.array([-0.0]), False),
            (np.array([1, 2, 3, 4])[::2], np.array([1, 3]), True),
            (jnp.bfloat16(1), jnp.bfloat16(1), True),
            (jax.random.key(0), jax.random.key(0), True),
            (jax.random.key(0), jax.random.key(1), False),
            (jax.random.key(0), jax.random.key(0, impl="rbg"), False),
            (jax.ShapeDtypeStruct((2,), "int8"), jax.ShapeDtypeStruct((2,), "int8"), True),
            (jax.ShapeDtypeStruct((2,), "int8"), jax.ShapeDtypeStruct((3,), "int8"), False),
            (1, True, False),
            (None, None, True),
            (np.ones(()), 1.0, False),
        ],
    )
    def test_leaves_compare_by_dtype_shape_and_bits(self, a, b, same):
        assert (ab.State(INFOS[:1], (a,)) == ab.State(INFOS[:1], (b,))) is same

    def test_kind_and_metadata_count(self):
        leaf = LEAVES[:1]
        states = [
            ab.State((LeafInfo(("w",), kind, metadata),), leaf)
            for kind in (ab.Param, jax.Array)
            for metadata in ((), tagged("a"), tagged(1), tagged(True))
        ]
        assert all((a == b) == (a is b) for a in states for b in states)

    def test_it_has_no_hash(self, state):
        with pytest.raises(TypeError, match="unhashable"):
            hash(state)

    def test_infos_do_hash(self, state):
        assert hash(state.infos) == hash(ab.State(INFOS, LEAVES).infos)


class TestPytree:
    def test_map_flatten_and_unflatten_keep_the_infos(self, state):
        doubled = jax.tree.map(lambda x: 2 * x, state)
        assert doubled.infos is state.infos
        assert [leaf.tolist() for leaf in doubled.leaves] == [[2.0 * i] * 2 for i in range(5)]

    def test_it_is_one_flat_node(self, state):
        leaves, treedef = jax.tree.flatten(state)
        assert leaves == list(LEAVES)
        assert treedef.num_nodes == 6

    @pytest.mark.parametrize(
        "leaf", [None, object(), jax.ShapeDtypeStruct((), "int8"), ab.State((), ()), (1, 2)]
    )
    def test_unflatten_takes_anything(self, state, leaf):
        treedef = jax.tree.structure(state)
        assert treedef.unflatten([leaf] * 5)["layers", 0, "w"] is leaf

    def test_key_paths_read_as_one_indexes_the_state(self, state):
        pairs, _ = jax.tree_util.tree_flatten_with_path({"s": state})
        texts = [jax.tree_util.keystr(path) for path, _ in pairs]
        assert texts[:4] == [
            "['s']['layers'][0]['w']",
            "['s']['layers'][0]['b']",
            "['s']['layers'][1]['w']",
            "['s']['mean']",
        ]
        assert all(state[path[1].path] is leaf for path, leaf in pairs)

    def test_looking_for_the_key_of_the_last_entry_fails_instead_of_matching_nothing(self, state):
        with pytest.raises(AttributeError):
            jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "b", state)

    def test_jit_takes_and_returns_it_and_traces_once(self, state):
        traces = []

        @jax.jit
        def f(state):
            traces.append(state["layers", 1, "w"].shape)
            return state.map(lambda path, x: x + len(path))

        once = f(state)
        assert f(ab.State(INFOS[:2] + INFOS[2:], LEAVES)) == once
        assert traces == [(2,)]
        assert once["layers", 0, "b"].tolist() == [4.0, 4.0]
        assert once["mean"].tolist() == [4.0, 4.0]

    def test_metadata_of_another_type_traces_again(self):
        traces = []
        f = jax.jit(lambda state: traces.append(1))
        for value in (1, True, 1.0, 1):
            f(ab.State((LeafInfo(("w",), ab.Param, tagged(value)),), LEAVES[:1]))
        assert len(traces) == 3

    def test_gradients_have_the_same_paths_and_fit_optax(self, state):
        grads = jax.grad(lambda s: sum((leaf**2).sum() for leaf in s.leaves))(state)
        assert grads.infos == state.infos
        assert grads["scale"].tolist() == [8.0, 8.0]
        optimizer = optax.sgd(0.25)
        updates, _ = optimizer.update(grads, optimizer.init(state), state)
        stepped = optax.apply_updates(state, updates)
        assert stepped == state.map(lambda _, x: x - 0.25 * 2 * x)

    def test_it_can_be_carried_by_scan(self, state):
        out, _ = jax.lax.scan(lambda s, _: (s.map(lambda _, x: x + 1), None), state, length=3)
        assert out == state.map(lambda _, x: x + 3)

    def test_an_error_of_jax_about_two_large_states_is_short(self):
        states = [ab.State.from_flat({(name, i): 1.0 for i in range(5_000)}) for name in "ab"]
        structures = [str(jax.tree.structure(s.replace({}))) for s in states]
        assert "... 5,000 leaves; fingerprint" in structures[0]
        assert len(repr(states[0].infos)) < 1_000
        with pytest.raises(ValueError) as error:
            jax.tree.map(lambda a, b: a, *states)
        assert len(str(error.value)) < 4_000

    def test_infos_that_begin_alike_have_different_reprs(self):
        flat = {(i,): 1.0 for i in range(20)}
        a, b = (ab.State.from_flat({**flat, (last,): 1.0}).infos for last in ("x", "y"))
        assert repr(a) != repr(b)
        assert type(a) is LeafInfos


class TestMaking:
    def test_from_dict_and_to_dict_are_inverse(self):
        nested = {"a": {"b": np.ones(2), 3: {"c": np.zeros(1)}}, "d": 2.0}
        assert ab.State.from_dict(nested).to_dict() == nested

    def test_from_dict_reads_lists_by_position(self):
        state = ab.State.from_dict({"a": [1.0, {"b": 2.0}], "c": ()}, kind=ab.Param)
        assert state.flat() == {("a", 0): 1.0, ("a", 1, "b"): 2.0}
        assert {info.kind for info in state.infos} == {ab.Param}

    def test_from_dict_reads_states(self, state):
        assert ab.State.from_dict({"m": state}).paths == tuple(("m", *p) for p in state.paths)
        root = ab.State.from_flat({(): 1.0})
        assert ab.State.from_dict({"m": root}).flat() == {("m",): 1.0}

    def test_from_flat_takes_one_kind_or_one_for_each_path(self):
        flat = {("a",): 1.0, ("b", 0): 2.0}
        kinds = {("b", 0): ab.BatchStat, ("a",): ab.Param}
        assert [i.kind for i in ab.State.from_flat(flat, kinds=kinds).infos] == [
            ab.Param,
            ab.BatchStat,
        ]
        assert [i.kind for i in ab.State.from_flat(flat).infos] == [jax.Array] * 2
        with pytest.raises(KeyError, match=r"no entry for the leaf at \['b'\]\[0\]"):
            ab.State.from_flat(flat, kinds={("a",): ab.Param})

    def test_from_flat_refuses_a_key_that_is_no_path(self):
        with pytest.raises(TypeError, match="found the key 'ab'"):
            ab.State.from_flat({"ab": 1.0})

    @pytest.mark.parametrize(
        ("leaf", "found"), [("text", "a str"), (None, "a NoneType"), (ab.Param(1.0), "a Variable")]
    )
    def test_a_leaf_that_is_no_array_is_refused(self, leaf, found):
        with pytest.raises(TypeError, match=rf"\['a'\]\['b'\]: expected an array .* found {found}"):
            ab.State.from_dict({"a": {"b": leaf}})

    def test_a_leaf_below_a_leaf_is_refused(self):
        with pytest.raises(StructureError, match=r"\['a'\]\['b'\] is below the leaf at \['a'\]"):
            ab.State.from_flat({("a", "b"): 1.0, ("a",): 2.0})
        with pytest.raises(StructureError, match=r"\['a'\] is below the leaf at \[\(\)\]"):
            ab.State.from_flat({("a",): 1.0, (): 2.0})


class TestSelecting:
    def test_filter_takes_what_matches_and_drops_the_rest(self, state):
        assert paths(state.filter(ab.Param)) == [["w", "b", "w"]]
        assert paths(*state.filter(ab.BatchStat, "frozen")) == [["mean"], ["w"]]
        assert state.filter(ab.Cache) == ab.State((), ())
        assert state.filter() is state

    def test_split_distributes_every_leaf(self, state):
        parts = state.split("frozen", ab.Param, jax.Array, ...)
        assert paths(*parts) == [["w"], ["b", "w"], ["scale"], ["mean"]]
        assert parts[0].leaves[0] is LEAVES[0]
        assert state.split(...) == state == state.split()

    def test_filters_see_paths_and_variables_of_the_right_kind(self, state):
        seen = []
        state.filter(lambda path, variable: seen.append((path, variable)))
        assert [path for path, _ in seen] == list(state.paths)
        assert [type(variable) for _, variable in seen[:4]] == [ab.Param] * 3 + [ab.BatchStat]
        assert seen[0][1].value is LEAVES[0]
        assert seen[0][1].get_metadata() == {"tag": "frozen"}
        assert seen[4][1] is LEAVES[4]

    def test_filters_work_on_tracers_and_placeholders(self, state):
        @jax.jit
        def f(state):
            return state.filter(jax.Array), state.filter(ab.Param)

        plain, params = f(state)
        assert paths(plain, params) == [["scale"], ["w", "b", "w"]]
        shapes = jax.eval_shape(lambda: state)
        assert paths(shapes.filter(jax.Array), shapes.filter("frozen")) == [["scale"], ["w"]]
        assert paths(state.map(lambda *_: None).filter(jax.Array)) == [["scale"]]

    def test_split_names_the_leaves_that_nothing_matches(self, state):
        with pytest.raises(FilterError) as error:
            state.split(ab.BatchStat, "frozen")
        message = str(error.value)
        assert "['layers'][0]['b']  Param" in message
        assert "['scale']  Array" in message
        assert "['mean']" not in message
        assert "Add ... as the last filter" in message

    def test_the_message_of_split_is_bounded(self):
        state = ab.State.from_flat({("x" * 1_000, i): 1.0 for i in range(5_000)})
        with pytest.raises(FilterError, match=r"and 4995 more") as error:
            state.split(ab.Param)
        assert len(str(error.value)) < 4_000

    @pytest.mark.parametrize("select", [ab.State.filter, ab.State.split])
    def test_ellipsis_has_to_be_last(self, state, select):
        with pytest.raises(FilterError, match=r"filter 0 is \.\.\."):
            select(state, ..., ab.Param)
        assert paths(*select(state, ab.Param, ..., ...))[2] == []

    def test_union_joins_the_parts(self, state):
        parts = state.split(ab.BatchStat, ...)
        union = ab.State.union(*parts)
        assert paths(union) == [["mean", "w", "b", "w", "scale"]]
        assert union.flat() == state.flat()
        assert ab.State.union() == ab.State((), ())

    def test_replacing_by_the_parts_keeps_the_order(self, state):
        stats, rest = state.map(lambda _, x: x + 1).split(ab.BatchStat, ...)
        assert state.replace(stats).replace(rest) == state.map(lambda _, x: x + 1)

    def test_union_refuses_a_path_that_is_there_twice(self, state):
        with pytest.raises(StructureError, match=r"same path:\n  \['layers'\]\[0\]\['w'\]$"):
            ab.State.union(state, state.filter("frozen"))

    def test_union_refuses_a_leaf_below_a_leaf(self, state):
        with pytest.raises(
            StructureError, match=r"\['mean'\]\[0\] is below the leaf at \['mean'\]"
        ):
            ab.State.union(state, ab.State.from_flat({("mean", 0): 1.0}))


class TestChanging:
    def test_map_is_given_paths_and_leaves(self, state):
        named = state.map(lambda path, leaf: (path, leaf.sum().item()))
        assert named["layers", 1, "w"] == (("layers", 1, "w"), 4.0)
        assert named.infos is state.infos

    def test_replace_makes_a_new_state(self, state):
        new = state.replace({("layers", 0, "w"): 1.5, "mean": 2.5})
        assert new["layers", 0, "w"] == 1.5
        assert new["mean"] == 2.5
        assert new["scale"] is LEAVES[4]
        assert state["mean"] is LEAVES[3]

    def test_replace_takes_a_state(self, state):
        assert state.replace(state.map(lambda *_: 0).filter(ab.Param)).leaves == (
            *(0, 0, 0),
            *LEAVES[3:],
        )

    @pytest.mark.parametrize("none_such", ["layers", ("layers", 0), ("layers", 0, "v"), "x"])
    def test_replace_refuses_a_path_without_leaf(self, state, none_such):
        with pytest.raises(KeyError, match=r"State has no leaf at \['.*; it has \["):
            state.replace({none_such: 0.0})


class TestRepr:
    def test_it_shows_path_kind_dtype_and_shape(self, state):
        assert repr(state["layers"]) == (
            "State(\n"
            "  [0]['w']  Param  float32[2]\n"
            "  [0]['b']  Param  float32[2]\n"
            "  [1]['w']  Param  float32[2]\n"
            ")"
        )

    def test_it_shows_placeholders_by_type(self):
        state = ab.State(INFOS[:3], (None, 1.5, jax.random.key(0)))
        assert "['w']  Param  NoneType\n" in repr(state)
        assert "['b']  Param  float\n" in repr(state)
        assert "['w']  Param  key<fry>[]\n" in repr(state)

    def test_it_shows_tracers(self, state):
        shown = []
        jax.jit(lambda s: shown.append(repr(s)))(state)
        assert shown == [repr(state)]

    def test_it_is_short_for_a_large_state(self):
        state = ab.State.from_flat({("k" * 500, i): 1.0 for i in range(10_000)})
        assert len(repr(state).splitlines()) == 11
        assert "... and 9,992 more leaves" in repr(state)
        assert len(repr(state)) < 4_000


KEYS = st.one_of(st.sampled_from("abc"), st.integers(0, 2), st.tuples(st.sampled_from("ab")))
NESTED = st.recursive(
    st.floats(0, 9),
    lambda below: st.dictionaries(KEYS, below, min_size=1, max_size=3),
    max_leaves=9,
)


@given(st.dictionaries(KEYS, NESTED, max_size=3))
def test_any_nested_dict_reads_the_same_through_a_state(nested):
    state = ab.State.from_dict(nested)

    def check(state, nested):
        assert list(state) == list(nested)
        for key, value in nested.items():
            if isinstance(value, dict):
                check(state[key], value)
            else:
                assert state[key] is value

    check(state, nested)
    assert state.to_dict() == nested
    assert ab.State.from_flat(state.flat()) == state
    tree = jax.tree.map(lambda x: x, state)
    assert tree == state
