"""A segment: what a plan knows of one Module among the arguments, and of all that it reaches.

The Module owns it, in a slot, and a plan refers to it weakly: a plan keeps no Module alive, and a
Module that refers to itself is collected with what is known of it. Nothing here refers to the
Module itself but for a weak reference, so that one without cycles is freed at once, as ever.

A segment tells whether the structure is still the same, and reads the leaves. Modules are watched:
they tell when they are written. Nodes that cannot report a write (lists, dicts, dataclasses,
objects of flax) are visited, all of them in one pass in C; see `_visit`. Any other kind is opened
and compared.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from anabranch.graph import _classify
from anabranch.graph._kind import Kind, is_same
from anabranch.graph._watchers import Memory, Watcher
from anabranch.transforms._places import Places
from anabranch.transforms._slots import Root, shown_by_root
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._visit import Visit
from anabranch.transforms._watch import Watch

_metadata_of = operator.attrgetter("_metadata")
_FEW = 8  # lists that are compared one by one; more are compared in one pass
_OWNING = threading.RLock()  # what is let go of may run code of the user, which may write

NOTHING = Memory(())


class Opened(NamedTuple):
    """A node of a kind that has to be opened, and what it held."""

    kind: Kind
    obj: Any
    extra: Any
    keys: Any
    kept: list[tuple[int, Any]]  # positions and values that are no arrays
    arrays: list[int]  # positions
    length: int

    def read(self) -> list[Any] | None:
        """Return the arrays in it, or None if it has changed."""
        extra, keys, values = self.kind.open(self.obj)
        if len(values) != self.length:
            return None
        arrays = [values[i] for i in self.arrays]
        now = (extra, keys, [values[i] for i, _ in self.kept])
        then = (self.extra, self.keys, [value for _, value in self.kept])
        return arrays if is_same(now, then) and are_arrays(arrays) else None


class Attributes(NamedTuple):
    """The attributes of a root that cannot report a write; it must not be kept alive."""

    cls: type
    kind: Kind
    names: list[str]
    values: list[Any]  # None for those that are left out
    arrays: list[int]  # positions
    left_out: list[int]  # those, and those that lead to the plans of the root
    records_names: bool  # see `Kind`

    def of(self, root: Any) -> dict[str, Any]:
        """Return the attributes of a root."""
        attributes: Any = self.kind.attributes(root)
        return attributes

    @property
    def is_fixed(self) -> bool:
        """Whether no attribute holds something that a call replaces."""
        return all(self.names[i] in self.kind.bookkeeping for i in self.left_out)

    def read(self, root: Any) -> list[Any] | None:
        """Return the arrays in it, or None if it has changed."""
        attributes = self.of(root)
        if type(root) is not self.cls or not (self.records_names or [*attributes] == self.names):
            return None
        now = [*attributes.values()]
        if len(now) != len(self.values):
            return None
        arrays = [now[i] for i in self.arrays]
        for i in self.left_out:
            now[i] = None
        same = all(map(operator.is_, now, self.values))
        return arrays if same and (not arrays or are_arrays(arrays)) else None

    def is_held_by(self, reference: weakref.ref[Any]) -> bool:
        """Tell whether a root has not changed."""
        root = reference()
        return root is not None and self.read(root) is not None


class Segment(Watcher):
    """What is known of one root; filled by `make_segment`, and never changed then."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = weakref.ref(root)
        self.ids: set[int] = set()  # of the root, and the objects below it
        self.beside: set[int] = set()  # of what it refers to that belongs to another segment
        self.objects: dict[int, Any] = {}  # the same objects, by their index in the graphdef
        self.variables: list[Any] = []  # that hold an array each
        self.memory = NOTHING  # of what they hold
        self.reporting: list[Any] = []  # these, and those that hold trees of arrays
        self.metadata: list[Any] = []  # of those
        self.classes: list[type] = []
        self.own: Attributes | None = None  # of a root that cannot report a write
        self.visit = Visit()  # of Variables and other nodes that cannot
        self.places = Places()
        self.opened: list[Opened] = []
        self.functions: list[Any] = []  # static ones
        self.watch: Watch | None = None
        self.constants: list[Any] = []  # arrays in values
        self.numbers: list[int] = []  # of the leaves, as they are read
        self.leaves: list[int] = []  # in order
        self.order: Any = None
        self.lists: list[tuple[list[Any], list[Any]]] | None = None
        """Lists and what they hold, if nothing else has to be visited."""

    def finish(self) -> None:
        """Work out what is needed to compare."""
        self.visit.finish(self._shown_by_root())
        if self.functions:
            self.watch = Watch(self.functions)
        self.has_more = any(map(bool, (self.opened, self.functions, self.constants)))
        reads_more = self.has_more or self.places or self.order
        self._reads_variables = not reads_more and self.own is None
        self.lists = self.visit.lists(_FEW)

    def _shown_by_root(self) -> Root | None:
        own, root = self.own, self.root()
        if own is None or root is None or not own.is_fixed:
            return None
        is_same = functools.partial(own.is_held_by, self.root)  # refers to no segment
        return shown_by_root(root, own.of(root), own.left_out, is_same)

    def read(self, root: Any, metadata: bool, nodes: list[Any]) -> Sequence[Any] | None:
        """Return the leaves, or None if the structure has changed.

        Arguments:
            root: the argument of this call.
            metadata: no Variable has reported a write of its metadata.
            nodes: the lists and dictionaries in loose places are added to it.
        """
        if not self.fresh or self.root() is not root or not (metadata or self.has_metadata()):
            return None
        leaves = [*self.memory.read()]
        shown = self.visit.root
        held = None if self.own is None else self.own.of(root)  # it stays alive
        if shown is not None and shown.dictionary not in (None, id(held)):
            return None
        if self.visit:
            values = self.visit.read()
            if values is None:
                return None
            leaves += values
        if self._reads_variables:
            return leaves
        if self.own is not None:
            arrays = self.own.read(root)
            if arrays is None:
                return None
            leaves += arrays
        if self.places:
            arrays = self.places.read(nodes)
            if arrays is None:
                return None
            leaves += arrays
        arrays = self.read_more()
        if arrays is None:
            return None
        leaves += arrays
        return leaves if self.order is None else self.order(leaves)

    def read_more(self) -> list[Any] | None:
        """Return the leaves that are read in no other way, or None if something has changed."""
        if self.watch is not None and not self.watch.is_same():
            return None
        leaves: list[Any] = []
        for node in self.opened:
            arrays = node.read()
            if arrays is None:
                return None
            leaves += arrays
        return leaves + self.constants

    def leave(self) -> None:
        """Let the root own it no more, so that it keeps nothing alive that is gone."""
        root = self.root()
        if root is None:
            return
        with _OWNING:
            kind: Any = _classify.rule_of(root)
            owned = kind.kept_plans(root)
            for plan, known in list(owned.items()):
                if known is self:
                    owned.pop(plan, None)

    def has_metadata(self) -> bool:
        """Tell whether Variables have the metadata and classes that they had."""
        return all(map(operator.is_, map(_metadata_of, self.reporting), self.metadata)) and all(
            map(operator.is_, map(type, self.reporting), self.classes)
        )


def give(root: Any, plan: Any, segment: Segment, objects: Collection[int]) -> None:
    """Let a root own a segment as long as the plan lives, and drop those that are out of date.

    A segment that knows an object which is not below the root any more would keep it alive.

    Arguments:
        root: the owner.
        plan: for which calls.
        segment: what is known of the root.
        objects: the ids of all objects of the call.
    """
    with _OWNING:
        kind: Any = _classify.rule_of(root)
        owned = kind.kept_plans(root)
        for other, known in list(owned.items()):
            if known.ended or not ((known.ids | known.beside).issubset(objects)):
                owned.pop(other, None)
        owned[plan] = segment


def drop_others(root: Any, places: Collection[tuple[int, Any]]) -> None:
    """Drop what keeps alive what was in some places: all for whom one of them is not loose.

    Arguments:
        root: the owner.
        places: ids of objects, and keys.
    """
    with _OWNING:
        kind: Any = _classify.rule_of(root)
        owned = kind.kept_plans(root)
        for known in list(owned.values()):
            if any(place[0] in known.ids and place not in known.loose for place in places):
                known.end()
