"""What nodes hold that cannot report a write, compared in one pass in C.

Lists, dictionaries, dataclasses and the objects of flax tell nobody when they are written, so they
are looked at on every call. They are visited the way the garbage collector visits them, with
`gc.get_referents`, many objects in one call, and what they refer to is compared by identity with
what they referred to before. A visit gives the values of a dictionary but not its names, and does
not tell where one object ends and the next begins: names and sizes are compared, too.

An object with attributes is visited along with its dictionary: which of the two shows the values
depends on the release of Python, both together always do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from gc import get_referents
from itertools import chain, combinations, compress
from typing import Any, cast

import numpy as np

from anabranch.graph import _classify
from anabranch.graph._kind import Cell
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._writer import picker


class Visit:
    """What nodes refer to. Arrays are left out: they may differ from call to call."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._sized: list[Any] = []
        self._named: list[Iterable[Any]] = []

    def add(self, *objects: Any) -> None:
        """Add nodes: lists, dictionaries, objects with attributes."""
        for obj in objects:
            self._objects.append(obj)
            if isinstance(obj, (list, deque, dict)):
                self._sized.append(obj)
            if isinstance(obj, dict):
                self._named.append(cast("Any", obj))

    def finish(self, dicts: Sequence[Any]) -> None:
        """Remember what they refer to now.

        Arguments:
            dicts: further ones, to be compared with those that are given to `is_same`; the order of
                their names means nothing.
        """
        now = get_referents(*dicts, *self._objects)
        kept = [not is_array(x) for x in now]
        self._snapshot = [*compress(now, kept)]  # so that addresses stay those of these objects
        self._total = len(now)
        self._kept = None if all(kept) else np.flatnonzero(kept)
        self._addresses = _addresses_of(self._snapshot, len(self._snapshot))
        self._sizes = [*map(len, self._sized)]
        self._names = [*chain.from_iterable(self._named)]
        self._copies = [*map(dict, dicts)]
        self._names_of_dicts = None
        if not all(map(_tells_values_apart, self._copies)):
            self._names_of_dicts = [*map(list, dicts)]

    def __bool__(self) -> bool:
        return bool(self._objects)

    def is_same(self, dicts: Sequence[Any]) -> bool:
        """Tell whether all refer to what they did."""
        now = get_referents(*dicts, *self._objects)
        if len(now) != self._total:
            return False
        try:
            return (
                _addresses_of(now, self._total, self._kept) == self._addresses
                and [*map(len, self._sized)] == self._sizes
                and [*chain.from_iterable(self._named)] == self._names
                and self._have_names(dicts)
            )
        except RuntimeError:  # somebody is writing one
            return False

    def _have_names(self, dicts: Sequence[Any]) -> bool:
        """Compare the names in dictionaries that hold the objects that they held, in any order."""
        if self._names_of_dicts is None:
            return [*dicts] == self._copies
        return [*map(list, dicts)] == self._names_of_dicts

    def lists(self, most: int) -> list[tuple[list[Any], list[Any]]] | None:
        """Return the nodes and what they hold, if they are no more than so many lists."""
        plain = all(type(obj) is list for obj in self._objects)
        if not plain or len(self._objects) > most or self._kept is not None:
            return None
        return [(obj, [*obj]) for obj in self._objects]


def _addresses_of(objects: Iterable[Any], count: int, kept: Any = None) -> bytes:
    """Return the addresses of objects, which is what an array of objects consists of."""
    array = np.fromiter(objects, np.object_, count)
    return (array if kept is None else array.take(kept)).tobytes()


def _tells_values_apart(dictionary: dict[Any, Any]) -> bool:
    """Tell whether `==` tells the values of a dictionary apart; it does not for True and 1."""

    def differ(a: Any, b: Any) -> bool:
        return (a is not b) <= (type(a) is type(b) is str or (a == b) is False)

    return all(differ(a, b) for a, b in combinations(dictionary.values(), 2))


def is_array(x: Any) -> bool:
    """Tell whether an object is an array or stands for one."""
    return _classify.rule_of(x) is _classify.LEAF


class VisitOfVariables:
    """Values, metadata and classes of Variables, found by a visit.

    Arguments:
        cell: how one of them is read.
        variables: all of one kind.

    Raises:
        Unplannable: a visit does not tell which is which.
    """

    def __init__(self, cell: Cell, variables: Sequence[Any]) -> None:
        places: list[list[int]] = [[], [], []]
        at = 0
        for variable in variables:
            ids = [*map(id, get_referents(variable))]
            parts = cell.read(variable), cell.metadata(variable), type(variable)
            for found, part in zip(places, parts, strict=True):
                if ids.count(id(part)) != 1:
                    raise Unplannable
                found.append(at + ids.index(id(part)))
            at += len(ids)
        self._variables, self._total = variables, at
        self._values, self._metadata, self._classes = map(picker, places)
        self._same_classes = tuple(map(type, variables))
        if any(type(cls).__eq__ is not type.__eq__ for cls in self._same_classes):
            raise Unplannable  # they are compared by identity, that is

    def read(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return values and metadata, or None if a Variable is another one than it was."""
        now = get_referents(*self._variables)
        if len(now) != self._total or self._classes(now) != self._same_classes:
            return None
        return self._values(now), self._metadata(now)
