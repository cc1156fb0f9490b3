"""What many objects of one form hold in their attributes, or as many dictionaries.

Nobody is told when a dataclass is written: on every call names are compared with what they were,
and values are read. That takes a few calls in C for all objects together. Once the same objects
have been seen twice, most of it is left out where CPython shows that the names are the same: by the
versions of their dictionaries (see `_versions`), or by what it keeps in the objects themselves (see
`Table`). An object that is dropped is not kept alive by what is known of it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from ctypes import c_uint8
from gc import get_referents
from itertools import chain
from typing import Any, NamedTuple

from anabranch.transforms._versions import ARE_TOLD, ATTRIBUTES_ARE_TOLD, version_address
from anabranch.transforms._words import (
    ELEMENTS,
    IS_READABLE,
    WORD,
    Words,
    address_at,
    ids_at,
    ids_of,
    refer_to,
    words_at,
)

_INLINE = 1 << 2
"""The flag of classes whose objects keep their attributes themselves, from CPython 3.13 on."""

_MOST_PATIENT = 1 << 16


class Table(NamedTuple):
    """Where objects keep their attributes.

    After its other fields comes a head (how many values there is room for and how many there are,
    whether it is used at all), then the values, each where its class keeps that name, then the
    order in which they were set, a byte each. Classes and heads and orders tell all names. Whether
    that is so is tried when this module is imported.
    """

    ids_at: Callable[[int], Any]
    ids: bytes  # of the objects
    guards: Words  # classes, heads and orders
    seen: bytes
    values: Words

    @classmethod
    def of(cls, objects: list[Any], values: Sequence[Any]) -> Table | None:
        """Return where objects keep these values, which are all; None if that is not known."""
        guards: list[int] = []
        places: list[int] = []
        for obj in objects:
            of: Any = type(obj)
            if not of.__flags__ & _INLINE:
                return None
            head = id(obj) + of.__basicsize__
            room, used, *is_used = [c_uint8.from_address(head + i).value for i in range(4)]
            order = head + WORD * (1 + room)
            if is_used != [1, 1]:
                return None
            guards += [id(obj) + WORD, head, *range(order, order + used, WORD)]
            positions = [c_uint8.from_address(order + i).value for i in range(used)]
            places += [head + WORD * (1 + position) for position in positions]
        if not places or len(places) != len(values) or not refer_to(places, values):
            return None
        words, count = words_at(guards), len(objects)
        ids = ids_of(objects, count).raw
        return cls(ids_at(count), ids, words, words.as_bytes(), words_at(places, references=True))

    def read(self, objects: list[Any]) -> list[Any] | None:
        """Return the values if these are the objects, and hold the same names."""
        ids_at, ids, (take, places), seen, values = self
        # in this order: the objects have to be alive
        if ids_at(address_at(id(objects) + ELEMENTS).value).raw == ids and (
            take(places).tobytes() == seen
        ):
            take, places = values
            return take(places).tolist()
        return None


class _Tried:
    pass


class _Other(_Tried):
    pass


def _some() -> tuple[list[Any], Table | None]:
    tried: list[Any] = [_Tried() for _ in range(3)]
    for i, obj in enumerate(tried):
        obj.first, obj.second, obj.third = [i], [i], [i]
        del obj.second
    return tried, Table.of(tried, [value for obj in tried for value in vars(obj).values()])


def _has_tables() -> bool:
    """Tell whether tables show what objects hold."""
    if not IS_READABLE or sys.version_info < (3, 13):
        return False
    tried, table = _some()
    one, new = tried[1], [0]
    if table is None or table.read([*reversed(tried)]) is not None:
        return False
    one.third = new
    if table.read(tried) != [[0], [0], [1], new, [2], [2]]:
        return False
    vars(one)["first"] = new
    if (table.read(tried) or [None])[2] is not new:
        return False
    writes: Sequence[Any] = (
        lambda one: setattr(one, "second", new),
        lambda one: delattr(one, "third"),
        lambda one: vars(one).update(first=vars(one).pop("first")),
        lambda one: vars(one).update(fourth=new),
        lambda one: setattr(one, "__class__", _Other),
        lambda one: setattr(one, "__dict__", {**vars(one)}),
    )
    for write in writes:
        tried, table = _some()
        if table is None:
            return False
        write(tried[1])
        if table.read(tried) is not None:
            return False
    return True


HAS_TABLES = _has_tables()
"""Whether they may be used."""


class _Versions(NamedTuple):
    """The versions of dictionaries."""

    ids_at: Callable[[int], Any]
    ids: bytes  # of the dictionaries
    words: Words

    @classmethod
    def of(cls, dictionaries: list[dict[Any, Any]]) -> _Versions:
        """Return those of some dictionaries, which are not kept alive."""
        count = len(dictionaries)
        words = words_at([*map(version_address, dictionaries)])
        return cls(ids_at(count), ids_of(dictionaries, count).raw, words)

    def read(self, dictionaries: list[dict[Any, Any]]) -> bytes | None:
        """Return them as bytes, if these are the dictionaries."""
        ids_at, ids, (take, places) = self
        if ids_at(address_at(id(dictionaries) + ELEMENTS).value).raw != ids:
            return None
        return take(places).tobytes()


class Rows:
    """Compares what objects hold with what they held, and reads it.

    Arguments:
        objects: with attributes, or dictionaries.
        held: the dictionaries with all their attributes, or these dictionaries.
        are_dictionaries: whether they are.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        held: Sequence[dict[Any, Any]],
        *,
        are_dictionaries: bool,
    ) -> None:
        self._are_dictionaries = are_dictionaries
        self._are_told = IS_READABLE and (ARE_TOLD if are_dictionaries else ATTRIBUTES_ARE_TOLD)
        self._classes = [*map(type, objects)]
        self._names = [*chain.from_iterable(held)]
        self._sizes = [*map(len, held)]
        self._table: Table | None = None
        self._versions: _Versions | None = None
        self._seen = b""  # versions of what had the names
        self._ids = b""  # of the objects that were seen last
        self._sights = 0  # of them, without a break
        self._patience = 1  # how many there must be before more is found out about them

    def read(self, objects: list[Any]) -> list[Any] | None:
        """Return what as many objects hold, one after the other, or None if names have changed."""
        if self._table is not None:
            found = self._table.read(objects)
            if found is not None:
                return found
        if [*map(type, objects)] != self._classes:
            return None
        held = self._dictionaries(objects)
        versions = self._versions
        if versions is None:
            found = self._compare(held)
            if found is not None:
                self._find_out(objects, held, found)
            return found
        found = get_referents(*held)  # before the versions, so that they tell of this, too
        now = versions.read(held)
        if now is not None and now == self._seen and len(found) == len(self._names):
            return found
        return self._compare_again(held, now)

    def _compare_again(self, held: list[dict[Any, Any]], now: bytes | None) -> list[Any] | None:
        """Compare names, and remember which versions have them."""
        found = self._compare(held)
        if now is not None:
            self._seen = now if found is not None and _visits_show(held, found) else b""
        return found

    def _dictionaries(self, objects: list[Any]) -> list[dict[Any, Any]]:
        return objects if self._are_dictionaries else [x.__dict__ for x in objects]

    def _compare(self, held: list[dict[Any, Any]]) -> list[Any] | None:
        try:
            if [*map(len, held)] != self._sizes or [*chain.from_iterable(held)] != self._names:
                return None
            found = [*chain.from_iterable(map(dict[Any, Any].values, held))]
        except RuntimeError:  # somebody is writing one
            return None
        return found if len(found) == len(self._names) else None

    def _find_out(
        self, objects: list[Any], held: list[dict[Any, Any]], values: Sequence[Any]
    ) -> None:
        """Find out how it can be read faster, if the same objects have come again."""
        ids = ids_of(objects, len(objects)).raw
        if ids != self._ids:
            self._ids, self._sights = ids, 0
            return
        self._sights += 1
        if self._sights < self._patience:
            return
        self._patience = min(2 * self._patience, _MOST_PATIENT)
        if self._are_told:
            if _visits_show(held, values):
                self._versions = _Versions.of(held)
        elif HAS_TABLES and not self._are_dictionaries:
            table = Table.of(objects, values)
            if table is not None and self._compare(held):
                self._table = table


def _visits_show(held: Sequence[dict[Any, Any]], values: Sequence[Any]) -> bool:
    """Tell whether a visit of dictionaries shows their values, in the order of their names."""
    found = get_referents(*held)
    return len(found) == len(values) and all(map(operator.is_, found, values))
