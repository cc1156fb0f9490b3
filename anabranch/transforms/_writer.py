"""What a plan does after a call when the function wrote values and nothing else.

A report says what was written, for any call of the compiled function. Most often those are values
of Variables, and arrays in the places of arrays. Then it is worked out once where each of them
goes; what remains for a call is to look whether the places still hold what was read, to write, and
to build the result. A report that says more is played by `finish`, which can do everything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax

from anabranch.errors import CapturedWriteError, ConcurrentWriteError
from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._delta import changed_meanwhile
from anabranch.graph._flatten import COMMITS, namer
from anabranch.graph._graphdef import Entry, GraphDef
from anabranch.graph._watchers import forget_all
from anabranch.transforms._access import Access
from anabranch.transforms._box import Report
from anabranch.transforms._result import Resolve, Result, Values, entries_after, picker
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._trees import TreePlace, leaves_below, tree_entries
from anabranch.transforms._watch import Unplannable

_ABSENT = object()
_HOLDERS = frozenset({_kinds.MODULE, _kinds.LIST, _kinds.DEQUE, _kinds.DICT, _kinds.OBJECT})


class _Write(NamedTuple):
    """One value that is written."""

    entry: int  # of the object
    position: int
    leaf: int  # the one that it replaces
    source: int  # leaf `i`, or output `~i`


class _TreeWrite(NamedTuple):
    """A tree of arrays that is put in the place of another one."""

    entry: int  # of the object
    position: int
    old: int  # to the root of the other one
    edge: int  # to its root


class Writer:
    """The writes and the result of one report.

    Arguments:
        graphdef: of the call.
        report: what the function did.
        resolve: see `Resolve`.

    Raises:
        Unplannable: it did more than write values.
    """

    def __init__(self, graphdef: GraphDef, report: Report, resolve: Resolve) -> None:
        self.graphdef = graphdef
        variables, self.cells, trees = _writes_of(graphdef, report)
        self.indices = [write.entry for write in variables]
        self.access = Access([graphdef.entries[write.entry].kind for write in variables])
        self.replaced = [write.leaf for write in variables]
        self.sources = [write.source for write in variables]
        self._old, self._new = picker(self.replaced), Values(self.sources)
        self.writes = bool(variables or self.cells or trees)
        self.trees = [_TreeWriter(graphdef, report, write) for write in trees]
        self._keys = [self.key(write) for write in self.cells]
        self._old_arrays = picker([write.leaf for write in self.cells])
        self._arrays = Values([write.source for write in self.cells])
        self.result = result = Result(graphdef, report, report.delta.root)
        self.make_result: Callable[[Sequence[Any], Sequence[Any], Any], Any] = result.make
        for index in result.objects:
            resolve(index)
        for index in {*self.indices, *[write.entry for write in (*self.cells, *trees)]}:
            if not _is_owned(resolve(index)):
                raise Unplannable  # `finish` says why

    def write(
        self,
        variables: Sequence[Any],
        resolve: Resolve,
        leaves: Sequence[Any],
        outputs: Sequence[Any],
    ) -> bool:
        """Write, all or nothing; return False if that takes more than this.

        Arguments:
            variables: those of `indices`.
            resolve: see `Resolve`.
            leaves: what was read.
            outputs: what the function returned.

        Raises:
            ConcurrentWriteError: a place does not hold any more what was read.
        """
        held, values = self._old(leaves), self._new(leaves, outputs)
        if not self.cells and not self.trees:
            with COMMITS.lock:
                if not all(map(operator.is_, self.access.read(variables), held)):
                    self.complain(variables, held)
                forget_all(self.access.watched(variables))
                COMMITS.begun += 1
                try:
                    self.access.write(variables, values)
                finally:
                    COMMITS.ended = COMMITS.begun
            return True
        arrays = self._arrays(leaves, outputs)
        if not are_arrays(arrays):
            return False
        holders = [holder_of(resolve(write.entry)) for write in self.cells]
        keys, old_arrays = self._keys, self._old_arrays(leaves)
        trees: list[tuple[TreePlace, Any]] = []
        for writer in self.trees:
            parts = writer.values(leaves, outputs)
            if not are_arrays(parts):
                return False
            trees.append((writer.place(resolve), jax.tree.unflatten(writer.treedef, parts)))
        with COMMITS.lock:
            if not all(map(operator.is_, self.access.read(variables), held)):
                self.complain(variables, held)
            if not all(map(operator.is_, map(read_cell, holders, keys), old_arrays)):
                for write, *cell, then in zip(self.cells, holders, keys, old_arrays, strict=True):
                    if read_cell(*cell) is not then:
                        raise self.changed(write.entry)
            for writer, (place, _) in zip(self.trees, trees, strict=True):
                now, then = jax.tree.leaves(place.get()), writer.old(leaves)
                if len(now) != len(then) or not all(map(operator.is_, now, then)):
                    raise self.changed(writer.entry)
            forget_all(self.access.watched(variables))
            done: list[tuple[Any, Any, Any]] = []
            replaced: list[tuple[TreePlace, Any]] = []
            COMMITS.begun += 1
            try:
                for holder, key, old, new in zip(holders, keys, old_arrays, arrays, strict=True):
                    done.append((holder, key, old))
                    holder[key] = new
                for place, tree in trees:
                    replaced.append((place, place.get()))
                    place.put(tree)
                self.access.write(variables, values)
            except BaseException:
                for place, tree in reversed(replaced):
                    place.put(tree)
                for holder, key, value in reversed(done):
                    holder[key] = value
                raise
            finally:
                COMMITS.ended = COMMITS.begun
        return True

    def key(self, write: _Write) -> Any:
        """Return the name or number of the place that is written."""
        entry = self.graphdef.entries[write.entry]
        key = entry.keys[write.position]
        return _kinds.key_value(key) if entry.kind is _kinds.DICT else key

    def complain(self, variables: Sequence[Any], old: Sequence[Any]) -> None:
        """Raise for the first Variable that does not hold any more what was read."""
        now = self.access.read(variables)
        for index, held, value in zip(self.indices, now, old, strict=True):
            if held is not value:
                raise self.changed(index)

    def changed(self, index: int) -> ConcurrentWriteError:
        """Return the error for an object that somebody else has changed."""
        cls = self.graphdef.entries[index].cls
        return changed_meanwhile(namer(self.graphdef)(index), cls)


class _TreeWriter:
    """Puts a tree in the place of another one."""

    def __init__(self, graphdef: GraphDef, report: Report, write: _TreeWrite) -> None:
        self.entry = write.entry
        entry = graphdef.entries[write.entry]
        self._key = None if entry.kind is _kinds.VARIABLE else entry.keys[write.position]
        self.old = picker(leaves_below(graphdef.entries.__getitem__, write.old))
        self.treedef, sources = Result(graphdef, report, write.edge, of_values=True).as_tree()
        self.values = Values(sources)

    def place(self, resolve: Resolve) -> TreePlace:
        """Return the place."""
        obj = resolve(self.entry)
        holder = obj if self._key is None else holder_of(obj)
        return TreePlace(holder, self._key, self.treedef)


def _is_owned(obj: Any) -> bool:
    """Tell whether the current trace may write an object."""
    kind: Any = _classify.rule_of(obj)
    try:
        kind.check_writable(obj)
    except CapturedWriteError:
        return False
    return True


def holder_of(obj: Any) -> Any:
    """Return what the attributes or elements of an object are in."""
    kind: Any = _classify.RULES.get(type(obj)) or _classify.rule_of(obj)
    if kind in (_kinds.MODULE, _kinds.OBJECT):
        return kind._attributes(obj)
    attributes = kind.attributes(obj)
    return obj if attributes is None else attributes


def read_cell(holder: Any, key: Any) -> Any:
    """Return what is in a place."""
    try:
        return holder[key]
    except LookupError:
        return _ABSENT


def _writes_of(
    graphdef: GraphDef, report: Report
) -> tuple[list[_Write], list[_Write], list[_TreeWrite]]:
    """Return what a report writes to Variables and to other places, and the trees that it puts."""
    variables: list[_Write] = []
    cells: list[_Write] = []
    trees: list[_TreeWrite] = []
    after = entries_after(graphdef, report)
    for index, entry in report.delta.changed:
        before = graphdef.entries[index]
        if entry[:4] != before[:4]:
            raise Unplannable
        for position, (old, new) in enumerate(zip(before.edges, entry.edges, strict=True)):
            if type(new) is int and new < 0 and type(old) is int and old < 0:
                write = _Write(index, position, ~old, report.sources[~new])
                if write.source != write.leaf:
                    (variables if entry.kind.is_variable else cells).append(write)
                    if not (entry.kind.is_variable or _is_holder(entry)):
                        raise Unplannable
            elif new in (old, (_static.LOCATED, index, position)):
                pass
            elif (
                (
                    entry.kind is _kinds.VARIABLE
                    or (entry.kind is _kinds.MODULE and _is_holder(entry))
                )
                and tree_entries(graphdef.entries.__getitem__, old) is not None
                and tree_entries(after, new) is not None
            ):
                trees.append(_TreeWrite(index, position, cast("int", old), cast("int", new)))
            else:
                raise Unplannable
    return variables, cells, trees


def _is_holder(entry: Entry) -> bool:
    """Tell whether arrays of an object are elements, or attributes in a dictionary."""
    if entry.kind in (_kinds.MODULE, _kinds.OBJECT) and _module.slot_names(entry.cls):
        return False
    return entry.kind.is_root or entry.kind in _HOLDERS
