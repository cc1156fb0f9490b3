"""What slots of many objects hold, and the ids of what a list holds, read where CPython keeps them.

To read a slot of an object takes a call; of thousands, as long as the compiled program runs. To
visit the objects (see `_visit`) takes as long, since all that they refer to is touched. Here an
array of NumPy lies over memory, which picks the words at some addresses at once, as numbers or as
references to objects. The caller sees to it that what is read is alive. Whether that works in this
Python is tried when this module is imported.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from ctypes import c_char, c_size_t, c_uint64, sizeof
from typing import Any, NamedTuple

import numpy as np

from anabranch._source import Source
from anabranch.graph._turn import HAS_LOCK

WORD = sizeof(c_size_t)
"""The bytes of a reference, or another number."""


class _AllMemory:
    """All of it, from some address on; no more is touched than what is read."""

    def __init__(self, first: int, dtype: str) -> None:
        self.__array_interface__ = {
            "data": (first, True),
            "shape": (1 << 52,),
            "typestr": dtype,
            "version": 3,
        }


class Words(NamedTuple):
    """The words at some addresses: `take(places)` is an array of them."""

    take: Callable[[Any], Any]
    places: Any

    def as_bytes(self) -> bytes:
        """Return them as numbers."""
        return self.take(self.places).tobytes()

    def as_objects(self) -> list[Any]:
        """Return what they refer to; they have to be `references`."""
        return self.take(self.places).tolist()


def words_at(addresses: Sequence[int], *, references: bool = False) -> Words:
    """Return the words at some addresses; those that are no references are read as numbers."""
    first = min(addresses)
    take = np.asarray(_AllMemory(first, "|O" if references else f"<u{WORD}")).take
    return Words(take, np.array([(address - first) // WORD for address in addresses]))


def offset_of(obj: Any, content: Any) -> int | None:
    """Return where in an object something is that it refers to; None unless that is one place."""
    words = (c_size_t * (type(obj).__basicsize__ // WORD)).from_address(id(obj))
    found = [i for i, word in enumerate(words) if word == id(content)]
    return found[0] * WORD if len(found) == 1 else None


def refer_to(addresses: Sequence[int], objects: Sequence[Any]) -> bool:
    """Tell whether the words at some addresses refer to objects, one each."""
    ids = np.array([*map(id, objects)], np.uintp)
    return words_at(addresses).as_bytes() == ids.tobytes()


address_at: Callable[[int], Any] = c_size_t.from_address
"""Return the number at an address, as its `value`."""

ELEMENTS = list.__basicsize__ - 2 * WORD
"""Where in a list the address of the elements is; how many have room comes last."""


def ids_at(count: int) -> Callable[[int], Any]:
    """Return what reads so many ids at an address; `raw` of what it returns is their bytes.

    Of a list, `ids_at(len(items))(address_at(id(items) + ELEMENTS).value)` is the memory with the
    ids of what it holds, to be read before the list changes or dies.
    """
    return (c_char * (WORD * count)).from_address


def ids_of(items: list[Any], count: int) -> Any:
    """Return the memory with the ids of what a list of so many elements holds."""
    return ids_at(count)(address_at(id(items) + ELEMENTS).value)


def ids_in(source: Source, name: str, count: int) -> str:
    """Return an expression for that, where a variable holds the list."""
    read = source.constant(ids_at(count))
    source.names.update(address_at=address_at, id=id)
    return f"{read}(address_at(id({name}) + {ELEMENTS}).value)"


class _Tried:
    __slots__ = ("first", "second")


def _is_readable() -> bool:
    """Tell whether slots are read right."""
    if not HAS_LOCK or sizeof(c_uint64) != WORD:
        return False
    held = [[i] for i in range(4)]
    tried = [_Tried() for _ in held]
    for obj, content in zip(tried, held, strict=True):
        obj.first, obj.second = None, content
    offset = offset_of(tried[0], held[0])
    if offset is None:
        return False
    try:
        addresses = [id(obj) + offset for obj in tried]
        if not refer_to(addresses, held):
            return False
        references, words = words_at(addresses, references=True), words_at(addresses)
        before = [*map(sys.getrefcount, held)]
        for _ in range(3):
            if not all(map(operator.is_, references.as_objects(), held)):
                return False
        seen = words.as_bytes()
        tried[-1].second = held[-1] = []
        before[-1] = sys.getrefcount(held[-1])
        return (
            all(map(operator.is_, references.as_objects(), held))
            and [*map(sys.getrefcount, held)] == before
            and words.as_bytes()[:-WORD] == seen[:-WORD]
            and words.as_bytes() != seen
        )
    except (ValueError, TypeError):
        return False


IS_READABLE = _is_readable()
"""Whether all this may be used."""
