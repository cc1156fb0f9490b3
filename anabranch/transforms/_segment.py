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

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._classify import LEAF, NUMBER, REF
from anabranch.graph._flatten import Flat
from anabranch.graph._function import is_settled
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kind import Kind, is_same, key_value
from anabranch.graph._state import State
from anabranch.graph._watchers import Memory, Watcher, memory_of, watch
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._trees import TreePlace, leaves_below, tree_entries
from anabranch.transforms._visit import Visit
from anabranch.transforms._watch import Unplannable, Watch

_metadata_of = operator.attrgetter("_metadata")
_get: Callable[[Any, str], Any] = object.__getattribute__
_LIVE_DICTS = frozenset({dict, Counter})  # the order of an `OrderedDict` is not that of its visit
_IMMUTABLE = frozenset({_kinds.TUPLE, _kinds.METHOD, _kinds.FROZEN})
_FEW = 8  # lists that are compared one by one; more are compared in one pass
_OWNING = threading.Lock()


_NOTHING = Memory(())


class _Opened(NamedTuple):
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

    def read(self, root: Any) -> list[Any] | None:
        """Return the arrays in it, or None if it has changed."""
        attributes: Any = self.kind.attributes(root)
        if type(root) is not self.cls or not (self.records_names or [*attributes] == self.names):
            return None
        now = [*attributes.values()]
        arrays = [now[i] for i in self.arrays]
        for i in self.left_out:
            now[i] = None
        same = len(now) == len(self.values) and all(map(operator.is_, now, self.values))
        return arrays if same and (not arrays or are_arrays(arrays)) else None


class Segment(Watcher):
    """What is known of one root; filled by `make_segment`, and never changed then."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = weakref.ref(root)
        self.ids: set[int] = set()  # of the objects below the root
        self.objects: dict[int, Any] = {}  # the same objects, by their index in the graphdef
        self.variables: list[Any] = []  # that hold an array each
        self.memory = _NOTHING  # of what they hold
        self.reporting: list[Any] = []  # these, and those that hold trees of arrays
        self.metadata: list[Any] = []  # of those
        self.classes: list[type] = []
        self.own: Attributes | None = None  # of a root that cannot report a write
        self.visit = Visit()  # of Variables and other nodes that cannot
        self.places: list[tuple[Any, Any]] = []  # holders and keys of arrays
        self.trees: list[TreePlace] = []
        self.opened: list[_Opened] = []
        self.functions: list[Any] = []  # static ones
        self.watch: Watch | None = None
        self.constants: list[Any] = []  # arrays in values
        self.leaves: list[int] = []
        self.order: Any = None
        self.lists: list[tuple[list[Any], list[Any]]] | None = None
        """Lists and what they hold, if nothing else but Variables has to be looked at."""
        self.attributes: Attributes | None = None
        """Those of the root, if nothing else but the visit has to be looked at."""

    def finish(self) -> None:
        """Work out what is needed to compare."""
        self.visit.finish()
        if self.functions:
            self.watch = Watch(self.functions)
        more = self.places, self.trees, self.opened, self.functions, self.constants
        reads_more = any(map(bool, (*more, self.order)))
        self._reads_variables = not reads_more and self.own is None
        if self._reads_variables:
            self.lists = self.visit.lists(_FEW)
        if not (reads_more or self.variables or self.own is None or self.own.arrays):
            self.attributes = self.own

    def read(self, root: Any, metadata: bool) -> Sequence[Any] | None:
        """Return the leaves, or None if the structure has changed.

        Arguments:
            root: the argument of this call.
            metadata: no Variable has reported a write of its metadata.
        """
        if not self.fresh or self.root() is not root or not (metadata or self.has_metadata()):
            return None
        leaves = [*self.memory.read()]
        if self.visit:
            values = self.visit.read()
            if values is None:
                return None
            leaves += values
        if self._reads_variables:
            return leaves
        return self._read_more(root, leaves)

    def _read_more(self, root: Any, leaves: list[Any]) -> Sequence[Any] | None:
        if self.own is not None:
            arrays = self.own.read(root)
            if arrays is None:
                return None
            leaves += arrays
        if self.places:
            try:
                arrays = [holder[key] for holder, key in self.places]
            except LookupError:  # somebody is deleting one
                return None
            if not are_arrays(arrays):
                return None
            leaves += arrays
        if self.watch is not None and not self.watch.is_same():
            return None
        for node in (*self.trees, *self.opened):
            arrays = _read(node)
            if arrays is None:
                return None
            leaves += arrays
        leaves += self.constants
        return leaves if self.order is None else self.order(leaves)

    def has_metadata(self) -> bool:
        """Tell whether Variables have the metadata and classes that they had."""
        return all(map(operator.is_, map(_metadata_of, self.reporting), self.metadata)) and all(
            map(operator.is_, map(type, self.reporting), self.classes)
        )


class _Maker:
    """Fills a segment from the entries that are reached from a root and from none before it."""

    def __init__(self, flat: Flat, index: int) -> None:
        self.flat, self.index = flat, index
        self.segment = Segment(flat.objects[index])
        self.modules: list[Any] = []
        self.unwatched: list[int] = []  # the indices of nodes that cannot report a write
        self.of_variables: list[int] = []  # the leaves, by where they are read from
        self.of_others: list[int] = []
        self.of_own: list[int] = []
        self.of_places: list[int] = []
        self.of_trees: list[int] = []
        self.of_opened: list[int] = []
        self.in_trees: set[int] = set()  # the indices of entries
        self.of_constants: list[int] = []

    def add(self, index: int) -> None:
        if index in self.in_trees:
            return
        flat, segment = self.flat, self.segment
        entry: Entry = flat.graphdef.entries[index]
        kind, _, extra, keys, edges = entry
        obj = flat.objects[index]
        if kind.identity:
            segment.ids.add(id(obj))
            if index != self.index:
                segment.objects[index] = obj
        leaves = [(i, ~edge) for i, edge in enumerate(edges) if type(edge) is int and edge < 0]
        if not kind.is_variable:
            leaves = self._without_refs(leaves)
        if kind.identity and kind is not _kinds.MODULE and kind is not _kinds.VARIABLE:
            self.unwatched.append(index)
        for edge, value in zip(edges, flat.contents[index][2], strict=True):
            if type(edge) is tuple:
                if edge[0] is _static.OPAQUE:
                    self._add_opened(_kinds.OBJECT, value, _kinds.OBJECT.open(value), [])
                elif type(value) in _classify.LOOK and not (
                    is_settled(value) or any(value is f for f in segment.functions)
                ):
                    segment.functions.append(value)
        if kind is _kinds.VARIABLE:
            self._add_variable(obj, extra, edges[0])
        elif kind.is_variable:
            self._add_other(kind, obj, leaves)
        elif kind is _kinds.MODULE:
            self._add_module(obj, keys, edges, leaves)
        elif kind.attributes(obj) is not None:
            self._add_attributes(index, obj, kind, leaves)
        elif kind is _kinds.LIST or kind is _kinds.DEQUE:
            segment.visit.add(obj)
            self._add_places(obj, range(len(edges)), leaves)
        elif kind is _kinds.DICT and type(obj) in _LIVE_DICTS:
            segment.visit.add(obj)
            self._add_places(obj, [*map(key_value, keys)], leaves)
        elif kind is _kinds.OBJECT and not _module.slot_names(type(obj)):
            self._add_object(index, obj, leaves)
        elif kind in _IMMUTABLE or (kind is _kinds.PYTREE and _is_immutable(obj)):
            values = flat.contents[index][2]
            segment.constants += [values[i] for i, _ in leaves]
            self.of_constants += [leaf for _, leaf in leaves]
        else:
            self._add_opened(kind, obj, flat.contents[index], leaves)

    def _without_refs(self, leaves: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take references to mutable arrays, which are compared like objects, for constants."""
        every = self.flat.leaves
        refs = [leaf for _, leaf in leaves if _classify.rule_of(every[leaf]) is REF]
        self.segment.constants += [every[leaf] for leaf in refs]
        self.of_constants += refs
        return [(i, leaf) for i, leaf in leaves if leaf not in refs] if refs else leaves

    def _add_variable(self, obj: Any, extra: Any, edge: Edge) -> None:
        metadata = obj._metadata
        if extra != _kinds.VARIABLE.open(obj)[0] or metadata is not obj._metadata:
            raise Unplannable  # somebody is writing it
        self.segment.reporting.append(obj)
        self.segment.metadata.append(metadata)
        self.segment.classes.append(type(obj))
        if type(edge) is int and edge < 0:
            self.segment.variables.append(obj)
            self.of_variables.append(~edge)
        elif not self._add_tree(obj, None, edge):
            raise Unplannable  # it holds a container

    def _add_tree(self, holder: Any, key: Any, edge: Edge) -> bool:
        """Tell whether there is a tree of arrays in a place, and read it as one if there is."""
        entries = self.flat.graphdef.entries.__getitem__
        found = tree_entries(entries, edge)
        if found is None or type(edge) is not int or not self.in_trees.isdisjoint(found):
            return False
        place = TreePlace(holder, key, None)
        arrays, treedef = jax.tree.flatten(place.get())
        leaves = leaves_below(entries, edge)
        if [*map(id, arrays)] != [id(self.flat.leaves[leaf]) for leaf in leaves]:
            raise Unplannable  # it is another one than was walked
        self.segment.trees.append(place._replace(treedef=treedef))
        self.in_trees.update(found)
        self.of_trees += leaves
        return True

    def _add_other(self, kind: Kind, obj: Any, leaves: list[tuple[int, int]]) -> None:
        if not leaves:
            raise Unplannable
        self.segment.visit.add_variable(kind.cell, obj)
        self.of_others.append(leaves[0][1])

    def _add_attributes(
        self, index: int, obj: Any, kind: Kind, leaves: list[tuple[int, int]]
    ) -> None:
        attributes = kind.attributes(obj)
        names = self.flat.contents[index][1]
        if attributes is None:
            raise Unplannable
        if index == self.index:
            every = [*attributes]
            arrays = [every.index(names[i]) for i, _ in leaves]
            left_out = [*arrays, *[every.index(name) for name in every if name in kind.bookkeeping]]
            values = [None if i in left_out else x for i, x in enumerate(attributes.values())]
            self.segment.own = Attributes(
                type(obj), kind, every, values, arrays, left_out, kind.records_names(obj)
            )
            self.of_own += [leaf for _, leaf in leaves]
        else:
            self.segment.visit.add(obj, attributes, records_names=kind.records_names(obj))
            self._add_places(attributes, [*map(key_value, names)], leaves)

    def _add_places(self, holder: Any, keys: Any, leaves: list[tuple[int, int]]) -> None:
        self.segment.places += [(holder, keys[i]) for i, _ in leaves]
        self.of_places += [leaf for _, leaf in leaves]

    def _add_module(
        self, obj: Any, keys: Any, edges: Sequence[Edge], leaves: list[tuple[int, int]]
    ) -> None:
        self.modules.append(obj)
        if not _module.slot_names(type(obj)):
            for key, edge in zip(keys, edges, strict=True):
                self._add_tree(_module.attributes_of(obj), key, edge)
        if leaves:
            if _module.slot_names(type(obj)):
                raise Unplannable
            self._add_places(_module.attributes_of(obj), keys, leaves)

    def _add_object(self, index: int, obj: Any, leaves: list[tuple[int, int]]) -> None:
        try:
            attributes = _get(obj, "__dict__")
        except AttributeError:  # it has no attributes, and cannot have any
            return
        self.segment.visit.add(obj, attributes)
        self._add_places(attributes, self.flat.contents[index][1], leaves)

    def _add_opened(
        self, kind: Kind, obj: Any, contents: Any, leaves: list[tuple[int, int]]
    ) -> None:
        extra, keys, values = contents
        arrays = [i for i, _ in leaves]
        kept = [(i, value) for i, value in enumerate(values) if i not in arrays]
        self.segment.opened.append(_Opened(kind, obj, extra, keys, kept, arrays, len(values)))
        self.of_opened += [leaf for _, leaf in leaves]

    def finish(self) -> Segment:
        segment = self.segment
        own = [self.of_variables, self.of_others, self.of_own, self.of_places]
        more = [self.of_trees, self.of_opened, self.of_constants]
        numbers = [leaf for leaves in [*own, *more] for leaf in leaves]
        for leaf in numbers:
            rule = _classify.rule_of(self.flat.leaves[leaf])
            if rule not in (LEAF, NUMBER, REF):
                raise Unplannable
        segment.leaves = sorted(numbers)
        if numbers and segment.leaves[-1] - segment.leaves[0] != len(numbers) - 1:
            raise Unplannable
        if segment.leaves != numbers:
            place = {leaf: i for i, leaf in enumerate(numbers)}
            segment.order = operator.itemgetter(*[place[leaf] for leaf in segment.leaves])
        segment.finish()
        watch(self.modules, segment)
        segment.memory = memory_of(segment.variables) if segment.variables else _NOTHING
        for index in self.unwatched:  # only now: what is remembered is what the walk found
            self._compare_again(index)
        return segment

    def _compare_again(self, index: int) -> None:
        """Raise if somebody has written a node since the walk; values of Variables do not count."""
        flat = self.flat
        kind, then = flat.graphdef.entries[index].kind, flat.contents[index]
        now = kind.open(flat.objects[index])
        if now[0] != then[0] or not (kind.is_variable or is_same(now, then)):
            raise Unplannable


def make_segment(flat: Flat, index: int, seen: set[int]) -> Segment:
    """Return what is known of a root.

    Arguments:
        flat: the call.
        index: of the root.
        seen: the entries that earlier roots have reached; those of this one are added.

    Raises:
        Unplannable: it holds something that a plan cannot follow.
    """
    entries = flat.graphdef.entries
    pending, reached = [index], [index]
    seen.add(index)
    while pending:
        for edge in entries[pending.pop()].edges:
            if type(edge) is int and edge >= 0 and edge not in seen:
                seen.add(edge)
                pending.append(edge)
                reached.append(edge)
    maker = _Maker(flat, index)
    for at in sorted(reached):  # as the walk met them, so that leaves need no other order
        maker.add(at)
    return maker.finish()


def _read(node: TreePlace | _Opened) -> list[Any] | None:
    try:
        return node.read()
    except KeyError:  # somebody is deleting it
        return None


def give(root: Any, plan: Any, segment: Segment) -> None:
    """Let a root own a segment as long as the plan lives, and drop those that are out of date."""
    with _OWNING:
        kind: Any = _classify.rule_of(root)
        owned = kind.kept_plans(root)
        for other, known in list(owned.items()):
            if not known.fresh:
                owned.pop(other, None)
        owned[plan] = segment


def _is_immutable(obj: Any) -> bool:
    parameters = getattr(type(obj), "__dataclass_params__", None)
    return isinstance(obj, (tuple, State)) or (parameters is not None and parameters.frozen)
