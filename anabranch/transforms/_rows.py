"""What many objects of one form hold in their attributes, or as many dictionaries.

Nobody is told when a dataclass is written: on every call names are compared with what they were,
and values are read. That takes a few calls in C for all objects together. Once the same objects
have been seen twice, most of it is left out where CPython shows that the names are the same: by the
versions of their dictionaries (see `_versions`), or by what it keeps in the objects themselves (see
`_tables`). An object that is dropped is not kept alive by what is known of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from gc import get_referents
from itertools import chain
from typing import Any, NamedTuple

from anabranch.transforms._tables import HAS_TABLES, Table
from anabranch.transforms._versions import ARE_TOLD, ATTRIBUTES_ARE_TOLD, version_address
from anabranch.transforms._words import (
    ELEMENTS,
    IS_READABLE,
    Words,
    address_at,
    ids_at,
    ids_of,
    words_at,
)

_MOST_PATIENT = 1 << 16


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
        self._types = [*map(type, self._names)]  # others may equal them
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
        if self._versions is not None:
            ids_at, ids, (take, places) = self._versions
            if ids_at(address_at(id(held) + ELEMENTS).value).raw == ids:
                found = get_referents(*held)  # before the versions, so that they tell of this, too
                now = take(places).tobytes()
                if now == self._seen and len(found) == len(self._names):
                    return found
                found = self._compare(held)
                self._seen = now if found is not None and _visits_show(held, found) else b""
                return found
        found = self._compare(held)
        if found is not None:
            self._find_out(objects, held, found)
        return found

    def _dictionaries(self, objects: list[Any]) -> list[dict[Any, Any]]:
        return objects if self._are_dictionaries else [x.__dict__ for x in objects]

    def _compare(self, held: list[dict[Any, Any]]) -> list[Any] | None:
        try:
            names = [*chain.from_iterable(held)]
            if [*map(len, held)] != self._sizes or names != self._names:
                return None
            if [*map(type, names)] != self._types:
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
                self._seen = b""
                self._versions = _Versions.of(held)
        elif HAS_TABLES and not self._are_dictionaries:
            table = Table.of(objects, values)
            if table is not None and self._compare(held):
                self._table = table


def _visits_show(held: Sequence[dict[Any, Any]], values: Sequence[Any]) -> bool:
    """Tell whether a visit of dictionaries shows their values, in the order of their names."""
    found = get_referents(*held)
    return len(found) == len(values) and all(map(operator.is_, found, values))
