"""What split gives, what merge takes, and how graphdefs compare."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import FilterError, UpdateError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, sequence, value


def test_a_variable_can_be_split_by_itself() -> None:
    """Rule 8."""
    v = nnx.Param(jnp.array(1.0))
    graphdef, state = nnx.split(v)
    assert state is v
    assert value(nnx.merge(graphdef, state)) == 1.0

    ours = ab.Param(jnp.array(1.0))
    graphdef, state = ab.split(ours)
    # a state is always a State (a snapshot); the leaf at its root has the path ()
    assert isinstance(state, ab.State)
    assert state.paths == ((),)
    assert value(ab.merge(graphdef, state)) == 1.0


def test_the_filter_that_matches_a_root_variable_gets_it() -> None:
    """Rule 8."""

    def program(lib: Library) -> list[int]:
        v = lib.Param(jnp.array(1.0))
        _, *states = lib.split(v, lib.BatchStat, lib.Param, ...)
        return [len(jax.tree.leaves(state)) for state in states]

    assert program(nnx) == [0, 1, 0]
    assert program(ab) == [0, 1, 0]
    assert program(mixed) == [0, 1, 0]


def test_a_number_at_the_root_comes_back() -> None:
    """Rule 8."""

    def program(lib: Library) -> tuple[int, Any]:
        graphdef, state = lib.split(42)
        return len(jax.tree.leaves(state)), lib.merge(graphdef, state)

    assert program(nnx) == (1, 42)
    # R6, S2: arrays are leaves, and a number that is no argument of a call is static
    assert program(ab) == (0, 42)
    assert program(mixed) == (0, 42)


def test_what_holds_no_array_has_no_leaves() -> None:
    """Rule 9."""

    def program(lib: Library) -> list[int]:
        things = [box(lib), None, box(lib, n=3, name="x", act=jnp.tanh)]
        return [len(jax.tree.leaves(lib.state(thing))) for thing in things]

    assert program(nnx) == [0, 0, 0]
    assert program(ab) == [0, 0, 0]
    assert program(mixed) == [0, 0, 0]


def test_an_attribute_that_was_none_can_hold_a_module_later() -> None:
    """Rule 9."""

    def program(lib: Library, empty: Any) -> tuple[list[Any], list[Any]]:
        m = box(lib, child=empty)
        before = paths(lib, lib.state(m))
        m.child = box(lib, w=lib.Param(jnp.ones(2)))
        return before, paths(lib, lib.state(m))

    assert program(nnx, nnx.data(None)) == ([], [("child", "w")])
    assert program(ab, None) == ([], [("child", "w")])  # R4: nothing to declare, no modes
    assert program(mixed, nnx.data(None)) == ([], [("child", "w")])


def test_a_number_on_an_object_is_static_and_nnx_can_declare_it_data() -> None:
    """Rule 10."""
    assert nnx.to_pure_dict(nnx.state(box(nnx, five=nnx.data(5), six=6))) == {"five": 5}

    # R6: arrays are leaves, everything else is static; who wants a leaf holds an array or Variable
    ours = box(ab, six=6, five=jnp.array(5), four=ab.Variable(4))
    assert ab.state(ours).to_dict() == {"five": 5, "four": 4}


def test_a_plain_integer_is_part_of_the_graphdef() -> None:
    """Rule 10."""

    def program(lib: Library) -> tuple[bool, bool]:
        graphdef = lib.graphdef(box(lib, n=5))
        return graphdef == lib.graphdef(box(lib, n=5)), graphdef == lib.graphdef(box(lib, n=6))

    assert program(nnx) == (True, False)
    assert program(ab) == (True, False)
    assert program(mixed) == (True, False)


def test_true_and_one_are_the_same_static_value_in_nnx_only() -> None:
    """Rule 10."""

    def program(lib: Library) -> bool:
        return lib.graphdef(box(lib, n=1)) == lib.graphdef(box(lib, n=True))

    assert program(nnx)
    assert not program(ab)  # R6: compared by type and value, or a trace of one runs for the other
    assert not program(mixed)


def test_a_nested_dict_of_arrays_can_be_merged() -> None:
    """Rule 11."""

    def program(lib: Library) -> tuple[type, str, bool, list[float]]:
        v = lib.Param(jnp.array(1.0), note="hello")
        m = box(lib, a=v, b=v, c=box(lib, w=lib.BatchStat(jnp.array(2.0))))
        pure = {"a": jnp.array(7.0), "c": {"w": jnp.array(8.0)}}
        twin = lib.merge(lib.graphdef(m), pure)
        return type(twin.a), twin.a.note, twin.a is twin.b, [value(twin.a), value(twin.c.w)]

    assert program(nnx) == (nnx.Param, "hello", True, [7.0, 8.0])
    assert program(ab) == (ab.Param, "hello", True, [7.0, 8.0])
    assert program(mixed) == (nnx.Param, "hello", True, [7.0, 8.0])


def test_graphdefs_compare_by_structure() -> None:
    """Rule 12."""

    def program(lib: Library) -> list[bool]:
        def build() -> Any:
            return box(lib, w=lib.Param(jnp.ones(2)), kind="relu")

        a, b = build(), build()
        alike = lib.graphdef(a) == lib.graphdef(b)
        hashes = hash(lib.graphdef(a)) == hash(lib.graphdef(b))
        b.kind = "gelu"
        differ = lib.graphdef(a) != lib.graphdef(b)
        again = lib.graphdef(lib.merge(*lib.split(a))) == lib.graphdef(a)
        return [alike, hashes, differ, again]

    assert program(nnx) == [True] * 4
    assert program(ab) == [True] * 4
    assert program(mixed) == [True] * 4


def test_sharing_is_part_of_the_graphdef() -> None:
    """Rule 12."""

    def program(lib: Library) -> bool:
        v, w = lib.Param(jnp.array(1.0)), lib.Param(jnp.array(1.0))
        return lib.graphdef(box(lib, a=v, b=v)) == lib.graphdef(box(lib, a=v, b=w))

    assert not program(nnx)
    assert not program(ab)
    assert not program(mixed)


def test_nodes_are_visited_once_children_last_here_and_first_in_nnx() -> None:
    """Rule 13."""

    def program(lib: Library) -> list[tuple[Any, ...]]:
        v = lib.Param(jnp.array(1.0))
        m = box(lib, b=v, c=sequence(lib, v, lib.Param(jnp.array(2.0))))
        visited = nnx.iter_graph(m) if lib is nnx else ab.iter_nodes(m)
        nodes = (lib.Variable, lib.Module, list, nnx.List)
        return [path for path, obj in visited if isinstance(obj, nodes)]

    assert program(nnx) == [("b",), ("c", 1), ("c",), ()]
    # the same nodes; a node comes before its children, so that a caller can stop early
    assert program(ab) == [(), ("b",), ("c",), ("c", 1)]
    assert program(mixed) == [(), ("b",), ("c",), ("c", 1)]


def test_recursive_map_can_replace_a_variable_by_one_of_another_kind_only_here() -> None:
    """Rule 13."""

    def program(lib: Library) -> tuple[bool, float, float]:
        m = box(lib, a=lib.Param(jnp.array(1.0)))

        def freeze(path: Any, node: Any) -> Any:
            return lib.BatchStat(node[...] + 1) if isinstance(node, lib.Param) else node

        twin = lib.recursive_map(freeze, m)
        return isinstance(twin.a, lib.BatchStat), value(twin.a), value(m.a)

    # its copy holds the Variables of the original, and the replacement is written into them
    assert program(nnx) == (False, 2.0, 2.0)
    # R4: the kind takes effect, and the original is not touched
    assert program(ab) == (True, 2.0, 1.0)
    assert program(mixed) == (True, 2.0, 1.0)


def test_split_needs_a_filter_for_every_leaf_and_state_does_not() -> None:
    """Rule 16."""

    def program(lib: Library) -> tuple[Any, list[Any]]:
        m = box(lib, w=lib.Param(jnp.ones(2)), mean=lib.BatchStat(jnp.zeros(2)))
        return outcome(lambda: lib.split(m, lib.Param)), paths(lib, lib.state(m, lib.Param))

    assert program(nnx) == (ValueError, [("w",)])
    assert program(ab) == (FilterError, [("w",)])
    assert program(mixed) == (FilterError, [("w",)])
    assert issubclass(FilterError, ValueError)


def test_the_ellipsis_comes_last() -> None:
    """Rule 16."""

    def program(lib: Library) -> tuple[Any, list[int]]:
        m = box(lib, w=lib.Param(jnp.ones(2)), mean=lib.BatchStat(jnp.zeros(2)))
        early = outcome(lambda: lib.split(m, ..., lib.Param))
        _, *states = lib.split(m, lib.Param, ..., ...)
        return early, [len(jax.tree.leaves(state)) for state in states]

    assert program(nnx) == (ValueError, [1, 1, 0])
    assert program(ab) == (FilterError, [1, 1, 0])
    assert program(mixed) == (FilterError, [1, 1, 0])


def test_filters_select_alike() -> None:
    """Rule 16."""

    def program(lib: Library) -> list[list[Any]]:
        class Lora(lib.Param):
            pass

        child = box(lib, s=lib.BatchStat(jnp.ones(1)), w=lib.Param(jnp.ones(1), tag="x"))
        m = box(lib, a=child, b=Lora(jnp.ones(1)))
        filters = [
            lib.PathContains("a"),
            lib.All(lib.Param, lib.PathContains("a")),
            lib.Not(lib.Param),
            lib.Any(lib.BatchStat, Lora),
            lambda path, leaf: len(path) == 1,
            "x",
            (Lora, "x"),
            True,
            False,
        ]
        return [paths(lib, lib.state(m, f)) for f in filters]

    s, w, b = ("a", "s"), ("a", "w"), ("b",)
    expected = [[s, w], [w], [s], [s, b], [b], [w], [w, b], [s, w, b], []]
    assert program(nnx) == expected
    assert program(ab) == expected
    assert program(mixed) == expected


def test_an_object_of_a_foreign_class_is_static_in_nnx_and_refused_here() -> None:
    """Rule 9."""

    class Foreign:
        def __init__(self, variable: Any) -> None:
            self.variable = variable

    def program(lib: Library) -> Any:
        m = box(lib, x=Foreign(lib.Param(jnp.ones(1))))
        return outcome(lambda: paths(lib, lib.state(m)))

    assert program(nnx) == []  # its Param is not seen
    assert program(ab) is ab.errors.NodeTypeError  # R4, S2: never a silent zero
    assert program(mixed) is ab.errors.NodeTypeError


def test_merge_refuses_a_state_with_a_leaf_too_few() -> None:
    """Rule 11."""

    def program(lib: Library) -> Any:
        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.Param(jnp.array(2.0)))
        return outcome(lambda: lib.merge(lib.graphdef(m), {"a": jnp.array(7.0)}))

    assert program(nnx) is ValueError
    assert program(ab) is UpdateError
    assert program(mixed) is UpdateError
    with pytest.raises(UpdateError, match=r"b.* is missing"):
        ab.merge(ab.graphdef(box(ab, b=ab.Param(1.0))), {})


def test_in_a_split_context_a_second_split_only_refers_to_the_first() -> None:
    """Rule 17."""

    def program(lib: Library) -> tuple[list[int], bool, bool]:
        child = box(lib, w=lib.Param(jnp.ones(2)))
        parent = box(lib, child=child)

        def inside(parts: Any) -> tuple[bool, bool]:
            with lib.merge_context("t", inner=True) if lib is nnx else lib.merge_context("t") as c:
                p, again, q = [c.merge(*part) for part in parts]
            return p is again, p.child is q

        with lib.update_context("t"):
            with lib.split_context("t") as ctx:
                parts = [ctx.split(x) for x in (parent, parent, child)]
            sizes = [len(jax.tree.leaves(part[1])) for part in parts]
            seen: list[tuple[bool, bool]] = []
            jax.jit(lambda p: seen.append(inside(p)))(parts)
        return sizes, *seen[0]

    assert program(nnx) == ([1, 0, 0], True, True)
    assert program(ab) == ([1, 0, 0], True, True)
    assert program(mixed) == ([1, 0, 0], True, True)


def test_a_second_split_of_nnx_is_a_bare_reference() -> None:
    """Rule 17."""
    m = box(nnx, w=nnx.Param(jnp.ones(2)))
    with nnx.update_context("t"), nnx.split_context("t") as ctx:
        ctx.split(m)
        graphdef, _ = ctx.split(m)
    assert "NodeRef" in repr(graphdef)

    ours = box(ab, w=ab.Param(jnp.ones(2)))
    with ab.update_context("t"), ab.split_context("t") as ctx:
        ctx.split(ours)
        graphdef, state = ctx.split(ours)
    # no type of its own: a graphdef without leaves, whose root is the index of the first split
    assert (graphdef.num_leaves, state.leaves, graphdef.entries) == (0, (), ())
