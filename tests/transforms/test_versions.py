"""Dictionaries are the same as long as names and values are, in their order, by identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.transforms import _versions
from anabranch.transforms._versions import Dictionaries

COUNTS = [1, 7, 100]


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def with_versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(_versions, "ARE_TOLD", False)
    return request.param


def some(count: int) -> list[dict[Any, Any]]:
    return [{"a": True, "b": False, "c": str(i)} for i in range(count)]


WRITES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "an equal value of another type": lambda d: d.update(a=1),
    "another value": lambda d: d.update(c="x"),
    "a new name": lambda d: d.update(d=None),
    "one less": lambda d: d.pop("b"),
    "another name for what it holds": lambda d: d.update(d=d.pop("c")),
    "another order": lambda d: d.update(a=d.pop("a")),
    "two exchanged": lambda d: d.update(a=d["b"], b=d["a"]),
    "nothing left": lambda d: d.clear(),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_change_of_one_is_seen(
    write: Callable[[dict[Any, Any]], Any], count: int, with_versions: bool
) -> None:
    for i in {0, count // 2, count - 1}:
        held = some(count)
        compared = Dictionaries(held)
        assert compared.are_same()
        write(held[i])
        assert not compared.are_same()
        assert not compared.are_same()


@pytest.mark.parametrize("count", COUNTS)
def test_what_was_put_back_is_the_same(count: int, with_versions: bool) -> None:
    held = some(count)
    compared = Dictionaries(held)
    for _ in range(3):
        held[-1]["a"] = None
        assert not compared.are_same()
        held[-1]["a"] = True
        assert compared.are_same()
        assert compared.are_same()


def test_none_are_the_same(with_versions: bool) -> None:
    assert not Dictionaries([])
    assert Dictionaries([]).are_same()


def test_no_other_dictionary_takes_the_place_of_one_that_is_gone() -> None:
    held = some(100)
    compared = Dictionaries([*held])
    held.clear()
    made = some(1000)
    assert compared.are_same()
    assert len(made) == 1000
