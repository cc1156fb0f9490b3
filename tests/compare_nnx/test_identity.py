"""Which object is which: states, clones, shared objects, cycles, order."""

from __future__ import annotations

import collections
import copy
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, raw, sequence, value


def test_a_state_holds_the_variables_in_nnx_and_their_arrays_here() -> None:
    """Rule 1."""

    def program(lib: Library) -> tuple[bool, bool, bool]:
        m = box(lib, a=lib.Param(jnp.ones(2)))
        merged = lib.merge(*lib.split(m))
        return lib.state(m)["a"] is m.a, merged.a is m.a, lib.clone(m).a is m.a

    assert program(nnx) == (True, True, False)
    # DESIGN.md: a State is a snapshot, and `merge` makes new identities (R3: one object has one
    # owner; with live Variables a write to the merged object would show in the one that was split)
    assert program(ab) == (False, False, False)
    assert program(mixed) == (False, False, False)


def test_a_write_after_the_split_shows_in_a_state_of_nnx_and_not_in_ours() -> None:
    """Rule 1."""

    def program(lib: Library) -> tuple[float, float]:
        m = box(lib, a=lib.Param(jnp.array(1.0)))
        graphdef, state = lib.split(m)
        m.a[...] = 5.0
        return value(state["a"]), value(lib.merge(graphdef, state).a)

    assert program(nnx) == (5.0, 5.0)
    assert program(ab) == (1.0, 1.0)  # a snapshot stays what it was
    assert program(mixed) == (1.0, 1.0)


def test_a_merge_that_is_to_be_independent_needs_no_flag_here() -> None:
    """Rule 1."""
    m = box(nnx, a=nnx.Param(jnp.array(1.0)))
    assert nnx.merge(*nnx.split(m), copy=True).a is not m.a
    assert nnx.clone(m, variables=False).a is m.a

    ours = box(ab, a=ab.Param(jnp.array(1.0)))
    twin = ab.merge(*ab.split(ours))
    twin.a.value = 2.0
    assert (value(ours.a), value(twin.a)) == (1.0, 2.0)


def test_a_clone_shares_the_buffers() -> None:
    """Rule 2."""

    def program(lib: Library) -> tuple[bool, bool]:
        m = box(lib, a=lib.Param(jnp.ones(2)))
        twin = lib.clone(m)
        return twin.a is m.a, raw(twin.a) is raw(m.a)

    assert program(nnx) == (False, True)
    assert program(ab) == (False, True)
    assert program(mixed) == (False, True)


def test_a_shared_variable_appears_once() -> None:
    """Rule 3."""

    def program(lib: Library) -> tuple[list[Any], bool]:
        v = lib.Param(jnp.array(1.0))
        m = box(lib, z=v, b=v)
        twin = lib.merge(*lib.split(m))
        return paths(lib, lib.state(m)), twin.z is twin.b

    assert program(nnx) == ([("b",)], True)
    # S2: the order is the order of insertion, so the first path is that of the first attribute
    assert program(ab) == ([("z",)], True)
    assert program(mixed) == ([("b",)], True)  # as flax has it


def test_a_plain_list_keeps_its_identity_only_here() -> None:
    """Rule 4."""

    def program(lib: Library) -> tuple[bool, bool]:
        shared = [lib.Param(jnp.array(1.0))]
        twin = lib.merge(*lib.split([shared, shared]))
        return twin[0] is twin[1], twin[0][0] is twin[1][0]

    assert program(nnx) == (False, True)
    assert program(ab) == (True, True)  # R3: a list is a mutable object with identity
    assert program(mixed) == (True, True)


def test_a_list_type_with_identity_keeps_it_in_both() -> None:
    """Rule 4."""

    def program(lib: Library) -> tuple[bool, bool]:
        shared = sequence(lib, lib.Param(jnp.array(1.0)))
        twin = lib.merge(*lib.split([shared, shared]))
        return twin[0] is twin[1], twin[0][0] is twin[1][0]

    assert program(nnx) == (True, True)
    assert program(ab) == (True, True)
    assert program(mixed) == (True, True)


def test_an_object_that_holds_itself_still_does_afterwards() -> None:
    """Rule 5."""

    def program(lib: Library) -> list[bool]:
        m = box(lib, a=lib.Param(jnp.array(1.0)))
        m.me = m
        merged, cloned, copied = lib.merge(*lib.split(m)), lib.clone(m), copy.deepcopy(m)

        @lib.jit
        def write(m: Any) -> Any:
            m.me.a[...] += 1
            return m.me

        returned = write(m)
        assert value(m.a) == 2.0
        copies = (merged, cloned, copied)
        return [x.me is x for x in copies] + [x is not m for x in copies] + [returned is m]

    assert program(nnx) == [True] * 7
    assert program(ab) == [True] * 7
    assert program(mixed) == [True] * 7


def test_an_object_that_holds_itself_can_be_printed_only_here() -> None:
    """Rule 5."""
    looped = nnx.Dict(a=1)
    looped.me = looped
    assert outcome(lambda: repr(looped)) is RecursionError

    ours = box(ab, a=1)
    ours.me = ours
    assert repr(ours) == "Box(a=1, me=Box(...))"


def test_positions_are_integers_in_their_own_order() -> None:
    """Rule 6."""

    def program(lib: Library) -> tuple[list[Any], list[float]]:
        items = sequence(lib, *[lib.Param(jnp.array(float(i))) for i in range(12)])
        state = lib.state(items)
        return paths(lib, state), [value(x) for x in jax.tree.leaves(state)]

    expected = ([(i,) for i in range(12)], [float(i) for i in range(12)])
    assert program(nnx) == expected
    assert program(ab) == expected
    assert program(mixed) == expected


Point = collections.namedtuple("Point", ["y", "x"])


def test_a_namedtuple_gets_its_own_fields_back() -> None:
    """Rule 7."""

    def program(lib: Library) -> tuple[list[Any], float, float]:
        point = Point(y=lib.Param(jnp.array(1.0)), x=lib.Param(jnp.array(2.0)))
        twin = lib.merge(*lib.split(point))
        assert type(twin) is Point
        return paths(lib, lib.state(point)), value(twin.y), value(twin.x)

    assert program(nnx) == ([("x",), ("y",)], 1.0, 2.0)
    # nothing is sorted here (S2): the order is that of the fields
    assert program(ab) == ([("y",), ("x",)], 1.0, 2.0)
    assert program(mixed) == ([("y",), ("x",)], 1.0, 2.0)


def test_a_dict_is_sorted_in_nnx_and_ordered_here() -> None:
    """Rule 7."""

    def program(lib: Library) -> tuple[list[Any], list[str]]:
        tree = {"b": lib.Param(jnp.array(1.0)), "a": lib.Param(jnp.array(2.0))}
        return paths(lib, lib.state(tree)), list(lib.merge(*lib.split(tree)))

    assert program(nnx) == ([("a",), ("b",)], ["a", "b"])
    # R1: iterating over the dict must give the same order inside a transform as outside
    assert program(ab) == ([("b",), ("a",)], ["b", "a"])
    assert program(mixed) == ([("b",), ("a",)], ["b", "a"])
