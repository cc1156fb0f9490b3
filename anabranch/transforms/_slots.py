"""Many Variables that report no write: what they hold, read where it is kept."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from anabranch.graph._kind import Cell
from anabranch.transforms._memory import IS_READABLE, WORD, offset_of, words_at
from anabranch.transforms._versions import ARE_TOLD, Contents, version_address


class Slots:
    """The values of Variables, and whether all else about them is as it was.

    Arguments:
        cell: how each of them is read.
        variables: somebody else keeps them alive.

    Raises:
        ValueError: they are not alike, or memory cannot be read.
    """

    def __init__(self, cell: Cell, variables: Sequence[Any]) -> None:
        if not (IS_READABLE and ARE_TOLD):
            raise ValueError("memory cannot be read")
        getters = (type, cell.metadata, cell.owner)
        offsets = [WORD, *[_offset(variables[0], getter) for getter in getters[1:]]]
        kept = [[*map(getter, variables)] for getter in getters]
        addresses = [id(variable) + offset for offset in offsets for variable in variables]
        metadata = kept[1]
        if any(type(known) is not dict for known in metadata):
            raise ValueError("their metadata are no plain dictionaries")
        self._kept = [*chain.from_iterable(kept)]  # so that their addresses stay theirs
        self._size = WORD * len(addresses)
        self.words = words_at([*addresses, *map(version_address, metadata)])
        """Classes, metadata and owners, and the versions of the metadata."""
        self.seen = self.words.as_bytes()  # before what they stand for is read
        """What they were."""
        self._contents = Contents(metadata)
        at = _offset(variables[0], cell.read)
        self.values = words_at([id(x) + at for x in variables], references=True)
        """What the Variables hold."""
        for words, objects in (
            (words_at(addresses, references=True), self._kept),
            (self.values, [*map(cell.read, variables)]),
        ):
            if not all(map(operator.is_, words.as_objects(), objects)):
                raise ValueError("they are not alike, or somebody is writing one")

    def are_same(self) -> bool:
        """Tell whether classes, metadata and owners are what they were."""
        now, size = self.words.as_bytes(), self._size
        if now != self.seen:
            if now[:size] != self.seen[:size] or not self._contents.are_same():
                return False
            self.seen = now
        return True


def _offset(variable: Any, getter: Callable[[Any], Any]) -> int:
    return offset_of(variable, getter(variable))
