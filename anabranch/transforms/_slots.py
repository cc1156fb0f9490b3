"""Many Variables that report no write: what they hold, read where it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from anabranch.graph._kind import Cell
from anabranch.transforms._versions import ARE_TOLD, Contents, version_address
from anabranch.transforms._words import IS_READABLE, WORD, offset_of, refer_to, words_at


def slots_of(cell: Cell, variables: Sequence[Any]) -> Slots | None:
    """Return the slots of Variables; None if they are not alike, or memory cannot be read.

    Arguments:
        cell: how each of them is read.
        variables: somebody else keeps them alive.
    """
    if not (IS_READABLE and ARE_TOLD):
        return None
    getters = (type, cell.metadata, cell.owner)
    known = variables[0]
    offsets = [WORD, offset_of(known, cell.metadata(known)), offset_of(known, cell.owner(known))]
    at = offset_of(known, cell.read(known))
    kept = [[*map(getter, variables)] for getter in getters]
    if at is None or None in offsets or any(type(metadata) is not dict for metadata in kept[1]):
        return None
    addresses = [id(x) + offset for offset in offsets if offset is not None for x in variables]
    values = [id(x) + at for x in variables]
    slots = Slots(addresses, [*chain.from_iterable(kept)], kept[1], values)
    # as numbers first: what is no reference must not be read as one
    are_alike = refer_to(values, [*map(cell.read, variables)]) and refer_to(addresses, slots.kept)
    return slots if are_alike else None


class Slots:
    """The values of Variables, and whether all else about them is as it was.

    Arguments:
        addresses: of the words for classes, metadata and owners.
        kept: what these are; kept alive, so that their ids stay theirs.
        metadata: dictionaries among them.
        values: the addresses of the words for the values.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        kept: Sequence[Any],
        metadata: Sequence[dict[Any, Any]],
        values: Sequence[int],
    ) -> None:
        self.kept = kept
        self._size = WORD * len(addresses)
        self.words = words_at([*addresses, *map(version_address, metadata)])
        """Classes, metadata and owners, and the versions of the metadata."""
        self.seen = self.words.as_bytes()  # before what they stand for is read
        """What they were."""
        self._contents = Contents(metadata)
        self.values = words_at(values, references=True)
        """What the Variables hold."""

    def are_same(self) -> bool:
        """Tell whether classes, metadata and owners are what they were."""
        now, size = self.words.as_bytes(), self._size
        if now != self.seen:
            if now[:size] != self.seen[:size] or not self._contents.are_same():
                return False
            self.seen = now
        return True
