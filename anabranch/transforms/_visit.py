"""What nodes hold that cannot report a write, compared in one pass in C.

Lists, dictionaries, dataclasses and the objects of flax tell nobody when they are written, so they
are looked at on every call. They are visited the way the garbage collector visits them, with
`gc.get_referents`, all objects in one call, and what they refer to is compared by identity with
what they referred to before. A visit gives the values of a dictionary but not its names, and does
not tell where one object ends and the next begins: names and sizes are compared, too, unless an
object of flax keeps a record of its names, which is replaced when they change.

An object with attributes is visited along with its dictionary: which of the two shows the values
depends on the release of Python, both together always do. The metadata of Variables of flax are
seldom written; see `_versions`. Many of these Variables are read in memory; see `_slots`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from gc import get_referents
from itertools import chain, compress, groupby
from struct import Struct
from typing import Any, cast

import numpy as np

from anabranch.graph import _classify
from anabranch.graph._build import picker
from anabranch.graph._kind import Cell
from anabranch.transforms._slots import Root, Shown, Slots, shown_by, slots_of
from anabranch.transforms._versions import (
    ARE_TOLD,
    ATTRIBUTES_ARE_TOLD,
    Dictionaries,
    version_address,
)
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._words import IS_READABLE, WORD, ids_of, words_at

_MANY = 6  # Variables; more are read in memory
_FEW_DICTIONARIES = 16  # whose names are compared; of more, versions tell whether they have to be
_FEW = 40  # arrays that are left out; from then on NumPy is faster


class Visit:
    """What Variables and other nodes refer to.

    Arrays, and trees of them, are left out, but for those in metadata: they may differ from call
    to call.
    """

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._cell: Cell | None = None  # how one of them is read
        self._with_attributes: list[tuple[Any, dict[str, Any], bool]] = []  # keeps them alive
        self._objects: list[Any] = []
        self._sized: list[Any] = []
        self._named: list[dict[Any, Any]] = []
        self._trees: set[int] = set()

    def add_variable(self, cell: Cell | None, variable: Any) -> None:
        """Add a Variable whose value is an array.

        Raises:
            Unplannable: it is read in another way than the others.
        """
        self._cell = self._cell or cell
        if cell is None or cell is not self._cell:
            raise Unplannable
        self.variables.append(variable)

    def add(self, *objects: Any) -> None:
        """Add lists and dictionaries, and objects beside the dictionaries with their attributes."""
        for obj in objects:
            self._objects.append(obj)
            if isinstance(obj, (list, deque, dict)):
                self._sized.append(obj)
            if isinstance(obj, dict):
                self._named.append(cast("Any", obj))

    def add_object(
        self, obj: Any, attributes: dict[str, Any], *, records_names: bool = False
    ) -> None:
        """Add an object with attributes.

        Arguments:
            obj: the object.
            attributes: its dictionary.
            records_names: it refers to something that is replaced when a name changes.
        """
        self._with_attributes.append((obj, attributes, records_names))

    def leave_out(self, tree: Any) -> None:
        """Leave out a tree of arrays, which is read like an array."""
        self._trees.add(id(tree))

    def finish(self, root: Root | None = None) -> None:
        """Remember what they refer to now.

        Arguments:
            root: what shows what is above them.

        Raises:
            Unplannable: a visit does not tell the parts of a Variable apart.
        """
        cell, variables = self._cell, self.variables
        self.slots = self._find_slots(root)
        """The Variables, if they are many, and what is around them; these are not visited then."""
        values: list[int] = []
        metadata: list[Any] = []
        total = 0
        if cell is not None and self.slots is None:
            values, total = self._find_values(cell)
            metadata = [*map(cell.metadata, variables)]
        self.visited = (*(variables if self.slots is None else ()), *self._objects)
        now = get_referents(*self.visited)
        trees = self._trees
        own = [i for i in range(total, len(now)) if is_array(now[i]) or id(now[i]) in trees]
        left_out = {*values, *own}
        self.kept = [i not in left_out for i in range(len(now))]
        """Of all that they refer to, what is compared."""
        self.snapshot = [*compress(now, self.kept)]
        """What that was; it stays alive, so that its ids are its own."""
        self.values = values
        """Of all that they refer to, where the values of the Variables are."""
        self.pick_values: Callable[[Any], Sequence[Any]] = picker(values)
        self.pick_ids = _picker(self.kept)
        """Picks the ids of what is compared; None if that is everything."""
        self.ids = self._ids_of(now)
        """What they were."""
        self.metadata = Dictionaries(metadata)
        """Of the Variables that are visited."""
        self._names = [*chain.from_iterable(self._named)]
        self._types = [*map(type, self._names)]  # 1 and True are equal
        self._sizes = [*map(len, self._sized)]
        told = [*map(version_address, self._named)] if self._are_told() else []
        self._versions = words_at(told) if told else None
        self._seen = b""  # those of the versions that had the names

    def _find_slots(self, root: Root | None) -> Slots | None:
        """Find the slots of many Variables; let what they do not show be visited."""
        cell, variables, rest = self._cell, self.variables, self._with_attributes
        slots: Slots | None = None
        if cell is not None and len(variables) > _MANY:
            shown = [self._shown_by(obj, attributes) for obj, attributes, _ in rest]
            around = [found for found in shown if found is not None]
            slots = slots_of(cell, variables, around, root)
            if slots is not None:
                rest = [each for each, found in zip(rest, shown, strict=True) if not found]
        for obj, attributes, records_names in rest:
            if records_names:
                self._objects += [obj, attributes]
            else:
                self.add(obj, attributes)
        return slots

    def _shown_by(self, obj: Any, attributes: dict[str, Any]) -> Shown | None:
        if any(is_array(x) or id(x) in self._trees for x in attributes.values()):
            return None  # they are written without a change of the structure
        return shown_by(obj, attributes)

    def _find_values(self, cell: Cell) -> tuple[list[int], int]:
        """Return where a visit of the Variables meets their values, and how much it meets."""
        places: list[int] = []
        total = 0
        for variable in self.variables:
            ids = [*map(id, get_referents(variable))]
            value = id(cell.read(variable))
            if any(ids.count(part) != 1 for part in (value, id(cell.metadata(variable)))):
                raise Unplannable
            places.append(total + ids.index(value))
            total += len(ids)
        return places, total

    def __bool__(self) -> bool:
        return bool(self.variables or self._objects or self._with_attributes)

    @property
    def root(self) -> Root | None:
        """What shows what is above the Variables, if their slots are read along with it."""
        return None if self.slots is None else self.slots.root

    def read(self) -> Sequence[Any] | None:
        """Return the values of the Variables, or None if something is not what it was."""
        slots = self.slots
        if slots is not None and not slots.are_same():
            return None
        now = get_referents(*self.visited)
        if len(now) != len(self.kept) or self._ids_of(now) != self.ids:
            return None
        if self.metadata and not self.metadata.are_same():
            return None
        if self._sized and not self.has_names():
            return None
        return self.pick_values(now) if slots is None else slots.values.as_objects()

    def _ids_of(self, objects: list[Any]) -> Any:
        ids = ids_of(objects, len(objects))
        return ids.raw if self.pick_ids is None else self.pick_ids(ids)

    @property
    def compares_names(self) -> bool:
        """Whether names and sizes have to be compared."""
        return bool(self._sized)

    def has_names(self) -> bool:
        """Tell whether names and sizes are what they were."""
        if [*map(len, self._sized)] != self._sizes:
            return False
        now = b"" if self._versions is None else self._versions.as_bytes()
        if now and now == self._seen:
            return True
        try:
            names = [*chain.from_iterable(self._named)]
        except RuntimeError:  # somebody is writing one
            return False
        if names != self._names or [*map(type, names)] != self._types:
            return False
        self._seen = now
        return True

    def _are_told(self) -> bool:
        """Tell whether versions are to be asked whether names are the same."""
        has_attributes = len(self._objects) > len(self._sized)  # objects, beside dictionaries
        are_told = ATTRIBUTES_ARE_TOLD if has_attributes else ARE_TOLD
        return IS_READABLE and are_told and len(self._named) > _FEW_DICTIONARIES

    def lists(self, most: int) -> list[tuple[list[Any], list[Any]]] | None:
        """Return the nodes and what they hold, if they are no more than so many lists."""
        plain = not self.variables and all(type(obj) is list for obj in self.visited)
        if not plain or len(self._objects) > most or not all(self.kept):
            return None
        return [(obj, [*obj]) for obj in self._objects]


def _picker(kept: Sequence[bool]) -> Callable[[Any], Any] | None:
    """Return a function that picks some ids in memory, as bytes or a tuple of them."""
    if all(kept):
        return None
    if len(kept) - sum(kept) <= _FEW:
        runs = [(keep, len([*run]) * WORD) for keep, run in groupby(kept)]
        return Struct("".join([f"{size}{'s' if keep else 'x'}" for keep, size in runs])).unpack_from
    places, frombuffer, dtype = np.flatnonzero(kept), np.frombuffer, np.dtype(np.uintp)
    return lambda memory: frombuffer(memory, dtype).take(places).tobytes()


def is_array(x: Any) -> bool:
    """Tell whether an object is an array or stands for one."""
    return _classify.rule_of(x) is _classify.LEAF
