"""What a plan does after a call when the function wrote values and nothing else.

A report says what was written, for any call of the compiled function. Most often those are values
of Variables, and arrays, or trees of arrays, in the places of others. Then it is worked out once
where each of them goes; what remains for a call is to look whether the places still hold what was
read, to write, and to build the result. A report that says more is played by `finish`, which can do
everything.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple, cast

import jax

from anabranch.errors import CapturedWriteError, ConcurrentWriteError
from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._build import picker
from anabranch.graph._delta import changed_meanwhile
from anabranch.graph._flatten import namer
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._turn import COMMITS, in_turn
from anabranch.graph._watchers import forget_all
from anabranch.transforms._access import Access
from anabranch.transforms._box import Report
from anabranch.transforms._result import Resolve, Result, Values, entries_after
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._trees import Entries, are_equal, leaves_below, tree_entries
from anabranch.transforms._watch import Unplannable

_ABSENT = object()
_HOLDERS = frozenset({_kinds.MODULE, _kinds.LIST, _kinds.DEQUE, _kinds.DICT, _kinds.OBJECT})
PLAIN_KEYS = frozenset({str, int, bool, bytes, float, type(None)})
"""Types of keys that nothing of the user runs for when they are hashed."""
_call: Callable[..., Any] = operator.call
_get: Callable[[Any, str], Any] = object.__getattribute__
_set: Callable[[Any, str, Any], None] = object.__setattr__


class _Write(NamedTuple):
    """One value that is written."""

    entry: int  # of the object
    position: int
    leaf: int  # the one that it replaces
    source: int  # leaf `i`, or output `~i`


class Put(NamedTuple):
    """An array or a tree of arrays that is put in the place of another one."""

    entry: int  # of the object
    position: int
    old: int  # the edge to the other one
    new: int  # the edge to it
    has_containers: bool  # lists and dictionaries are parts of it


class Writer:
    """The writes and the result of one report.

    Arguments:
        graphdef: of the call.
        report: what the function did.
        resolve: see `Resolve`.
        is_loose: from the index of an object, and a position in it, to whether a call reads it as
            an argument; only there new lists and dictionaries may be put.

    Raises:
        Unplannable: it did more than write values.
    """

    def __init__(
        self,
        graphdef: GraphDef,
        report: Report,
        resolve: Resolve,
        is_loose: Callable[[int, int], bool],
    ) -> None:
        self.graphdef = graphdef
        variables, self.puts = _writes_of(graphdef, report, is_loose)
        self.indices = [write.entry for write in variables]
        self.access = Access([graphdef.entries[write.entry].kind for write in variables])
        self.replaced = [write.leaf for write in variables]
        self.sources = [write.source for write in variables]
        self._old, self._new = picker(self.replaced), Values(self.sources)
        self.writes = bool(variables or self.puts)
        self.result = result = Result(graphdef, report, report.delta.root)
        self.make_result: Callable[[Sequence[Any], Sequence[Any], Any], Any] = result.make
        for index in result.objects:
            resolve(index)
        self._prepare_puts(report)
        for index in {*self.indices, *self.holders}:
            if not _is_owned(resolve(index)):
                raise Unplannable  # `finish` says why
        keys = {*map(type, self.keys)}
        if len(self.keys) + len(self.indices) > 1 and not keys <= PLAIN_KEYS:
            raise Unplannable  # what hashes a key may be interrupted

    def _prepare_puts(self, report: Report) -> None:
        graphdef, puts = self.graphdef, self.puts
        self.holders = [*{put.entry: None for put in puts}]
        """The indices of the objects in which something is put."""
        self.keys = [self._key(put) for put in puts]
        self.holder_functions = [_holder_function(graphdef.entries[i]) for i in self.holders]
        """From each of them to what its attributes or elements are in; None if that is itself."""
        at = {index: i for i, index in enumerate(self.holders)}
        self._pick = picker([at[put.entry] for put in puts])
        of_variables = [graphdef.entries[put.entry].kind is _kinds.VARIABLE for put in puts]
        self._getters = [_get if is_one else operator.getitem for is_one in of_variables]
        self._setters = [_set if is_one else operator.setitem for is_one in of_variables]
        self.are_arrays = all(put.old < 0 for put in puts)
        replaced = [_sources_of(graphdef, report, put.old) for put in puts]
        self._old_leaves = picker([*chain.from_iterable(replaced)])
        self.placed = _placed(graphdef, report, puts)
        """What is put, a tuple."""
        self.passed = [source for source in self.placed.leaves if source >= 0]
        """The leaves among it, which must not be numbers."""
        self._cells = [
            at[put.entry] for put, is_one in zip(puts, of_variables, strict=True) if is_one
        ]
        self._told = [
            (at[put.entry], key)
            for put, key in zip(puts, self.keys, strict=True)
            if graphdef.entries[put.entry].kind is _kinds.MODULE and put.has_containers
        ]
        """The attributes of Modules, given as positions in `holders`, that get containers."""
        self.tells = bool(self._told or self._cells)

    def write(
        self,
        variables: Sequence[Any],
        objects: Sequence[Any],
        leaves: Sequence[Any],
        outputs: Sequence[Any],
        placed: Sequence[Any],
    ) -> bool:
        """Write, all or nothing; return False if that takes more than this.

        Arguments:
            variables: those of `indices`.
            objects: those of `holders`.
            leaves: what was read.
            outputs: what the function returned.
            placed: what is put in the places, made by `placed`.

        Raises:
            ConcurrentWriteError: a place does not hold any more what was read.
        """
        held, values = self._old(leaves), self._new(leaves, outputs)
        if self.passed and not are_arrays([leaves[i] for i in self.passed]):
            return False
        self._write(variables, held, values, objects, leaves, placed)
        return True

    @in_turn
    def _write(
        self,
        variables: Sequence[Any],
        held: Sequence[Any],
        values: Sequence[Any],
        objects: Sequence[Any],
        leaves: Sequence[Any],
        placed: Sequence[Any],
    ) -> None:
        holders = self.places(objects)
        before = self._holding(holders, leaves) if self.keys else ()
        forget_all(self.access.watched(variables))
        self.tell(objects)
        places = holders, before, placed
        same, writing = self.replacing(variables, held, values, *places)
        COMMITS.begun += 1
        try:
            # nothing can come between: each write returns None
            are_others = False in same or True in writing
        except BaseException as error:
            self.undo(variables, held, values, *places)
            if not isinstance(error, LookupError):
                raise
            are_others = True  # there is no such place any more
        finally:
            self.tell(objects)
        if are_others:
            self.check(holders, before)
            self.complain(variables, held)

    def places(self, objects: Sequence[Any]) -> Sequence[Any]:
        """Return what each of the places is in."""
        return self._pick(
            [
                obj if function is None else function(obj)
                for function, obj in zip(self.holder_functions, objects, strict=True)
            ]
        )

    def check(self, holders: Sequence[Any], before: Sequence[Any]) -> None:
        """Raise `ConcurrentWriteError` unless each place holds what it held before."""
        try:
            same = all(map(operator.is_, map(_call, self._getters, holders, self.keys), before))
        except LookupError:
            same = False
        if not same:
            for put, then, *place in zip(
                self.puts, before, self._getters, holders, self.keys, strict=True
            ):
                if _read(*place) is not then:
                    raise self.changed(put.entry)

    def replacing(
        self,
        variables: Sequence[Any],
        old: Sequence[Any],
        new: Sequence[Any],
        holders: Sequence[Any],
        before: Sequence[Any],
        placed: Sequence[Any],
    ) -> tuple[Iterator[Any], Iterator[Any]]:
        """Return what `Access.replacing` does, for Variables and then for places."""
        same, writing = self.access.replacing(variables, old, new)
        now = map(_call, self._getters, holders, self.keys)
        putting = map(_call, self._setters, holders, self.keys, placed)
        return chain(same, map(operator.is_, now, before)), chain(writing, putting)

    def undo(
        self,
        variables: Sequence[Any],
        old: Sequence[Any],
        new: Sequence[Any],
        holders: Sequence[Any],
        before: Sequence[Any],
        placed: Sequence[Any],
    ) -> None:
        """Put back what was there, wherever what was to be written is by now."""
        ours = [*map(operator.is_, self.access.read(variables), new)]
        self.access.write([*compress(variables, ours)], [*compress(old, ours)])
        for read, write, holder, key, then, put in zip(
            self._getters, self._setters, holders, self.keys, before, placed, strict=True
        ):
            if _read(read, holder, key) is put:
                write(holder, key, then)

    def tell(self, objects: Sequence[Any]) -> None:
        """Tell those who know what is replaced; it is done before and after."""
        forget_all([objects[i] for i in self._cells])
        for i, name in self._told:
            _module.tell_of_write(objects[i], name)

    def _holding(self, holders: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Return what is in the places; raise if these are not the arrays that were read."""
        now = [*map(_read, self._getters, holders, self.keys)]
        then, at = self._old_leaves(leaves), 0
        for put, x in zip(self.puts, now, strict=True):
            found = [x] if put.old < 0 else jax.tree.leaves(x)
            held = then[at : at + len(found)]
            at += len(found)
            if len(held) < len(found) or not all(map(operator.is_, found, held)):
                raise self.changed(put.entry)
        if at < len(then):
            raise self.changed(self.puts[-1].entry)
        return now

    def _key(self, put: Put) -> Any:
        """Return the name or number of the place that is written."""
        entry = self.graphdef.entries[put.entry]
        if entry.kind is _kinds.VARIABLE:
            return "_value"
        return key_of(entry, put.position)

    def complain(self, variables: Sequence[Any], old: Sequence[Any]) -> None:
        """Raise for the first Variable that does not hold any more what was read."""
        now = self.access.read(variables)
        for index, held, value in zip(self.indices, now, old, strict=True):
            if held is not value:
                raise self.changed(index)
        raise self.changed((*self.indices, *self.holders)[0])  # it holds that again by now

    def changed(self, index: int) -> ConcurrentWriteError:
        """Return the error for an object that somebody else has changed."""
        cls = self.graphdef.entries[index].cls
        return changed_meanwhile(namer(self.graphdef)(index), cls)


def _placed(graphdef: GraphDef, report: Report, puts: Sequence[Put]) -> Result:
    """Return what builds the tuple of what is put."""
    delta = report.delta
    edges = tuple([put.new for put in puts])
    entry = Entry(_kinds.TUPLE, tuple, None, range(len(edges)), edges)
    together = delta._replace(new=(*delta.new, entry))
    root = len(graphdef.entries) + len(delta.new)
    return Result(graphdef, Report(together, report.sources), root, of_values=True)


def _sources_of(graphdef: GraphDef, report: Report, edge: int) -> Sequence[int]:
    """Return the numbers of the leaves of a tree, in the order of JAX."""
    if edge < 0:
        return [~edge]
    return Result(graphdef, report, edge, of_values=True).as_tree()[1]


def _is_owned(obj: Any) -> bool:
    """Tell whether the current trace may write an object."""
    kind: Any = _classify.rule_of(obj)
    try:
        kind.check_writable(obj)
    except CapturedWriteError:
        return False
    return True


def key_of(entry: Entry, position: int) -> Any:
    """Return the name or number of a place in an object."""
    key = entry.keys[position]
    return _kinds.key_value(key) if entry.kind is _kinds.DICT else key


def _holder_function(entry: Entry) -> Callable[[Any], Any] | None:
    """Return a function from an object to what its attributes are in; elements are in itself."""
    kind: Any = entry.kind
    if kind is _kinds.MODULE:
        return _module.attributes_of
    if kind is _kinds.OBJECT:
        return kind._attributes
    return kind.attributes if kind.is_root else None


def _read(getter: Callable[[Any, Any], Any], holder: Any, key: Any) -> Any:
    """Return what is in a place."""
    try:
        return getter(holder, key)
    except LookupError:
        return _ABSENT


def _writes_of(
    graphdef: GraphDef, report: Report, is_loose: Callable[[int, int], bool]
) -> tuple[list[_Write], list[Put]]:
    """Return what a report writes to Variables, and what it puts in other places."""
    variables: list[_Write] = []
    puts: list[Put] = []
    trees = _Trees(graphdef, report)
    for index, entry in report.delta.changed:
        before = graphdef.entries[index]
        if entry[:4] != before[:4]:
            raise Unplannable
        for position, (old, new) in enumerate(zip(before.edges, entry.edges, strict=True)):
            has_containers = False
            if type(new) is int and new < 0 and type(old) is int and old < 0:
                source = report.sources[~new]
                if source == ~old:
                    continue
                if entry.kind.is_variable:
                    variables.append(_Write(index, position, ~old, source))
                    continue
            elif new in (old, (_static.LOCATED, index, position)) or trees.are_equal(old, new):
                continue
            elif not trees.are_values(old, new):
                if not (trees.are_trees(old, new) and is_loose(index, position)):
                    raise Unplannable
                has_containers = True
            if not (entry.kind is _kinds.VARIABLE or _is_holder(entry)):
                raise Unplannable
            edges = cast("tuple[int, int]", (old, new))
            puts.append(Put(index, position, *edges, has_containers))
    return variables, puts


def places_of_containers(graphdef: GraphDef, report: Report) -> list[tuple[int, int]]:
    """Return where a function puts new lists or dictionaries of arrays in the place of others.

    Returns:
        The indices of objects, and positions in them.
    """
    trees, entries = _Trees(graphdef, report), graphdef.entries
    return [
        (index, position)
        for index, entry in report.delta.changed
        if entry[:4] == entries[index][:4]
        for position, edges in enumerate(zip(entries[index].edges, entry.edges, strict=True))
        if edges[0] != edges[1] and trees.are_trees(*edges)
    ]


class _Trees:
    """Tells whether trees of arrays are put in the place of others.

    New lists and dictionaries may be parts of them, if they have no other place, too.
    """

    def __init__(self, graphdef: GraphDef, report: Report) -> None:
        self._num_known, self._delta = len(graphdef.entries), report.delta
        self._before, self._after = graphdef.entries.__getitem__, entries_after(graphdef, report)

    @functools.cached_property
    def _places(self) -> Counter[Edge]:
        """How often each edge stands in what the function left; few calls need to know."""
        entries = (*self._delta.new, *[entry for _, entry in self._delta.changed])
        return Counter([self._delta.root, *chain.from_iterable([e.edges for e in entries])])

    def are_equal(self, old: Edge, new: Edge) -> bool:
        """Tell whether they hold no arrays, and the same besides."""
        return are_equal(self._before, old, self._after, new)

    def are_values(self, old: Edge, new: Edge) -> bool:
        """Tell whether both consist of values, arrays among them."""
        return all(
            self._is_value(*side) and leaves_below(*side)
            for side in ((self._before, old), (self._after, new))
        )

    def are_trees(self, old: Edge, new: Edge) -> bool:
        """Tell whether both are trees, and lists or dictionaries are parts of them."""
        return (
            type(old) is type(new) is int
            and tree_entries(self._before, old, lambda _: True) is not None
            and tree_entries(self._after, new, self._is_new) is not None
            and not (self._is_value(self._before, old) and self._is_value(self._after, new))
        )

    @staticmethod
    def _is_value(entries: Entries, edge: Edge) -> bool:
        return tree_entries(entries, edge) is not None

    def _is_new(self, index: int) -> bool:
        return index >= self._num_known and self._places[index] == 1


def _is_holder(entry: Entry) -> bool:
    """Tell whether arrays of an object are elements, or attributes in a dictionary."""
    if entry.kind in (_kinds.MODULE, _kinds.OBJECT) and _module.slot_names(entry.cls):
        return False
    return entry.kind.is_root or entry.kind in _HOLDERS
