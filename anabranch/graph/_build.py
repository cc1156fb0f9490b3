"""Build objects from entries: nodes are made empty, values from their children, then nodes filled.

Making all nodes first is what lets cycles and shared objects come back; values come in reverse
order, since the children of a value have higher indices than the value itself.

Most objects are Variables that hold one array, through which no cycle can pass: **cells**. They are
made all at once, in C, and so is what others hold picked from all that there is. What is to be done
is found out once for a table, as a `Recipe`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

from anabranch.graph import _kinds, _static
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._kind import Kind
from anabranch.graph._tokens import current_token
from anabranch.graph._variable import NO_METADATA, Variable

_new: Callable[[Any], Any] = object.__new__
_write_value, _write_metadata, _write_token, _write_memories = [
    vars(Variable)[slot].__set__ for slot in ("_value", "_metadata", "_token", "_memories")
]
_NONE: Mapping[int, Any] = {}


class Cells(NamedTuple):
    """Variables without metadata that hold one leaf each."""

    at: list[int]  # their places in the table
    classes: list[type]
    leaves: list[int]


class Nodes(NamedTuple):
    """Nodes of one kind, but for Variables that hold one leaf."""

    at: list[int]  # their places in the table
    classes: list[type]
    extras: list[Any]


class Recipe:
    """What is to be made for a table.

    Arguments:
        entries: the table.
        base: the index of its first entry.
    """

    def __init__(self, entries: Sequence[Entry], base: int) -> None:
        self.cells = Cells([], [], [])
        self.variables: list[tuple[int, Entry, int]] = []  # place, entry, leaf: with metadata
        self.nodes: dict[Kind, Nodes] = {}
        self.values: list[tuple[int, Entry]] = []  # last one first
        self.statics: list[tuple[int, Entry]] = []  # entries that have static values
        self.identities: list[int] = []  # the places of all nodes
        self.classes: set[type] = set()  # of Variables and of what has attributes
        self.held: dict[int, list[int]] = {}  # by place of a node, where what it holds will be:
        self.others: list[Any] = []  # after all entries, if it is none and the same each time;
        self.open: list[tuple[int, Edge]] = []  # else what it is, and its number among those
        self.rest: list[tuple[int, Entry]] = []  # nodes that store nothing in a dictionary
        self.stored: list[tuple[Callable[[Any], Any], int]] = []  # the others: what finds it, place
        self._end = base + len(entries)
        for i, entry in enumerate(entries):
            kind, cls, _, _, edges = entry
            if not kind.identity:
                self.values.append((i, entry))
                self.statics.append((i, entry))
                continue
            self.identities.append(i)
            if kind.is_object:
                self.classes.add(cls)
            if kind.is_variable and type(edge := edges[0]) is int and edge < 0:
                self._add_variable(i, entry, ~edge)
            else:
                self._add_node(i, entry)
        self.values.reverse()
        self.pick_arrays = picker(self.cells.leaves)
        made = [*self.cells.at, *[i for i, _, _ in self.variables]]
        made += [i for nodes in self.nodes.values() for i in nodes.at]
        self.arrange = picker(_places(made, len(entries)))  # from what is made to the table
        of_stored = [(entries[i], self.held[i]) for _, i in self.stored]
        self.keys = [kind.path_key(key) for (kind, _, _, keys, _), _ in of_stored for key in keys]
        self.pick_owners = picker([n for n, (_, held) in enumerate(of_stored) for _ in held])
        self.pick_held = picker([place for _, held in of_stored for place in held])

    def _add_variable(self, i: int, entry: Entry, leaf: int) -> None:
        if entry.kind is _kinds.VARIABLE and entry.extra is None:
            self.cells.at.append(i)
            self.cells.classes.append(entry.cls)
            self.cells.leaves.append(leaf)
        else:
            self.variables.append((i, entry, leaf))

    def _add_node(self, i: int, entry: Entry) -> None:
        kind, cls, extra, _, edges = entry
        nodes = self.nodes.setdefault(kind, Nodes([], [], []))
        nodes.at.append(i)
        nodes.classes.append(cls)
        nodes.extras.append(extra)
        self.held[i] = [*map(self._place_of, edges)]
        if any([type(edge) is tuple for edge in edges]):  # noqa: C419
            self.statics.append((i, entry))
        storage = kind.storage(cls)
        if storage is None:
            self.rest.append((i, entry))
        else:
            self.stored.append((storage, i))

    def _place_of(self, edge: Edge) -> int:
        """Return where what an edge leads to will be, among all that there is."""
        if type(edge) is int and edge >= 0:
            return edge
        if type(edge) is tuple and edge[0] is not _static.LOCATED:
            self.others.append(_static.decode(edge))
        else:
            self.open.append((len(self.others), edge))
            self.others.append(None)
        return self._end + len(self.others) - 1


def _places(made: list[int], count: int) -> list[int]:
    """Return where each entry is among what is made, and the place after it for all others."""
    places = [len(made)] * count
    for place, i in enumerate(made):
        places[i] = place
    return places


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks elements of a sequence."""
    if len(indices) == 1:
        index = indices[0]
        return lambda sequence: (sequence[index],)
    if not indices:
        return lambda sequence: ()
    return operator.itemgetter(*indices)


def recipe_of(graphdef: GraphDef) -> Recipe:
    """Return the recipe of a graphdef, which is kept."""
    if graphdef.recipe is None:
        graphdef.recipe = Recipe(graphdef.entries, graphdef.base)
    return graphdef.recipe


class Built:
    """Objects by index, and what each of them was made of.

    Arguments:
        recipe: how they were made.
        objects: by index, known ones first.
        cells: those among them that are cells.
        arrays: the leaves of the cells.
        every: the objects, and then what nodes hold that is no object.
        values: by place in the table, the children of values.
        resolve: from an edge to the object, leaf or static value.
    """

    def __init__(
        self,
        recipe: Recipe,
        objects: list[Any],
        cells: list[Any],
        arrays: Sequence[Any],
        every: list[Any],
        values: dict[int, Sequence[Any]],
        resolve: Callable[[Edge], Any],
    ) -> None:
        self.recipe, self.objects, self.cells, self.arrays = recipe, objects, cells, arrays
        self._every, self._values = every, values
        self.resolve = resolve

    @functools.cached_property
    def held(self) -> dict[int, Sequence[Any]]:
        """By place in the table, the children; else one child, which is a leaf."""
        found, every = dict(self._values), self._every
        for i, places in self.recipe.held.items():
            found[i] = [every[place] for place in places]
        return found


def build(
    entries: Sequence[Entry] | GraphDef,
    leaves: Sequence[Any],
    known: Sequence[Any] = (),
    existing: Mapping[int, Any] = _NONE,
    at: Callable[[int, int], Any] | None = None,
) -> Built:
    """Build the objects of a table.

    Arguments:
        entries: their indices start at `len(known)`.
        leaves: their values.
        known: the objects that lower indices refer to.
        existing: nodes, by position in the table, that exist already: they are referred to, and
            left as they are.
        at: from the place of a static value in the caller's objects to the value.
    """
    base = len(known)
    recipe = recipe_of(entries) if isinstance(entries, GraphDef) else Recipe(entries, base)
    arrays = recipe.pick_arrays(leaves)
    cells = _cells_of(recipe.cells.classes, arrays)
    made = cells.copy()
    for _, (kind, cls, extra, keys, _), number in recipe.variables:
        made.append(kind.build(cls, extra, keys, (leaves[number],)))
    for kind, (_, classes, extras) in recipe.nodes.items():
        made += kind.create_all(classes, extras)
    made.append(None)  # for values, which are yet to be made
    nodes = recipe.arrange(made)  # by place; what stands for existing ones is not used
    objects: list[Any] = [*known, *nodes]
    for i, node in existing.items():
        objects[base + i] = node

    def resolve(edge: Any) -> Any:
        if type(edge) is int:
            return objects[edge] if edge >= 0 else leaves[~edge]
        if edge[0] is _static.LOCATED and at is not None:
            return at(edge[1], edge[2])
        return _static.decode(edge)

    values: dict[int, Sequence[Any]] = {}
    for i, (kind, cls, extra, keys, edges) in recipe.values:
        values[i] = children = [resolve(edge) for edge in edges]
        objects[base + i] = kind.build(cls, extra, keys, children)
    every = [*objects, *recipe.others]
    for i, edge in recipe.open:
        every[len(objects) + i] = resolve(edge)
    stored = [storage(nodes[i]) for storage, i in recipe.stored]
    # in C: each write returns None, so that `any` goes on to the end
    any(map(setitem, recipe.pick_owners(stored), recipe.keys, recipe.pick_held(every)))
    for i, (kind, _, extra, keys, _) in recipe.rest:
        kind.complete(nodes[i], extra, keys, [every[place] for place in recipe.held[i]])
    return Built(recipe, objects, cells, arrays, every, values, resolve)


def _cells_of(classes: Sequence[type], arrays: Sequence[Any]) -> list[Any]:
    """Make Variables of the current trace that hold one array each, in C."""
    cells = [*map(_new, classes)]
    any(map(_write_value, cells, arrays))
    any(map(_write_metadata, cells, repeat(NO_METADATA)))
    any(map(_write_token, cells, repeat(current_token())))
    any(map(_write_memories, cells, repeat(None)))
    return cells
