"""Tables: where objects keep their attributes, from CPython 3.13 on.

After the other fields of an object comes a head (how many values there is room for and how many
there are, whether it is used at all), then the values, each where its class keeps that name, then
the order in which they were set, a byte each. Classes and heads and orders tell all names. Whether
that is so is tried when this module is imported.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from ctypes import c_uint8
from gc import get_referents
from typing import Any, NamedTuple

from anabranch.transforms._words import (
    ELEMENTS,
    IS_READABLE,
    WORD,
    Words,
    address_at,
    ids_at,
    ids_of,
    words_at,
)

_INLINE = 1 << 2
"""The flag of classes whose objects have them."""


class Layout(NamedTuple):
    """The table of one object, as addresses of words."""

    guards: list[int]  # the class, head and order; they tell all names
    values: list[int]


def layout_of(obj: Any) -> Layout | None:
    """Return where an object keeps its attributes; None if it has no table."""
    cls: Any = type(obj)
    if not cls.__flags__ & _INLINE:
        return None
    head = id(obj) + cls.__basicsize__
    room, used, *is_used = [c_uint8.from_address(head + i).value for i in range(4)]
    order = head + WORD * (1 + room)
    if is_used != [1, 1]:
        return None
    positions = [c_uint8.from_address(order + i).value for i in range(used)]
    return Layout(
        [id(obj) + WORD, head, *range(order, order + used, WORD)],
        [head + WORD * (1 + position) for position in positions],
    )


class Table(NamedTuple):
    """The tables of some objects, which are not kept alive.

    A value is never read from a table itself: another thread may be about to give it up. A visit
    of the garbage collector's kind shows it, without letting any other thread run.
    """

    ids_at: Callable[[int], Any]
    ids: bytes  # of the objects
    guards: Words
    seen: bytes
    size: int
    """How much a visit of the objects shows: with the values, their classes and dictionaries."""
    pick: Callable[[list[Any]], Sequence[Any]]
    """Picks the values, in the order in which they were set."""

    @classmethod
    def of(cls, objects: list[Any], values: Sequence[Any]) -> Table | None:
        """Return where objects keep these values, which are all; None if that is not known."""
        guards: list[int] = []
        places: list[int] = []
        start = 0
        for obj in objects:
            layout = layout_of(obj)
            if layout is None:
                return None
            guards += layout.guards
            order = sorted(layout.values)  # that of a visit
            places += [start + order.index(address) for address in layout.values]
            start += len(get_referents(obj))
        words = words_at(guards)
        seen = words.as_bytes()
        found = get_referents(*objects)
        if not 1 < len(places) == len(values) or len(found) != start:
            return None
        pick = operator.itemgetter(*places)
        if not all(map(operator.is_, pick(found), values)):
            return None
        count = len(objects)
        return cls(ids_at(count), ids_of(objects, count).raw, words, seen, start, pick)

    def read(self, objects: list[Any]) -> list[Any] | None:
        """Return the values if these are the objects, and hold the same names."""
        ids_at, ids, (take, places), seen, size, pick = self
        if ids_at(address_at(id(objects) + ELEMENTS).value).raw != ids:
            return None
        found = get_referents(*objects)  # before the guards, so that they tell of this, too
        if take(places).tobytes() != seen or len(found) != size:
            return None
        return [*pick(found)]


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
