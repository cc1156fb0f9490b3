"""What a plan returns: built from the outputs of a call, its leaves, and the objects it shares.

Trees of arrays are put together by JAX, in C. What a function returns of the values among its
arguments (a tuple that it passes on) is built anew, as values have no identity.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import jax

from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._build import build, picker
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._kind import Kind
from anabranch.graph._state import State, state_of
from anabranch.transforms._box import Report
from anabranch.transforms._trees import is_container, is_structure, is_tree, static_at
from anabranch.transforms._watch import Unplannable

_new_tuple: Any = tuple.__new__
_SHORT = 64  # containers, and leaves, that are written as an expression


def _made_by(kind: Kind) -> Callable[..., Any]:
    """Return what makes a node of a kind: from class, extra, keys and values."""

    def make(cls: Any, extra: Any, keys: Any, values: Sequence[Any]) -> Any:
        node = kind.create(cls, extra)
        kind.complete(node, extra, keys, values)
        return node

    return make


_BUILT: dict[Kind, Callable[..., Any]] = {
    _kinds.FROZEN: _kinds.FROZEN.build,
    _kinds.MODULE: _made_by(_kinds.MODULE),
    _kinds.OBJECT: _made_by(_kinds.OBJECT),
    _kinds.PYTREE: _kinds.PYTREE.build,
    _kinds.VARIABLE: _kinds.VARIABLE.build,
}

Resolve = Callable[[int], Any]
"""From the index of an entry to the object of this call."""


class Result:
    """Builds a result; what it shares with the arguments comes in slots of its own.

    Arguments:
        graphdef: of the call.
        report: what the function did.
        root: the edge to what is built.
        of_values: it consists of values and arrays, which are built anew where they are not new.

    Raises:
        Unplannable: it refers to what a plan cannot find.
    """

    def __init__(
        self, graphdef: GraphDef, report: Report, root: Edge, *, of_values: bool = False
    ) -> None:
        # where each leaf comes from: leaf `i` of the call, output `~i`, or an object: its index,
        # and the position of what is meant in it, -1 for itself
        self._sources: list[int | tuple[int, int]] = [*report.sources]
        self._slots = report.delta.num_slots
        self._known, self._of_values = len(graphdef.entries), of_values
        entries = entries_after(graphdef, report)
        reached = self._reach(entries, root)
        self._numbers = {index: i for i, index in enumerate(reached)}
        if of_values:
            entries = _without_places(entries)
        self._new = tuple([self._renumbered(index, entries(index)) for index in reached])
        self._root = self._rebase(root)
        self._graphdef = GraphDef(self._new, self._root, len(self._sources))
        self.make: Callable[[Sequence[Any], Sequence[Any], Resolve], Any] = self._make
        self.constant: tuple[Any] | None = None
        """The result, if it is a static value."""
        self.items: list[int] | None = None
        """The sources of the result, if it is an array, a tuple or a tree of arrays."""
        self.is_tuple = False
        self.treedef: Any = None
        """The structure of the result, if it is a tree."""
        self._simplify()

    @property
    def objects(self) -> set[int]:
        """The indices of the objects that it shares with the arguments."""
        return {source[0] for source in self._sources if not isinstance(source, int)}

    @property
    def leaves(self) -> list[int]:
        """The sources of its leaves."""
        edges = [self._root, *chain.from_iterable([entry.edges for entry in self._new])]
        sources = [self._sources[~edge] for edge in edges if type(edge) is int and edge < 0]
        return [source for source in sources if isinstance(source, int)]

    def as_tree(self) -> tuple[Any, list[int]]:
        """Return the structure of what is built, and the sources of its leaves."""
        leaves = [object() for _ in self._sources]
        source_of = {id(leaf): source for leaf, source in zip(leaves, self._sources, strict=True)}
        built = build(self._new, leaves).resolve(self._root)
        found, treedef = jax.tree.flatten(built)
        return treedef, [_number(source_of[id(leaf)]) for leaf in found]

    def expression(
        self,
        value: Callable[[int], str],
        shared: Callable[[int], str],
        constant: Callable[[Any], str],
    ) -> str | None:
        """Return a Python expression for the result, None if it is no short one.

        Arguments:
            value: from the source of a leaf to an expression.
            shared: from the index of an object of the arguments to one.
            constant: from a static value to one.
        """
        if len(self._new) > _SHORT or len(self._sources) > _SHORT:
            return None
        return self._written(self._root, set(), value, shared, constant)

    def _written(self, edge: Edge, known: set[int], *names: Callable[[Any], str]) -> str | None:
        value, shared, constant = names
        if _is_static(edge):
            return constant(_static.decode(edge)) if edge[0] is _static.HASHED else None
        assert isinstance(edge, int)
        if edge < 0:
            source = self._sources[~edge]
            if isinstance(source, int):
                return value(source)
            return shared(source[0]) if source[1] < 0 else None
        kind, cls, extra, keys, edges = self._new[edge]
        if edge in known:
            return None
        known.add(edge)
        parts = [self._written(child, known, *names) for child in edges]
        if None in parts or (cls is dict and not all(type(key) is str for key in keys)):
            return None
        if cls is dict:
            pairs = [f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)]
            return f"{{{', '.join(pairs)}}}"
        elements = "".join([f"{part}, " for part in parts])
        if cls is list:
            return f"[{elements}]"
        if cls is tuple:
            return f"({elements})"
        if kind is _kinds.TUPLE:
            return f"{constant(functools.partial(_new_tuple, cls))}(({elements}))"
        if cls is State:
            _, infos = extra[0].node_data()
            return f"{constant(state_of)}({constant(infos)}, ({elements}))"
        make = _BUILT.get(kind)
        if make is None:
            return None
        return f"{constant(functools.partial(make, cls, extra, keys))}(({elements}))"

    def _simplify(self) -> None:
        root = self._root
        if type(root) is tuple and root[:1] == (_static.HASHED,):
            constant = root[2]
            self.constant = (constant,)
            self.make = lambda leaves, outputs, resolve: constant
        elif self.objects:
            return
        elif type(root) is int and root < 0 and not self._new:
            self.items = [_number(self._sources[~root])]
            values = Values(self.items)
            self.make = lambda leaves, outputs, resolve: values(leaves, outputs)[0]
        elif root == 0 and len(self._new) == 1 and self._is_tuple_of_arrays(self._new[0]):
            edges: Any = self._new[0].edges
            self.items, self.is_tuple = [_number(self._sources[~edge]) for edge in edges], True
            items = Values(self.items)
            self.make = lambda leaves, outputs, resolve: tuple(items(leaves, outputs))
        elif type(root) is int and root >= 0 and self._is_one_tree():
            self.treedef, self.items = self.as_tree()
            parts, unflatten = Values(self.items), self.treedef.unflatten
            self.make = lambda leaves, outputs, resolve: unflatten(parts(leaves, outputs))

    def _is_one_tree(self) -> bool:
        """Tell whether JAX puts it together as it was."""
        edges = Counter([*chain.from_iterable([entry.edges for entry in self._new])])
        return all(map(_is_tree, self._new)) and all(
            edges[i] <= 1
            for i in range(len(self._new))  # a list in two places is one list
        )

    @staticmethod
    def _is_tuple_of_arrays(entry: Entry) -> bool:
        return entry.cls is tuple and all(type(e) is int and e < 0 for e in entry.edges)

    def _reach(self, entries: Callable[[int], Entry], root: Edge) -> list[int]:
        """Return the numbers of the entries that are built."""
        found: set[int] = set()
        pending = [root]
        while pending:
            edge = pending.pop()
            if type(edge) is int and edge >= 0 and edge not in found:
                entry = entries(edge)
                if edge >= self._known or self._of_values or _is_value(entry):
                    found.add(edge)
                    pending += entry.edges
        # values come before their children, and new ones refer to known ones
        return sorted(found, key=lambda index: (index != root, index < self._known, index))

    def _renumbered(self, index: int, entry: Entry) -> Entry:
        is_known = index < self._known  # edges to arrays count leaves then; else they count slots
        if is_known and not self._of_values and not all(map(_is_plain, entry.edges)):
            raise Unplannable  # a static value of this call, to which another one may be equal
        edges = tuple([self._rebase(edge, leaf=is_known) for edge in entry.edges])
        return entry._replace(edges=edges)

    def _rebase(self, edge: Edge, *, leaf: bool = False) -> Edge:
        if leaf and type(edge) is int and edge < 0:
            return self._source(~edge)
        if type(edge) is int and edge >= 0:
            return self._numbers[edge] if edge in self._numbers else self._source((edge, -1))
        if type(edge) is tuple and edge[0] is _static.LOCATED:
            return self._source((edge[1], edge[2]))
        return edge

    def _source(self, source: int | tuple[int, int]) -> int:
        """Return the edge to a further leaf."""
        self._sources.append(source)
        return ~(len(self._sources) - 1)

    def _make(self, leaves: Sequence[Any], outputs: Sequence[Any], resolve: Resolve) -> Any:
        def leaf(source: int | tuple[int, int]) -> Any:
            if isinstance(source, int):
                return leaves[source] if source >= 0 else outputs[~source]
            index, position = source
            obj = resolve(index)
            if position < 0:
                return obj
            kind: Any = _classify.rule_of(obj)
            return kind.open(obj)[2][position]

        return build(self._graphdef, [*map(leaf, self._sources)]).resolve(self._root)


def _number(source: int | tuple[int, int]) -> int:
    assert type(source) is int
    return source


def _is_static(edge: Edge) -> TypeGuard[tuple[Any, ...]]:
    return type(edge) is tuple


def _is_plain(edge: Edge) -> bool:
    """Tell whether an edge leads to no static value that could be told from an equal one."""
    if not _is_static(edge):
        return True
    return edge == _EMPTY or (edge[0] is _static.HASHED and type(edge[2]) in _static.EXACT_BY_TYPE)


def _is_value(entry: Entry) -> bool:
    return entry.kind is _kinds.FROZEN or is_tree(entry.kind)


_EMPTY = _static.encode(())


def _is_tree(entry: Entry) -> bool:
    """Tell whether JAX puts an entry together as it was."""
    plain = all(type(edge) is int or is_structure(edge) for edge in entry.edges)
    if is_container(entry):
        return plain and [*entry.keys] == sorted(entry.keys)
    return plain and is_tree(entry.kind)


def entries_after(graphdef: GraphDef, report: Report) -> Callable[[int], Entry]:
    """Return what finds entries by number, those included that the function has added."""
    old, new, base = graphdef.entries, report.delta.new, len(graphdef.entries)
    return lambda index: new[index - base] if index >= base else old[index]


def _without_places(entries: Callable[[int], Entry]) -> Callable[[int], Entry]:
    """Return what finds entries whose static edges name no places."""

    def found(index: int) -> Entry:
        entry = entries(index)
        return entry._replace(edges=tuple([static_at(entries, edge) for edge in entry.edges]))

    return found


# -- picking -------------------------------------------------------------------------------------


class Values:
    """Picks values by their sources, from the leaves of the call and from the outputs."""

    def __init__(self, sources: Sequence[int]) -> None:
        self._sources = sources
        outputs = [~source for source in sources]
        self._pick = picker(outputs) if all(i >= 0 for i in outputs) else None

    def __call__(self, leaves: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        if self._pick is not None:
            return self._pick(outputs)
        return [leaves[i] if i >= 0 else outputs[~i] for i in self._sources]
