"""Many Variables that report no write, and the objects around them, read where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from anabranch.graph._kind import Cell
from anabranch.transforms._tables import HAS_TABLES, layout_of
from anabranch.transforms._versions import (
    ARE_TOLD,
    ATTRIBUTES_ARE_TOLD,
    Contents,
    dictionary_address,
    version_address,
)
from anabranch.transforms._words import IS_READABLE, WORD, offset_of, refer_to, words_at


class Shown(NamedTuple):
    """What shows whether an object holds what it held."""

    words: list[int]  # their addresses; the same as long as it does
    references: dict[int, Any]  # which of them refer to what
    told: list[dict[str, Any]]  # dictionaries that are the same as long as their versions are


class Root(NamedTuple):
    """What shows whether the object at the top, which is not kept alive, holds what it held."""

    words: list[int]
    references: dict[int, Any]
    versions: list[int]  # addresses; if they change, `is_same` is asked
    is_same: Callable[[], bool]
    dictionary: int | None
    """The id of its dictionary, if that has to be there when the words are read."""


def shown_by(obj: Any, attributes: dict[str, Any]) -> Shown | None:
    """Return what shows that an object holds what it holds; None if nothing does.

    Arguments:
        obj: somebody keeps it alive, and what it holds.
        attributes: its dictionary, too.
    """
    if object.__getattribute__(obj, "__dict__") is not attributes:
        return None  # it keeps them elsewhere
    references = {id(obj) + WORD: type(obj)}
    if ATTRIBUTES_ARE_TOLD:
        at = dictionary_address(obj)
        return None if at is None else Shown([], references | {at: attributes}, [attributes])
    layout = layout_of(obj) if HAS_TABLES else None
    if layout is None or len(layout.values) != len(attributes):
        return None
    references |= dict(zip(layout.values, attributes.values(), strict=True))
    return Shown(layout.guards, references, [])


def shown_by_root(
    root: Any,
    attributes: dict[str, Any],
    left_out: Collection[int],
    is_same: Callable[[], bool],
) -> Root | None:
    """Return what shows that the object at the top holds what it holds; None if nothing does.

    Arguments:
        root: the object.
        attributes: its dictionary.
        left_out: the positions of attributes that may be others.
        is_same: asked if nothing else tells.
    """
    if object.__getattribute__(root, "__dict__") is not attributes:
        return None
    references = {id(root) + WORD: type(root)}
    if ATTRIBUTES_ARE_TOLD:
        return Root([], references, [version_address(attributes)], is_same, id(attributes))
    layout = layout_of(root) if HAS_TABLES else None
    if layout is None or len(layout.values) != len(attributes):
        return None
    pairs = enumerate(zip(layout.values, attributes.values(), strict=True))
    references |= dict([pair for i, pair in pairs if i not in left_out])
    return Root(layout.guards, references, [], is_same, None)


def slots_of(
    cell: Cell, variables: Sequence[Any], around: Iterable[Shown] = (), root: Root | None = None
) -> Slots | None:
    """Return the slots of Variables; None if they are not alike, or memory cannot be read.

    Arguments:
        cell: how each of them is read.
        variables: somebody else keeps them alive.
        around: of the objects around them.
        root: of the object at the top.
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
    references = dict(zip(addresses, chain.from_iterable(kept), strict=True))
    values = [id(x) + at for x in variables]
    words: list[int] = []
    told = [*kept[1]]
    for shown in around:
        words += shown.words
        references |= shown.references
        told += shown.told
    if root is not None:
        words += root.words
        references |= root.references
    # as numbers first: what is no reference must not be read as one
    if not refer_to(values, [*map(cell.read, variables)]):
        return None
    slots = Slots(references, words, told, values, root)
    return slots if refer_to([*references], [*references.values()]) else None


class Slots:
    """The values of Variables, and whether all else about them, and around them, is as it was.

    Arguments:
        references: what words refer to that do not change, by address; kept alive, so that their
            ids stay theirs.
        words: the addresses of others that do not change.
        told: dictionaries that are the same as long as their versions are.
        values: the addresses of the words for the values.
        root: of the object at the top.
    """

    def __init__(
        self,
        references: Mapping[int, Any],
        words: Sequence[int],
        told: Sequence[dict[Any, Any]],
        values: Sequence[int],
        root: Root | None,
    ) -> None:
        self.kept = [*references.values()]
        self.root = root
        addresses = [*references, *words]
        self._size = WORD * len(addresses)
        versions = () if root is None else root.versions
        self.words = words_at([*addresses, *map(version_address, told), *versions])
        """Those that do not change, and the versions of dictionaries."""
        self.seen = [self.words.as_bytes()]  # before what they stand for is read
        """What they were, in a list that may be kept, since it keeps nothing else alive."""
        self._contents = Contents(told)
        self.values = words_at(values, references=True)
        """What the Variables hold."""

    def are_same(self) -> bool:
        """Tell whether all but the values is what it was; the root has the dictionary it had."""
        now, (seen,), size, root = self.words.as_bytes(), self.seen, self._size, self.root
        if now != seen:
            if now[:size] != seen[:size] or not self._contents.are_same():
                return False
            if root is not None and not root.is_same():
                return False
            self.seen[0] = now
        return True
