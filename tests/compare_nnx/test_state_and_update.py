"""Taking leaves out of objects, and writing them back."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import FilterError, UpdateError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, raw, value


def test_pop_gives_a_state_for_each_filter_and_the_first_that_matches_wins() -> None:
    """Rule 14."""

    def program(lib: Library) -> tuple[list[Any], list[Any], list[str]]:
        m = box(
            lib,
            w=lib.Param(jnp.array(1.0)),
            mean=lib.BatchStat(jnp.array(2.0)),
            seen=lib.Intermediate(jnp.array(3.0)),
        )
        stats, other = lib.pop(m, lib.BatchStat, (lib.Intermediate, lib.BatchStat))
        left = [name for name in ("w", "mean", "seen") if hasattr(m, name)]
        return paths(lib, stats), paths(lib, other), left

    assert program(nnx) == ([("mean",)], [("seen",)], ["w"])
    assert program(ab) == ([("mean",)], [("seen",)], ["w"])
    assert program(mixed) == ([("mean",)], [("seen",)], ["w"])


def test_pop_reaches_into_plain_dicts() -> None:
    """Rule 14."""

    def program(lib: Library) -> tuple[list[Any], list[str]]:
        tree = {"w": lib.Param(jnp.array(1.0)), "seen": lib.Intermediate(jnp.array(3.0))}
        return paths(lib, lib.pop(tree, lib.Intermediate)), list(tree)

    assert program(nnx) == ([("seen",)], ["w"])
    assert program(ab) == ([("seen",)], ["w"])
    assert program(mixed) == ([("seen",)], ["w"])


def test_pop_finds_plain_arrays_by_a_predicate() -> None:
    """Rule 14."""

    def program(lib: Library) -> tuple[list[Any], bool, bool]:
        m = box(lib, x=jnp.ones(2), y=jnp.zeros(2))
        popped = lib.pop(m, lambda path, leaf: path == ("x",))
        return paths(lib, popped), hasattr(m, "x"), hasattr(m, "y")

    assert program(nnx) == ([("x",)], False, True)
    assert program(ab) == ([("x",)], False, True)
    assert program(mixed) == ([("x",)], False, True)


def test_pop_takes_a_shared_variable_from_every_path_only_here() -> None:
    """Rule 14."""

    def program(lib: Library) -> tuple[list[Any], list[str]]:
        v = lib.Intermediate(jnp.array(1.0))
        m = box(lib, a=v, b=v)
        popped = lib.pop(m, lib.Intermediate)
        return paths(lib, popped), [name for name in ("a", "b") if hasattr(m, name)]

    assert program(nnx) == ([("a",)], ["b"])
    assert program(ab) == ([("a",)], [])  # R3: one object; what was removed is removed
    assert program(mixed) == ([("a",)], [])


def test_pop_asks_for_a_filter() -> None:
    """Rule 14."""
    assert outcome(lambda: nnx.pop(box(nnx, a=nnx.Param(1.0)))) is ValueError
    assert outcome(lambda: ab.pop(box(ab, a=ab.Param(1.0)))) is FilterError


def test_update_writes_arrays_into_the_variables_that_are_there() -> None:
    """Rule 15."""

    def program(lib: Library) -> tuple[bool, float, float, str]:
        m = box(lib, a=lib.Param(jnp.array(1.0), note="kept"), b=lib.Param(jnp.array(2.0)))
        a = m.a
        lib.update(m, {"a": jnp.array(7.0)})
        return m.a is a, value(m.a), value(m.b), m.a.note

    assert program(nnx) == (True, 7.0, 2.0, "kept")
    assert program(ab) == (True, 7.0, 2.0, "kept")
    assert program(mixed) == (True, 7.0, 2.0, "kept")


def test_update_takes_the_state_of_another_object_of_the_same_structure() -> None:
    """Rule 15."""

    def program(lib: Library) -> tuple[bool, float, float]:
        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.BatchStat(jnp.array(2.0)))
        other = box(lib, a=lib.Param(jnp.array(8.0)), b=lib.BatchStat(jnp.array(9.0)))
        a = m.a
        lib.update(m, lib.state(other, lib.Param), lib.state(other, lib.BatchStat))
        return m.a is a, value(m.a), value(m.b)

    assert program(nnx) == (True, 8.0, 9.0)
    assert program(ab) == (True, 8.0, 9.0)
    assert program(mixed) == (True, 8.0, 9.0)


def test_update_copies_metadata_in_nnx_and_only_arrays_here() -> None:
    """Rule 15."""

    def program(lib: Library) -> tuple[float, str]:
        m = box(lib, a=lib.Param(jnp.array(1.0), note="old"))
        other = box(lib, a=lib.Param(jnp.array(8.0), note="new"))
        lib.update(m, lib.state(other))
        return value(m.a), m.a.note

    assert program(nnx) == (8.0, "new")
    # R6: metadata are static, part of the graphdef; a State is the arrays, so writing one never
    # makes a compiled function trace again
    assert program(ab) == (8.0, "old")
    assert program(mixed) == (8.0, "old")


def test_update_with_an_unknown_path_adds_an_attribute_in_nnx_and_raises_here() -> None:
    """Rule 15."""

    def program(lib: Library) -> tuple[Any, bool, float]:
        m = box(lib, a=lib.Param(jnp.array(1.0)))
        raised = outcome(lambda: lib.update(m, {"a": jnp.array(2.0), "typo": jnp.array(7.0)}))
        return raised, hasattr(m, "typo"), value(m.a)

    assert program(nnx) == (None, True, 2.0)
    # R4: nothing silent, and R2: a state that does not fit writes nothing at all
    assert program(ab) == (UpdateError, False, 1.0)
    assert program(mixed) == (UpdateError, False, 1.0)


def test_update_accepts_another_shape_in_nnx_and_only_on_request_here() -> None:
    """Rule 15."""

    def program(lib: Library, **options: Any) -> tuple[Any, list[int]]:
        m = box(lib, a=lib.Param(jnp.zeros(2)))
        raised = outcome(lambda: lib.update(m, {"a": jnp.zeros(3)}, **options))
        return raised, list(raw(m.a).shape)

    assert program(nnx) == (None, [3])
    assert program(ab) == (UpdateError, [2])  # R4
    assert program(mixed) == (UpdateError, [2])
    assert program(ab, relax=["shapes"]) == (None, [3])
    assert program(mixed, relax=["shapes"]) == (None, [3])


def test_update_accepts_another_kind_in_nnx_and_only_on_request_here() -> None:
    """Rule 15."""

    def program(lib: Library, **options: Any) -> tuple[Any, float, bool]:
        m = box(lib, a=lib.Param(jnp.array(1.0)))
        state = lib.state(box(lib, a=lib.BatchStat(jnp.array(5.0))))
        raised = outcome(lambda: lib.update(m, state, **options))
        return raised, value(m.a), isinstance(m.a, lib.Param)

    assert program(nnx) == (None, 5.0, True)
    assert program(ab) == (UpdateError, 1.0, True)  # R4
    assert program(mixed) == (UpdateError, 1.0, True)
    assert program(ab, relax=["kinds"]) == (None, 5.0, True)
    assert program(mixed, relax=["kinds"]) == (None, 5.0, True)


def test_update_changes_plain_dicts_in_place() -> None:
    """Rule 15."""

    def program(lib: Library) -> tuple[bool, float]:
        tree = {"deep": {"a": lib.Param(jnp.array(1.0))}}
        deep = tree["deep"]
        lib.update(tree, {"deep": {"a": jnp.array(2.0)}})
        return tree["deep"] is deep, value(deep["a"])

    assert program(nnx) == (True, 2.0)
    assert program(ab) == (True, 2.0)
    assert program(mixed) == (True, 2.0)


def test_update_of_a_root_variable_takes_the_states_of_its_split() -> None:
    """Rule 15."""

    def program(lib: Library) -> float:
        v = lib.Param(jnp.array(1.0))
        _, stats, params, rest = lib.split(lib.Param(jnp.array(4.0)), lib.BatchStat, lib.Param, ...)
        lib.update(v, stats, params, rest)
        return value(v)

    assert program(nnx) == 4.0
    assert program(ab) == 4.0
    assert program(mixed) == 4.0


def test_update_through_any_alias_reaches_the_one_object() -> None:
    """Rule 15."""

    def program(lib: Library) -> Any:
        v = lib.Param(jnp.array(1.0))
        m = box(lib, a=v, b=v)
        lib.update(m, {"b": jnp.array(3.0)})
        return value(m.a), m.a is m.b is v

    assert program(nnx) == (3.0, True)
    assert program(ab) == (3.0, True)
    assert program(mixed) == (3.0, True)


def test_a_deep_copy_of_a_variable_is_a_variable_only_here() -> None:
    """Rule 5."""

    def program(lib: Library) -> tuple[bool, bool]:
        v = lib.Param(jnp.ones(2))
        twin = copy.deepcopy(v)
        return isinstance(twin, lib.Param), twin is v

    assert program(nnx) == (False, False)
    assert program(ab) == (True, False)  # R3: a copy of a cell is a cell


def test_an_update_that_does_not_fit_says_which_paths() -> None:
    """Rule 15."""
    m = box(ab, layers=[box(ab, w=ab.Param(jnp.zeros(2)))])
    nnx_m = box(nnx, layers=nnx.List([box(nnx, w=nnx.Param(jnp.zeros(2)))]))
    wrong = {"layers": {0: {"w": jnp.zeros(3)}}}
    nnx.update(nnx_m, wrong)
    assert raw(nnx_m.layers[0].w).shape == (3,)
    with pytest.raises(UpdateError, match=r"layers.*0.*w.*the shape is \(2,\).*\(3,\)"):
        ab.update(m, wrong)
