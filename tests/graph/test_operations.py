"""Update, pop, iterate, map and compare."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab


def tree() -> dict:
    shared = ab.Param(jnp.zeros(2))
    return {"a": shared, "b": [shared, ab.BatchStat(1.0)], "n": 3, "x": jnp.ones(3)}


class TestUpdate:
    def test_writes_in_place_and_keeps_the_rest(self):
        model = tree()
        a, stat = model["a"], model["b"][1]
        ab.update(model, {"b": {1: 5.0}}, {"x": jnp.full(3, 2.0)})
        assert model["a"] is a
        assert model["b"][1] is stat
        assert stat.value == 5.0
        assert model["x"].tolist() == [2.0, 2.0, 2.0]
        assert a.value.tolist() == [0.0, 0.0]

    def test_values_that_hold_arrays_are_replaced(self):
        """As the state of an optimiser, which is a tuple."""
        array, zero = jnp.ones(2), jnp.zeros(())
        inner = (zero, {"k": (array,)})
        model = {"a": (array, inner), "b": [inner, (array, "text")], "c": (1, 2)}
        held, kept = inner[1], (model["b"], model["c"])
        ab.update(model, jax.tree.map(lambda x: x + 1, ab.state(model)))
        assert model["b"] is kept[0]
        assert model["c"] is kept[1]
        assert model["a"][1][1] is held is model["b"][0][1]
        assert jax.tree.map(lambda x: x.tolist(), (model["a"][0], held)) == (
            [2.0, 2.0],
            {"k": ([2.0, 2.0],)},
        )
        assert [float(model[n][i][0]) for n, i in (("a", 1), ("b", 0))] == [1.0, 1.0]
        assert (model["b"][1][0].tolist(), model["b"][1][1]) == ([2.0, 2.0], "text")
        assert (inner[0], array.tolist()) == (zero, [1.0, 1.0])

    def test_what_a_value_holds_that_is_given_itself_cannot_be_written(self):
        held = [jnp.ones(2)]
        with pytest.raises(ab.errors.UpdateError, match=r"\[0\].*merge"):
            ab.update((jnp.ones(2), held), {0: jnp.zeros(2), 1: {0: jnp.zeros(2)}})
        assert held[0].tolist() == [1.0, 1.0]
        ab.update((jnp.ones(2), held), {1: {0: jnp.zeros(2)}})
        assert held[0].tolist() == [0.0, 0.0]

    def test_reaches_a_shared_variable_by_any_path(self):
        for path in ({"a": jnp.ones(2)}, {"b": {0: jnp.ones(2)}}):
            model = tree()
            ab.update(model, path)
            assert model["a"].value.tolist() == [1.0, 1.0]

    @pytest.mark.parametrize(
        ("state", "match", "relax"),
        [
            ({"zz": 1.0}, "no such leaf", "paths"),
            ({"a": jnp.ones(3)}, r"shape is \(2,\)", "shapes"),
            (ab.State.from_flat({("a",): np.ones(2)}, kinds=ab.BatchStat), "kind is", "kinds"),
        ],
    )
    def test_is_strict_unless_told(self, state, match, relax):
        model = tree()
        with pytest.raises(ab.errors.UpdateError, match=match):
            ab.update(model, {"x": jnp.zeros(3)}, state)
        assert model["x"].tolist() == [1.0, 1.0, 1.0]
        ab.update(model, {"x": jnp.zeros(3)}, state, relax=[relax])
        assert model["x"].tolist() == [0.0, 0.0, 0.0]

    def test_two_values_for_one_object_are_refused(self):
        model = tree()
        with pytest.raises(ab.errors.UpdateError, match="another value"):
            ab.update(model, {"a": jnp.ones(2), "b": {0: jnp.zeros(2)}})
        assert model["a"].value.tolist() == [0.0, 0.0]

    def test_unknown_words_in_relax_are_refused(self):
        for relax in (["path"], "shapes"):
            with pytest.raises(ab.errors.UpdateError, match="relax"):
                ab.update(tree(), {}, relax=relax)

    def test_a_root_variable_is_written(self):
        v = ab.Param(1.0)
        ab.update(v, ab.state(ab.Param(2.0)))
        assert v.value == 2.0


class TestPop:
    def test_removes_a_variable_at_every_path(self):
        model = tree()
        stat = model["b"][1]
        params, stats = ab.pop(model, ab.Param, ab.BatchStat)
        assert params.paths == (("a",),)
        assert stats.flat() == {("b", 1): 1.0}
        assert list(model) == ["b", "n", "x"]
        assert model["b"] == []
        assert stat.value == 1.0

    def test_takes_nothing_out_of_a_tuple(self):
        model = {"t": (ab.Param(1.0),), "b": ab.Param(2.0)}
        with pytest.raises(ab.errors.UpdateError, match="immutable"):
            ab.pop(model, ab.Param)
        assert list(model) == ["t", "b"]

    def test_needs_a_filter(self):
        with pytest.raises(ab.errors.FilterError, match="at least one"):
            ab.pop(tree())


class TestLookingAround:
    def test_nodes_come_once_with_their_first_path(self):
        model = tree()
        model["me"] = model
        found = list(ab.iter_nodes(model))
        assert [path for path, _ in found] == [(), ("a",), ("b",), ("b", 1)]
        assert found[1][1] is model["a"]
        assert [key for key, _ in ab.iter_children(model)] == ["a", "b", "me"]

    def test_aliases_are_paths_to_one_object(self):
        model = tree()
        model["me"] = model
        assert ab.find_aliases(model) == [[(), ("me",)], [("a",), ("b", 0)]]

    def test_maps_make_new_objects(self):
        model = tree()
        mapped = ab.map_leaves(lambda x: x + 1, model)
        assert mapped["a"] is mapped["b"][0]
        assert mapped["a"].value.tolist() == [1.0, 1.0]
        assert model["a"].value.tolist() == [0.0, 0.0]

    def test_a_shared_node_is_replaced_once_and_everywhere(self):
        calls = []

        def freeze(path, node):
            calls.append(path)
            return ab.BatchStat(node.value) if isinstance(node, ab.Param) else node

        model = tree()
        model["b"].append(model["b"])
        mapped = ab.recursive_map(freeze, model)
        assert type(mapped["a"]) is ab.BatchStat
        assert mapped["a"] is mapped["b"][0]
        assert type(model["a"]) is ab.Param
        assert calls.count(("a",)) == 1


class TestCompare:
    def test_differences_are_named_by_path(self):
        a, b = tree(), tree()
        assert ab.equal(a, b)
        assert ab.graph.diff(a, b) == []
        b["n"] = True
        b["b"][1].value = 2.0
        b["b"][0] = ab.Param(jnp.zeros(2))
        assert not ab.equal(a, b)
        paths = [difference.path for difference in ab.graph.diff(a, b)]
        assert paths == [("b", 0), ("b", 1), ("n",)]

    def test_nan_equals_itself_and_zero_has_a_sign(self):
        assert ab.equal(ab.Param(jnp.nan), ab.Param(jnp.nan))
        assert not ab.equal(ab.Param(jnp.array(0.0)), ab.Param(jnp.array(-0.0)))
