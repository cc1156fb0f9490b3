"""A segment: what a plan knows of one Module among the arguments, and of all that it reaches.

The Module owns it, in a slot, and a plan refers to it weakly: a plan keeps no Module alive, and a
Module that refers to itself is collected with what is known of it. Nothing here refers to the
Module itself but for a weak reference, so that one without cycles is freed at once, as ever.

A segment tells whether the structure is still the same, and reads the leaves. Modules are compared
by their stamps. Nodes that cannot report a write (lists, dicts, dataclasses) are compared with
what they held, by identity, all of them in one pass in C. Any other kind is opened and compared.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, cast

import numpy as np

from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._classify import LEAF, NUMBER
from anabranch.graph._flatten import Flat
from anabranch.graph._function import is_settled
from anabranch.graph._graphdef import Entry
from anabranch.graph._kind import Cell, Kind, is_same
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._watch import Unplannable, Watch

_stamp_of: Callable[[Any], Any] = vars(_module._Identity)["_ab_stamp"].__get__
_metadata_of = operator.attrgetter("_metadata")
_get: Callable[[Any, str], Any] = object.__getattribute__
_LIVE_DICTS = frozenset({dict, OrderedDict, Counter})
_IMMUTABLE = frozenset({_kinds.TUPLE, _kinds.METHOD, _kinds.FROZEN})
_OWNING = threading.Lock()


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


class Segment:
    """What is known of one root; filled by `make_segment`, and never changed then."""

    def __init__(self, root: Any) -> None:
        self.root = weakref.ref(root)
        self.ids: set[int] = set()  # of the objects below the root
        self.objects: dict[int, Any] = {}  # the same objects, by their index in the graphdef
        self.stamped = _classify.rule_of(root) is _kinds.MODULE
        self.root_stamp = _stamp_of(root) if self.stamped else None
        self.own: tuple[type, Kind, list[Any]] | None = None  # of a root that reports nothing
        self.cell: Cell | None = None  # of Variables that cannot report a write
        self.others: list[Any] = []  # those
        self.modules: list[Any] = []
        self.stamps: list[Any] = []
        self.variables: list[Any] = []
        self.metadata: list[Any] = []
        self.classes: list[type] = []
        self.plain: list[Any] = []  # objects with attributes, their dicts and classes
        self.dicts: list[dict[str, Any]] = []
        self.plain_classes: list[type] = []
        self.live: list[Iterable[Any]] = []  # what nodes hold now, in one chain
        self.sized: list[Sized] = []  # the nodes themselves
        self.sizes: list[int] = []
        self.kept: list[bool] = []  # which of the elements of the chain are no arrays
        self.snapshot: list[Any] = []  # those
        self.opened: list[_Opened] = []
        self.functions: list[Any] = []  # static ones
        self.watch: Watch | None = None
        self.cells: list[tuple[Any, Any]] = []  # holders and keys of arrays of Modules
        self.constants: list[Any] = []  # arrays in values
        self.leaves: list[int] = []
        self.reads_more = False  # than Variables
        self.order: Any = None
        self._total, self._addresses = 0, b""
        self.lists: list[tuple[list[Any], list[Any]]] = []  # and what they held; for followers
        self._where: tuple[Any, Any] | None = None

    def finish(self) -> None:
        """Work out what is needed to compare."""
        if self.cell is not None:
            self.snapshot += [*map(self.cell.metadata, self.others), *map(type, self.others)]
            self.kept += [True] * (2 * len(self.others))
        more = (self.live, self.opened, self.functions, self.cells, self.constants)
        self.reads_more = any(map(bool, more)) or not self.stamped or self.order is not None
        self._total = len(self.kept)
        kept = np.array(self.kept, bool)
        self._addresses = _objects(self.snapshot, len(self.snapshot)).tobytes()
        if not kept.all():
            self._where = (np.flatnonzero(kept), np.flatnonzero(~kept))
        if self.functions:
            self.watch = Watch(self.functions)

    def reads_variables_and_lists(self, most: int) -> bool:
        """Tell whether that is all, and there are no more than so many lists."""
        others = self.opened or self.functions or self.cells or self.constants or self.plain
        plain = self.stamped and self.cell is None and self.order is None and not others
        lists = all(self.kept) and all(type(holder) is list for holder in self.sized)
        if not (plain and lists and len(self.sized) <= most):
            return False
        ends = [*accumulate(self.sizes)]
        held = [self.snapshot[e - n : e] for e, n in zip(ends, self.sizes, strict=True)]
        self.lists = [*zip(cast("Any", self.sized), held, strict=True)]
        return True

    def read(
        self,
        root: Any,
        armed: bool,
        metadata: bool,
    ) -> Sequence[Any] | None:
        """Return the leaves, or None if the structure has changed.

        Arguments:
            root: the argument of this call.
            armed: nothing has reported a write.
            metadata: no Variable has reported a write of its metadata.
        """
        if self.root() is not root or not (armed or self.reports_nothing(root, metadata)):
            return None
        leaves = [variable._value for variable in self.variables]
        if not self.reads_more:
            return leaves
        if self.own is not None and not self._has_own_attributes(root):
            return None
        if self.cell is not None:
            leaves += self.cell.read_all(self.others)
        if self.cells:
            try:
                leaves += [holder[key] for holder, key in self.cells]
            except KeyError:  # somebody is deleting it
                return None
        if self.live:
            arrays = self._compare_live()
            if arrays is None:
                return None
            leaves += arrays
        if self.watch is not None and not self.watch.is_same():
            return None
        for opened in self.opened:
            arrays = opened.read()
            if arrays is None:
                return None
            leaves += arrays
        if self.constants:
            leaves += self.constants
        return leaves if self.order is None else self.order(leaves)

    def _compare_live(self) -> Sequence[Any] | None:
        """Compare what cannot report a write; return the arrays found, or None."""
        if [*map(len, self.sized)] != self.sizes:
            return None
        try:
            live = chain.from_iterable(self.live)
            if self.cell is not None:
                metadata, classes = map(self.cell.metadata, self.others), map(type, self.others)
                live = chain(live, metadata, classes)
            now = _objects(live, self._total)
        except (RuntimeError, ValueError):  # somebody is writing it
            return None
        arrays: Sequence[Any] = ()
        if self._where is not None:
            kept, others = self._where
            arrays = now.take(others).tolist()
            now = now.take(kept)
            if not are_arrays(arrays):
                return None
        # the bytes of an array of objects are their addresses
        if now.tobytes() != self._addresses:
            return None
        if self.plain and not (
            all(map(operator.is_, map(_get, self.plain, repeat("__dict__")), self.dicts))
            and all(map(operator.is_, map(type, self.plain), self.plain_classes))
        ):
            return None
        return arrays

    def _has_own_attributes(self, root: Any) -> bool:
        cls, kind, attributes = self.own or (None, _kinds.OBJECT, [])
        now = _attributes_of(root, kind)
        return (
            type(root) is cls
            and len(now) == len(attributes)
            and all(map(operator.is_, now, attributes))
        )

    def reports_nothing(self, root: Any, metadata: bool) -> bool:
        """Tell whether no Module, and no Variable if asked for, has reported a write."""
        return (
            (not self.stamped or _stamp_of(root) is self.root_stamp)
            and [*map(_stamp_of, self.modules)] == self.stamps  # stamps are bare objects
            and (
                metadata
                or (
                    all(map(operator.is_, map(_metadata_of, self.variables), self.metadata))
                    and all(map(operator.is_, map(type, self.variables), self.classes))
                )
            )
        )


def _objects(objects: Iterable[Any], count: int) -> Any:
    """Return an array of objects."""
    return np.fromiter(objects, np.object_, count)


class _Maker:
    """Fills a segment from the entries that are reached from a root and from none before it."""

    def __init__(self, flat: Flat, index: int) -> None:
        self.flat, self.index = flat, index
        self.segment = Segment(flat.objects[index])
        self.of_variables: list[int] = []  # the leaves, by where they are read from
        self.of_others: list[int] = []
        self.of_cells: list[int] = []
        self.of_live: list[int] = []
        self.of_opened: list[int] = []
        self.of_constants: list[int] = []

    def add(self, index: int) -> None:
        flat, segment = self.flat, self.segment
        entry: Entry = flat.graphdef.entries[index]
        kind, _, extra, keys, edges = entry
        obj = flat.objects[index]
        if kind.identity:
            segment.ids.add(id(obj))
            if index != self.index:
                segment.objects[index] = obj
        leaves = [(i, ~edge) for i, edge in enumerate(edges) if type(edge) is int and edge < 0]
        for edge, value in zip(edges, flat.contents[index][2], strict=True):
            if type(edge) is tuple:
                if edge[0] is _static.OPAQUE:
                    self._add_opened(_kinds.OBJECT, value, _kinds.OBJECT.open(value), [])
                elif type(value) in _classify.LOOK and not (
                    is_settled(value) or any(value is f for f in segment.functions)
                ):
                    segment.functions.append(value)
        if kind is _kinds.VARIABLE:
            self._add_variable(obj, extra, leaves)
        elif kind.is_variable:
            self._add_other(kind, obj, extra, leaves)
        elif kind is _kinds.MODULE:
            self._add_module(index, obj, keys, leaves)
        elif kind.is_root:
            self._add_attributes(index, obj, kind, leaves)
        elif kind is _kinds.LIST or kind is _kinds.DEQUE:
            self._add_live(obj, (obj,), flat.contents[index][2], leaves)
        elif (kind is _kinds.DICT and type(obj) in _LIVE_DICTS) or (
            kind is _kinds.OBJECT and not _module.slot_names(type(obj))
        ):
            self._add_dict(index, obj, kind, leaves)
        elif kind in _IMMUTABLE or (kind is _kinds.PYTREE and _is_frozen(type(obj))):
            values = flat.contents[index][2]
            segment.constants += [values[i] for i, _ in leaves]
            self.of_constants += [leaf for _, leaf in leaves]
        else:
            self._add_opened(kind, obj, flat.contents[index], leaves)

    def _add_variable(self, obj: Any, extra: Any, leaves: list[tuple[int, int]]) -> None:
        if not leaves:  # it holds a container
            raise Unplannable
        metadata = obj._metadata
        if extra != _kinds.VARIABLE.open(obj)[0] or metadata is not obj._metadata:
            raise Unplannable  # somebody is writing it
        self.segment.variables.append(obj)
        self.segment.metadata.append(metadata)
        self.segment.classes.append(type(obj))
        self.of_variables.append(leaves[0][1])

    def _add_other(self, kind: Kind, obj: Any, extra: Any, leaves: list[tuple[int, int]]) -> None:
        segment = self.segment
        segment.cell = segment.cell or kind.cell
        if not leaves or segment.cell is None or segment.cell is not kind.cell:
            raise Unplannable
        metadata = segment.cell.metadata(obj)
        if extra != kind.open(obj)[0]:
            raise Unplannable  # somebody is writing it
        segment.others.append(obj)
        segment.live.append(metadata)
        segment.kept += [True] * len(metadata)
        segment.snapshot += metadata
        self.of_others.append(leaves[0][1])
        self._add_live(metadata, (metadata.values(),), [*metadata.values()], [])

    def _add_attributes(
        self, index: int, obj: Any, kind: Kind, leaves: list[tuple[int, int]]
    ) -> None:
        attributes, segment = kind.attributes(obj), self.segment
        if attributes is None or (leaves and index == self.index):
            raise Unplannable  # an array in the dictionary of the root: it would be kept alive
        if index == self.index:
            segment.own = (type(obj), kind, _attributes_of(obj, kind))
        else:
            place = {name: i for i, name in enumerate(attributes)}
            names = self.flat.contents[index][1]
            self._add_keys(obj, attributes)
            moved = [(place[names[i]], leaf) for i, leaf in leaves]
            self._add_live(attributes, (attributes.values(),), [*attributes.values()], moved)
        if not is_same(kind.open(obj), self.flat.contents[index]):
            raise Unplannable  # somebody is writing it

    def _add_keys(self, obj: Any, attributes: dict[str, Any]) -> None:
        self.segment.plain.append(obj)
        self.segment.dicts.append(attributes)
        self.segment.plain_classes.append(type(obj))
        self.segment.kept += [True] * len(attributes)
        self.segment.snapshot += attributes
        self.segment.live.append(attributes)

    def _add_module(self, index: int, obj: Any, keys: Any, leaves: list[tuple[int, int]]) -> None:
        if index != self.index:
            self.segment.modules.append(obj)
            self.segment.stamps.append(_stamp_of(obj))
        if leaves:
            if _module.slot_names(type(obj)):
                raise Unplannable
            holder = _module.attributes_of(obj)
            self.segment.cells += [(holder, keys[i]) for i, _ in leaves]
            self.of_cells += [leaf for _, leaf in leaves]

    def _add_dict(self, index: int, obj: Any, kind: Kind, leaves: list[tuple[int, int]]) -> None:
        holder = obj
        if kind is _kinds.OBJECT:
            try:
                holder = _get(obj, "__dict__")
            except AttributeError:  # it has no attributes, and cannot have any
                return
            self.segment.plain.append(obj)
            self.segment.dicts.append(holder)
            self.segment.plain_classes.append(type(obj))
        keys = list(holder)
        if not is_same(kind.open(obj), self.flat.contents[index]):
            raise Unplannable  # somebody is writing it
        self.segment.kept += [True] * len(keys)
        self.segment.snapshot += keys
        self.segment.live.append(holder)
        self._add_live(holder, (holder.values(),), self.flat.contents[index][2], leaves)

    def _add_live(
        self,
        holder: Any,
        live: Iterable[Iterable[Any]],
        values: Sequence[Any],
        leaves: list[tuple[int, int]],
    ) -> None:
        segment = self.segment
        segment.live += live
        segment.sized.append(holder)
        segment.sizes.append(len(values))
        self.of_live += [leaf for _, leaf in leaves]
        arrays = {i for i, _ in leaves}
        segment.kept += [i not in arrays for i in range(len(values))]
        segment.snapshot += [value for i, value in enumerate(values) if i not in arrays]

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
        own = [self.of_variables, self.of_others, self.of_cells, self.of_live, self.of_opened]
        numbers = [leaf for leaves in [*own, self.of_constants] for leaf in leaves]
        for leaf in numbers:
            rule = _classify.rule_of(self.flat.leaves[leaf])
            if rule is not LEAF and rule is not NUMBER:
                raise Unplannable
        segment.leaves = sorted(numbers)
        if numbers and segment.leaves[-1] - segment.leaves[0] != len(numbers) - 1:
            raise Unplannable
        if segment.leaves != numbers:
            place = {leaf: i for i, leaf in enumerate(numbers)}
            segment.order = operator.itemgetter(*[place[leaf] for leaf in segment.leaves])
        segment.finish()
        return segment


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


def give(root: Any, plan: Any, segment: Segment) -> None:
    """Let a root own a segment as long as the plan lives, and drop those that are out of date."""
    with _OWNING:
        kind: Any = _classify.rule_of(root)
        owned = kind.kept_plans(root)
        for other, known in list(owned.items()):
            if not known.reports_nothing(root, metadata=True):
                owned.pop(other, None)
        owned[plan] = segment


def _attributes_of(obj: Any, kind: Kind) -> list[Any]:
    """Return names and values of attributes, but for what leads to the plans of an object."""
    items = (kind.attributes(obj) or {}).items()
    return [*chain.from_iterable([item for item in items if item[0] not in kind.bookkeeping])]


def _is_frozen(cls: Any) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen
