"""Dictionaries that nobody should have written, and whether somebody has.

CPython counts what happens to dictionaries, and each of them has the count of its last change (PEP
509): one number tells that a dictionary is as it was. The numbers of thousands are read in a few
microseconds, where they are kept, through an array that begins at the first of them. There is no
other way to them from Python. Where numbers do not change as they should, by a trial when this
module is imported, dictionaries are compared on every call.

The attributes of an object may be written beside its dictionary; this is for others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint64, sizeof
from itertools import chain
from typing import Any

import numpy as np

_SIZE = sizeof(c_uint64)
_MEMORY = c_uint64 * (1 << 45)  # all of it; no more is touched than what is read
_FEW = 48  # dictionaries; from then on NumPy is faster
_VERSION = object.__basicsize__ + _SIZE
"""Where in a dictionary the number is: after how many elements there are."""


def cells_of(dictionaries: Sequence[dict[Any, Any]]) -> list[c_uint64]:
    """Return the numbers of dictionaries, which somebody else keeps alive, where they are kept."""
    return [c_uint64.from_address(id(x) + _VERSION) for x in dictionaries]


def _reader(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[], bytes]:
    """Return what returns all the numbers."""
    addresses = [id(x) + _VERSION for x in dictionaries]
    first = min(addresses)
    memory: Any = _MEMORY.from_address(first)
    take = np.frombuffer(memory, np.uint64).take
    places = np.array([(address - first) // _SIZE for address in addresses])
    return lambda: take(places).tobytes()


def _are_told() -> bool:
    """Tell whether every way to change a dictionary changes its number."""
    tried: dict[Any, Any] = {"a": 1, "b": 2}
    writes: Sequence[Callable[[], Any]] = (
        lambda: operator.setitem(tried, "a", 3),
        lambda: operator.setitem(tried, "c", 4),
        lambda: operator.delitem(tried, "b"),
        lambda: tried.update(b=5),
        lambda: operator.ior(tried, {"d": 6}),
        lambda: tried.setdefault("e", 7),
        lambda: tried.pop("a"),
        tried.popitem,
        tried.clear,
    )
    (cell,) = cells_of([tried])
    seen = {cell.value}
    for write in writes:
        write()
        seen.add(cell.value)
    return len(seen) == 1 + len(writes)


_TOLD = _are_told()


class Dictionaries:
    """Compares the names and values of dictionaries with what they were, by identity."""

    def __init__(self, dictionaries: Sequence[dict[Any, Any]]) -> None:
        self._dictionaries = dictionaries  # kept alive, so that their addresses stay theirs
        few = len(dictionaries) <= _FEW
        self.cells = cells_of(dictionaries) if _TOLD and few else None
        """The numbers, if they are few."""
        self._read = _reader(dictionaries) if _TOLD and not few else self._read_cells
        self.seen: Any = self._read()  # before they are read
        """What they were, a tuple, if they are few."""
        self._sizes = [*map(len, dictionaries)]
        self._names = [*chain.from_iterable(dictionaries)]
        self._values = [*_values_of(dictionaries)]

    def __bool__(self) -> bool:
        return bool(self._dictionaries)

    def are_same(self) -> bool:
        """Tell whether they hold what they held."""
        versions = self._read()
        if _TOLD and versions == self.seen:
            return True
        try:
            same = self._are_same()
        except RuntimeError:  # somebody is writing one
            return False
        if same:
            self.seen = versions
        return same

    def _read_cells(self) -> tuple[int, ...]:
        return tuple([cell.value for cell in self.cells or ()])

    def _are_same(self) -> bool:
        dictionaries = self._dictionaries
        return (
            [*map(len, dictionaries)] == self._sizes
            and all(map(operator.is_, chain.from_iterable(dictionaries), self._names))
            and all(map(operator.is_, _values_of(dictionaries), self._values))
        )


def _values_of(dictionaries: Sequence[dict[Any, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict[Any, Any].values, dictionaries))
