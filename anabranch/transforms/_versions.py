"""Dictionaries that nobody should have written, and whether somebody has.

CPython counts what happens to dictionaries, and each of them has the count of its last change (PEP
509): one number tells that a dictionary is as it was. It is read where it is kept, since there is
no other way to it from Python. Where numbers do not change as they should, by a trial when this
module is imported, dictionaries are compared on every call.

The attributes of an object may be written beside its dictionary, from CPython 3.13 on.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint64, sizeof
from itertools import chain
from typing import Any

_MANAGED = 1 << 4
"""The flag of classes whose objects have a dictionary that Python itself takes care of."""

_VERSION = object.__basicsize__ + sizeof(c_uint64)
"""Where in a dictionary the number is: after how many elements there are."""


def version_address(dictionary: dict[Any, Any]) -> int:
    """Return where the number of a dictionary is, as long as the dictionary is alive."""
    return id(dictionary) + _VERSION


_DICTIONARY = -3 * sizeof(c_uint64)
"""Where the address of its dictionary is, in an object that shows its attributes by versions."""


def dictionary_address(obj: Any) -> int | None:
    """Return where an object refers to the dictionary with its attributes; None if not there."""
    cls: Any = type(obj)
    return id(obj) + _DICTIONARY if cls.__flags__ & _MANAGED else None


def _are_told() -> bool:
    """Tell whether every way to change a dictionary changes its number."""
    if sys.implementation.name != "cpython":
        return False
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
    obj = _Tried()
    obj.__dict__ = {"first": 1}
    return _is_told(tried, writes) and _is_told(vars(obj), _attribute_writes(obj))


def _is_told(dictionary: dict[Any, Any], writes: Sequence[Callable[[], Any]]) -> bool:
    """Tell whether each of some writes changes the number of a dictionary."""
    cell = c_uint64.from_address(version_address(dictionary))
    seen = {cell.value}
    for write in writes:
        write()
        seen.add(cell.value)
    return len(seen) == 1 + len(writes)


class _Tried:
    first: Any


def _attribute_writes(obj: _Tried) -> Sequence[Callable[[], Any]]:
    """Return writes of all attributes of an object, as often as makes Python do it faster."""

    def write() -> None:
        obj.first = []

    def delete() -> None:
        del obj.first

    return [*[write] * 100, delete, write, delete, *[write] * 10]


ARE_TOLD = _are_told()
"""Whether the numbers may be used."""


def _are_attributes_told() -> bool:
    if not ARE_TOLD:
        return False
    obj = _Tried()
    obj.first = 1
    at = dictionary_address(obj)
    if at is None or not _is_told(vars(obj), _attribute_writes(obj)):
        return False
    cell, held = c_uint64.from_address(at), vars(obj)
    is_shown = cell.value == id(held)
    obj.__dict__ = {}
    return is_shown and cell.value == id(vars(obj)) != id(held)


ATTRIBUTES_ARE_TOLD = _are_attributes_told()
"""Whether those of the dictionaries with the attributes of objects may be."""


class Contents:
    """The names and values of dictionaries."""

    def __init__(self, dictionaries: Sequence[dict[Any, Any]]) -> None:
        self._dictionaries = dictionaries
        self._sizes = [*map(len, dictionaries)]
        self._names = [*chain.from_iterable(dictionaries)]
        self._values = [*_values_of(dictionaries)]

    def are_same(self) -> bool:
        """Tell whether they are what they were, by identity."""
        dictionaries = self._dictionaries
        try:
            return (
                [*map(len, dictionaries)] == self._sizes
                and all(map(operator.is_, chain.from_iterable(dictionaries), self._names))
                and all(map(operator.is_, _values_of(dictionaries), self._values))
            )
        except RuntimeError:  # somebody is writing one
            return False


class Dictionaries:
    """Compares the contents of a few dictionaries with what they were."""

    def __init__(self, dictionaries: Sequence[dict[Any, Any]]) -> None:
        self._dictionaries = dictionaries  # kept alive, so that their addresses stay theirs
        addresses = [*map(version_address, dictionaries)] if ARE_TOLD else []
        self.cells = [c_uint64.from_address(address) for address in addresses]
        """The numbers, if they may be used."""
        self.seen = self._read()  # before they are read
        """What they were."""
        self._contents = Contents(dictionaries)

    def __bool__(self) -> bool:
        return bool(self._dictionaries)

    def are_same(self) -> bool:
        """Tell whether they hold what they held."""
        now = self._read()
        if ARE_TOLD and now == self.seen:
            return True
        if not self._contents.are_same():
            return False
        self.seen = now
        return True

    def _read(self) -> tuple[int, ...]:
        return tuple([cell.value for cell in self.cells])


def _values_of(dictionaries: Sequence[dict[Any, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict[Any, Any].values, dictionaries))
