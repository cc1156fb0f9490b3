"""A visit compares all that nodes refer to, but for arrays, by identity."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import pytest

from anabranch.transforms._visit import Visit


class Equal:
    """Equal to everything, and identical to nothing else."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def visit_of(*objects: Any) -> Visit:
    visit = Visit()
    visit.add(*objects)
    visit.finish()
    return visit


@pytest.mark.parametrize("arrays", [0, 1, 30, 31, 500])
def test_every_element_but_arrays_is_compared_by_identity(arrays: int) -> None:
    items: list[Any] = [Equal(), *[x for i in range(arrays) for x in (jnp.array(i), Equal())], 7]
    visit = visit_of(items)
    assert visit.read() == ()
    for i in {0, 1, len(items) // 2, len(items) - 2, len(items) - 1}:
        held = items[i]
        is_array = not isinstance(held, (Equal, int))
        items[i] = jnp.array(0) if is_array else Equal()
        assert (visit.read() is None) is not is_array
        items[i] = held
        assert visit.read() is not None


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_lists_are_told_apart_where_one_ends_and_the_next_begins(count: int) -> None:
    first, second = [object() for _ in range(count + 1)], [object() for _ in range(count)]
    visit = visit_of(first, second)
    second.insert(0, first.pop())
    assert visit.read() is None
    first.append(second.pop(0))
    assert visit.read() == ()
    first.append(object())
    assert visit.read() is None


def test_names_of_dictionaries_are_compared() -> None:
    held = {"a": object(), "b": object()}
    visit = visit_of(held)
    last = held.pop("b")
    held["c"] = last
    assert visit.read() is None
    held["b"] = held.pop("c")
    assert visit.read() == ()


def test_what_is_compared_stays_alive_so_that_its_address_is_its_own() -> None:
    items = [Equal() for _ in range(50)]
    visit = visit_of(items)
    items[:] = [Equal() for _ in range(50)]
    gc.collect()
    for _ in range(100):
        items[:] = [Equal() for _ in range(50)]
        assert visit.read() is None
