"""Every form of filter, and what is no filter."""

from __future__ import annotations

import enum
import functools
import pickle
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import FilterError
from anabranch.graph._filters import (
    check_ellipsis_last,
    depends_on_path,
    first_match,
    to_predicates,
)

PATH = ("layers", 0, "w")
PARAM = ab.Param(1.0)
TAGGED = ab.Param(1.0, tag="frozen")
STAT = ab.BatchStat(1.0)
VARIABLES = {"param": PARAM, "tagged": TAGGED, "stat": STAT, "array": np.ones(2)}


class Color(enum.Enum):
    RED = 1


class Gain(ab.Param):
    pass


def kind_name(value):
    """Name a case the same in every process: no addresses, no order of sets."""
    return type(value).__name__


def matched(filter, path=PATH):
    predicate = ab.to_predicate(filter)
    return {name for name, variable in VARIABLES.items() if predicate(path, variable)}


EVERYTHING = set(VARIABLES)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (..., EVERYTHING),
        (True, EVERYTHING),
        (ab.Everything(), EVERYTHING),
        (None, set()),
        (False, set()),
        (ab.Nothing(), set()),
        (ab.Param, {"param", "tagged"}),
        (ab.Variable, {"param", "tagged", "stat"}),
        (ab.Cache, set()),
        (jax.Array, {"array"}),
        (np.ndarray, {"array"}),
        ("frozen", {"tagged"}),
        (ab.WithTag("frozen"), {"tagged"}),
        (
            lambda path, variable: path[-1] == "w" and isinstance(variable, ab.Variable),
            {"param", "tagged", "stat"},
        ),
        ([ab.BatchStat, "frozen"], {"stat", "tagged"}),
        ((ab.BatchStat, [jax.Array, None]), {"stat", "array"}),
        ([], set()),
        (ab.Any(), set()),
        (ab.All(), EVERYTHING),
        (ab.All(ab.Param, "frozen"), {"tagged"}),
        (ab.All(ab.Param, ab.Not("frozen")), {"param"}),
        (ab.Not(ab.Variable), {"array"}),
        (ab.Not(...), set()),
        (ab.PathContains("layers"), EVERYTHING),
        (ab.PathContains(0), EVERYTHING),
        (ab.PathContains(("layers", 0)), set()),
        (ab.PathContains("layer"), set()),
        (functools.partial(lambda key, path, _: key in path, "w"), EVERYTHING),
    ],
    ids=kind_name,
)
def test_filter_matches(filter, expected):
    assert matched(filter) == expected


def test_a_class_matches_its_subclasses_and_not_its_bases():
    assert ab.OfType(ab.Param)((), Gain(1.0)) is True
    assert ab.OfType(Gain)((), PARAM) is False


def test_the_array_class_matches_plain_arrays_of_every_make_and_no_variable():
    is_array = ab.to_predicate(jax.Array)
    seen = []

    @jax.jit
    def f(x):
        seen.append(is_array((), x))
        return x

    f(jnp.ones(2))
    assert seen == [True]
    assert is_array((), jnp.ones(2)) is True
    assert is_array((), np.ones(2)) is True
    assert is_array((), jax.ShapeDtypeStruct((2,), jnp.float32)) is True
    assert is_array((), ab.Param(jnp.ones(2))) is False


def test_a_tag_is_the_metadata_tag_or_one_of_the_metadata_tags():
    has = ab.WithTag("a")
    assert has((), ab.Param(1.0, tag="a")) is True
    assert has((), ab.Param(1.0, tag="b", tags=("a", "c"))) is True
    assert has((), ab.Param(1.0, tags=frozenset({"a"}))) is True
    assert has((), ab.Param(1.0, tags=("b",))) is False
    assert has((), ab.Param(1.0, label="a")) is False
    assert has((), np.ones(2)) is False


def test_a_lone_string_under_tags_is_one_tag_and_not_its_letters():
    assert ab.WithTag("a")((), ab.Param(1.0, tags="abc")) is False
    assert ab.WithTag("abc")((), ab.Param(1.0, tags="abc")) is True


def test_a_variable_without_tag_does_not_have_the_tag_none():
    assert ab.WithTag(None)((), PARAM) is False
    assert ab.WithTag(None)((), ab.Param(1.0, tag=None)) is True


def test_an_enum_member_is_a_tag():
    assert ab.to_predicate(Color.RED) == ab.WithTag(Color.RED)
    assert ab.WithTag(Color.RED)((), ab.Param(1.0, tag=Color.RED)) is True


class TestValues:
    @pytest.mark.parametrize(
        ("short", "long"),
        [
            (..., ab.Everything()),
            (None, ab.Nothing()),
            (ab.Param, ab.OfType(ab.Param)),
            ("x", ab.WithTag("x")),
            ([ab.Param, "x"], ab.Any(ab.OfType(ab.Param), ab.WithTag("x"))),
            (ab.Not(ab.Param), ab.Not(ab.OfType(ab.Param))),
        ],
        ids=kind_name,
    )
    def test_equal_filters_give_equal_predicates_with_equal_hashes(self, short, long):
        assert ab.to_predicate(short) == ab.to_predicate(long)
        assert hash(ab.to_predicate(short)) == hash(ab.to_predicate(long))

    def test_different_filters_differ(self):
        filters = [ab.Everything(), ab.Nothing(), ab.OfType(int), ab.WithTag(int)]
        filters += [ab.PathContains(int), ab.Not(int), ab.All(int), ab.Any(int)]
        assert len(set(filters)) == len(filters)

    def test_a_predicate_stays_itself(self):
        def f(path, variable):
            return True

        assert ab.to_predicate(f) is f
        assert ab.to_predicate(ab.Not(f)).filter is f

    def test_filters_cannot_be_written(self):
        with pytest.raises(AttributeError):
            ab.OfType(int).type = str
        with pytest.raises(AttributeError):
            ab.Any(int).filters = ()

    def test_reprs_are_the_code_that_makes_them(self):
        filter = ab.All(ab.Not([ab.Param, "x"]), ab.PathContains("w"), ...)
        assert repr(filter) == (
            "All(Not(Any(OfType(Param), WithTag('x'))), PathContains('w'), Everything())"
        )

    def test_a_filter_survives_pickling(self):
        filter = ab.All(ab.Not([ab.Param, "x"]), ab.PathContains("w"), None)
        assert pickle.loads(pickle.dumps(filter)) == filter


class TestInvalid:
    @pytest.mark.parametrize(
        "wrong",
        [1, 1.0, b"x", {ab.Param}, {}, np.ones(3), list[int], typing.List[int], int | str],  # noqa: UP006
        ids=kind_name,
    )
    def test_what_is_no_filter_is_refused_with_its_type(self, wrong):
        found = rf"found .* of type {type(wrong).__name__}\. A filter is"
        with pytest.raises(FilterError, match=found):
            ab.to_predicate(wrong)

    @pytest.mark.parametrize("combinator", [ab.All, ab.Any, ab.Not, lambda x: ab.to_predicate([x])])
    def test_a_part_that_is_no_filter_is_refused_where_it_is_written(self, combinator):
        with pytest.raises(FilterError, match="found 7 of type int"):
            combinator(7)

    def test_a_filter_class_without_arguments_is_refused_since_it_would_match_nothing(self):
        with pytest.raises(FilterError, match=r"found the class Everything\. Write Everything\("):
            ab.to_predicate(ab.Everything)

    def test_the_message_is_bounded(self):
        with pytest.raises(FilterError) as error:
            ab.to_predicate(frozenset(range(100_000)))
        assert len(str(error.value)) < 1_000


class TestFirstMatch:
    def test_the_first_match_wins(self):
        predicates = to_predicates([ab.BatchStat, "frozen", ab.Param, ...])
        found = {k: first_match(predicates, PATH, v) for k, v in VARIABLES.items()}
        assert found == {"param": 2, "tagged": 1, "stat": 0, "array": 3}

    def test_no_match_is_none(self):
        assert first_match(to_predicates([ab.Param]), PATH, STAT) is None
        assert first_match((), PATH, STAT) is None

    @pytest.mark.parametrize(
        "filters",
        [[], [...], [ab.Param, ...], [ab.Param, ..., ...], [..., True, ab.Everything()]],
        ids=kind_name,
    )
    def test_ellipsis_may_be_last_several_times(self, filters):
        check_ellipsis_last(filters)
        assert first_match(to_predicates(filters), PATH, PARAM) == (0 if filters else None)

    @pytest.mark.parametrize("all_of_it", [..., True, ab.Everything()], ids=kind_name)
    def test_a_filter_after_one_that_takes_everything_is_refused(self, all_of_it):
        shown = "..." if all_of_it is ... else repr(all_of_it)
        with pytest.raises(FilterError) as error:
            check_ellipsis_last(["x", all_of_it, ab.Param])
        assert f"filter 1 is {shown}" in str(error.value)
        assert "filter 2, Param, can never match" in str(error.value)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (..., False),
        (None, False),
        (ab.Param, False),
        ("x", False),
        ([ab.Param, ab.Not("x")], False),
        (ab.PathContains("w"), True),
        (lambda path, variable: True, True),
        (ab.Not(ab.PathContains("w")), True),
        ([ab.Param, ab.All("x", ab.PathContains("w"))], True),
    ],
    ids=kind_name,
)
def test_it_is_known_whether_a_filter_depends_on_the_path(filter, expected):
    assert depends_on_path(filter) is expected


def test_a_subclass_of_a_filter_may_look_at_the_path():
    class Last(ab.OfType):
        __slots__ = ()

        def __call__(self, path, variable):
            return path[-1] == "w"

    assert depends_on_path(Last(int)) is True
