"""Make a segment from what a walk has found."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from gc import get_referents
from itertools import chain
from typing import Any

import jax

from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._classify import LEAF, NUMBER, REF
from anabranch.graph._flatten import Flat
from anabranch.graph._function import is_settled
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kind import Kind, is_same, key_value
from anabranch.graph._state import State
from anabranch.graph._watchers import memory_of, watch
from anabranch.transforms._places import VALUE, Loose, Place, is_loosened, spine_of
from anabranch.transforms._segment import NOTHING, Attributes, Opened, Segment
from anabranch.transforms._trees import leaves_below, statics_of, tree_entries
from anabranch.transforms._watch import Unplannable

_get: Callable[[Any, str], Any] = object.__getattribute__
_LIVE_DICTS = frozenset({dict, Counter})  # the order of an `OrderedDict` is not that of its visit
_IMMUTABLE = frozenset({_kinds.TUPLE, _kinds.METHOD, _kinds.FROZEN})


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
        self.of_arrays: list[int] = []
        self.of_trees: list[int] = []
        self.of_loose: list[int] = []
        self.of_opened: list[int] = []
        self.of_constants: list[int] = []
        self.in_trees: set[int] = set()  # the indices of entries
        self.trees: list[Any] = []  # what was in the places with trees
        self.nodes: list[Any] = []  # the lists and dictionaries in loose places
        self._entries = flat.graphdef.entries

    @functools.cached_property
    def _occurrences(self) -> Counter[Any]:
        edges = chain.from_iterable([entry.edges for entry in self._entries])
        return Counter([self.flat.graphdef.root, *edges])

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
            self._add_variable(index, obj, extra, edges[0])
        elif kind.is_variable:
            self._add_other(kind, obj, leaves)
        elif kind is _kinds.MODULE:
            self._add_module(index, obj, keys, leaves)
        elif kind.attributes(obj) is not None:
            self._add_attributes(index, obj, kind, leaves)
        elif kind is _kinds.LIST or kind is _kinds.DEQUE:
            segment.visit.add(obj)
            self._add_places(index, obj, range(len(edges)), leaves)
        elif kind is _kinds.DICT and type(obj) in _LIVE_DICTS and _is_shown(obj):
            segment.visit.add(obj)
            self._add_places(index, obj, [*map(key_value, keys)], leaves)
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

    def _add_variable(self, index: int, obj: Any, extra: Any, edge: Edge) -> None:
        metadata = obj._metadata
        if extra != _kinds.VARIABLE.open(obj)[0] or metadata is not obj._metadata:
            raise Unplannable  # somebody is writing it
        self.segment.reporting.append(obj)
        self.segment.metadata.append(metadata)
        self.segment.classes.append(type(obj))
        if type(edge) is int and edge < 0:
            self.segment.variables.append(obj)
            self.of_variables.append(~edge)
        elif not self._add_tree(Place(obj, VALUE, (index, 0)), obj._value, may_be_loose=True):
            raise Unplannable  # it holds a container of something else than arrays

    def _add_tree(self, place: Place, tree: Any, *, may_be_loose: bool) -> bool:
        """Let a tree of arrays be read, and tell whether there is one.

        One without arrays is read where nobody tells that another one takes its place.

        Arguments:
            place: where it may be.
            tree: what was found there.
            may_be_loose: whether lists and dictionaries may be parts of it.

        Raises:
            Unplannable: it is another one than was walked.
        """
        index, position = place.at
        edge = self._entries[index].edges[position]
        if place.key is not VALUE and (type(edge) is not int or edge < 0):
            return False
        found = tree_entries(self._entries.__getitem__, edge)
        is_loose = found is None and may_be_loose
        if is_loose:
            found = tree_entries(self._entries.__getitem__, edge, self._has_one_place)
        if found is None:
            return False
        numbers = leaves_below(self._entries.__getitem__, edge)
        if not (numbers or is_loose or place.key is VALUE):
            return False
        if any(_classify.rule_of(self.flat.leaves[leaf]) is REF for leaf in numbers):
            return False
        spine = spine_of(tree)
        if [*map(id, spine.leaves)] != [id(self.flat.leaves[leaf]) for leaf in numbers]:
            raise Unplannable
        self.in_trees.update(found)
        if is_loose:
            self.nodes += spine.nodes
            self.segment.places.loose.append(Loose(place, tuple(spine.tokens)))
            self.of_loose += numbers
        else:
            self.trees.append(tree)
            self.segment.places.trees.append(place)
            self.of_trees += numbers
        return True

    def _has_one_place(self, index: int) -> bool:
        return self._occurrences[index] == 1

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
            self.of_own += [leaf for _, leaf in leaves]
            trees = self._add_places(index, attributes, names, [])
            left_out = [*arrays, *[every.index(names[i]) for i in trees]]
            left_out += [every.index(name) for name in every if name in kind.bookkeeping]
            values = [None if i in left_out else x for i, x in enumerate(attributes.values())]
            self.segment.own = Attributes(
                type(obj), kind, every, values, arrays, left_out, kind.records_names(obj)
            )
        else:
            records = kind.records_names(obj)
            self.segment.visit.add_object(obj, attributes, records_names=records)
            self._add_places(index, attributes, [*map(key_value, names)], leaves)

    def _add_places(
        self, index: int, holder: Any, keys: Sequence[Any], leaves: list[tuple[int, int]]
    ) -> list[int]:
        """Let arrays and trees of arrays be read, and return the positions of the trees.

        Arguments:
            index: of the object.
            holder: what its attributes or elements are in.
            keys: of them.
            leaves: positions and leaves of those arrays that are to be read.
        """
        arrays, trees = dict(leaves), list[int]()
        obj, values = self.flat.objects[index], self.flat.contents[index][2]
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            place = Place(holder, key, (index, i))
            if i in arrays:
                self.segment.places.arrays.append(place)
                self.of_arrays.append(arrays[i])
            elif self._add_tree(place, value, may_be_loose=is_loosened(obj, key)):
                trees.append(i)
                self.segment.visit.leave_out(value)
        return trees

    def _add_module(self, index: int, obj: Any, keys: Any, leaves: list[tuple[int, int]]) -> None:
        self.modules.append(obj)
        if not _module.slot_names(type(obj)):
            self._add_places(index, _module.attributes_of(obj), keys, leaves)
        elif leaves:
            raise Unplannable

    def _add_object(self, index: int, obj: Any, leaves: list[tuple[int, int]]) -> None:
        try:
            attributes = _get(obj, "__dict__")
        except AttributeError:  # it has no attributes, and cannot have any
            return
        self.segment.visit.add_object(obj, attributes)
        self._add_places(index, attributes, self.flat.contents[index][1], leaves)

    def _add_opened(
        self, kind: Kind, obj: Any, contents: Any, leaves: list[tuple[int, int]]
    ) -> None:
        extra, keys, values = contents
        arrays = [i for i, _ in leaves]
        kept = [(i, value) for i, value in enumerate(values) if i not in arrays]
        self.segment.opened.append(Opened(kind, obj, extra, keys, kept, arrays, len(values)))
        self.of_opened += [leaf for _, leaf in leaves]

    def finish(self) -> Segment:
        segment = self.segment
        own = [self.of_variables, self.of_others, self.of_own]
        placed = [self.of_arrays, self.of_trees, self.of_loose]
        more = [self.of_opened, self.of_constants]
        numbers = [leaf for leaves in [*own, *placed, *more] for leaf in leaves]
        for leaf in numbers:
            rule = _classify.rule_of(self.flat.leaves[leaf])
            if rule not in (LEAF, NUMBER, REF):
                raise Unplannable
        segment.numbers, segment.leaves = numbers, sorted(numbers)
        if segment.leaves != numbers:
            place = {leaf: i for i, leaf in enumerate(numbers)}
            segment.order = operator.itemgetter(*[place[leaf] for leaf in segment.leaves])
        segment.places.treedef = treedef = jax.tree.structure(self.trees)
        segment.places.statics = statics_of(treedef)
        segment.loose = frozenset(
            [self._name_of(*loose.place.at) for loose in segment.places.loose]
        )
        segment.finish()
        watch(self.modules, segment)
        segment.memory = memory_of(segment.variables) if segment.variables else NOTHING
        for index in self.unwatched:  # only now: what is remembered is what the walk found
            self._compare_again(index)
        return segment

    def _name_of(self, index: int, position: int) -> tuple[int, Any]:
        return id(self.flat.objects[index]), self._entries[index].keys[position]

    def _compare_again(self, index: int) -> None:
        """Raise if somebody has written a node since the walk; values of Variables do not count."""
        flat = self.flat
        kind, then = flat.graphdef.entries[index].kind, flat.contents[index]
        now = kind.open(flat.objects[index])
        if now[0] != then[0] or not (kind.is_variable or is_same(now, then)):
            raise Unplannable


def make_segment(flat: Flat, index: int, seen: set[int]) -> tuple[Segment, list[Any]]:
    """Return what is known of a root, and the lists and dictionaries in its loose places.

    Arguments:
        flat: the call.
        index: of the root.
        seen: the entries that earlier roots have reached; those of this one are added.

    Raises:
        Unplannable: it holds something that a plan cannot follow.
    """
    entries = flat.graphdef.entries
    pending, own, others = [index], {index}, set[int]()
    while pending:
        at = pending.pop()
        for edge in entries[at].edges:
            if type(edge) is not int or edge < 0 or edge in own or edge in others:
                continue
            (others if edge in seen else own).add(edge)
            if edge in own or not entries[edge].kind.identity:
                pending.append(edge)
    seen |= own
    maker = _Maker(flat, index)
    maker.segment.beside.update([id(flat.objects[at]) for at in others])
    for at in sorted(own):  # as the walk met them, so that leaves need no other order
        maker.add(at)
    return maker.finish(), maker.nodes


def _is_shown(obj: dict[Any, Any]) -> bool:
    """Tell whether a visit shows what a dictionary holds; an object may keep it in its place."""
    return len(get_referents(obj)) >= len(obj)


def _is_immutable(obj: Any) -> bool:
    parameters = getattr(type(obj), "__dataclass_params__", None)
    return isinstance(obj, (tuple, State)) or (parameters is not None and parameters.frozen)
