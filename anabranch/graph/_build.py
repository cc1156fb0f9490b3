"""Build objects from entries: nodes are made empty, values from their children, then nodes filled.

Making all nodes first is what lets cycles and shared objects come back; values come in reverse
order, since the children of a value have higher indices than the value itself.

Most objects are Variables that hold one array, through which no cycle can pass: **cells**. They are
made all at once. What is to be done is found out once for a table, as a `Recipe`.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.graph import _kinds, _static
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._tokens import current_token
from anabranch.graph._variable import NO_METADATA, Variable

_new: Callable[[Any], Any] = object.__new__
_SLOTS = ("_value", "_metadata", "_token", "_memories")
_WRITERS = [vars(Variable)[slot].__set__ for slot in _SLOTS]
_NONE: Mapping[int, Any] = {}


class Cells(NamedTuple):
    """Variables without metadata that hold one leaf each."""

    at: list[int]  # their places in the table
    classes: list[type]
    leaves: list[int]


class Recipe(NamedTuple):
    """What is to be made for a table."""

    cells: Cells
    variables: list[tuple[int, Entry, int]]  # place, entry, and leaf of those with metadata
    nodes: dict[Any, tuple[list[int], list[type], list[Any]]]  # places, classes, extra by kind
    values: list[tuple[int, Entry]]  # last one first
    fillings: dict[Any, list[tuple[int, Entry, Callable[[Any], Any] | None]]]  # see `_picker`
    statics: list[tuple[int, Entry]]  # entries that have static values
    identities: list[int]  # the places of all nodes
    classes: set[type]  # of Variables and of what has attributes

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Recipe:
        """Return the recipe for a table."""
        recipe = cls(Cells([], [], []), [], {}, [], {}, [], [], set())
        at, classes, leaves = recipe.cells
        for i, entry in enumerate(entries):
            kind, of, extra, _, edges = entry
            if kind.identity:
                recipe.identities.append(i)
                if kind.is_object:
                    recipe.classes.add(of)
            if kind.is_variable and type(edge := edges[0]) is int and edge < 0:
                if kind is _kinds.VARIABLE and extra is None:
                    at.append(i)
                    classes.append(of)
                    leaves.append(~edge)
                else:
                    recipe.variables.append((i, entry, ~edge))
            elif kind.identity:
                nodes = recipe.nodes.setdefault(kind, ([], [], []))
                nodes[0].append(i)
                nodes[1].append(of)
                nodes[2].append(extra)
                pick = _picker(edges)
                recipe.fillings.setdefault(kind, []).append((i, entry, pick))
                if pick is None:
                    recipe.statics.append((i, entry))
            else:
                recipe.values.append((i, entry))
                recipe.statics.append((i, entry))
        recipe.values.reverse()
        return recipe


def _picker(edges: tuple[Edge, ...]) -> Callable[[Any], Any] | None:
    """Return what picks the values of an entry from all objects, None if some are no objects."""
    if len(edges) < 2 or not all([type(edge) is int and edge >= 0 for edge in edges]):  # noqa: C419
        return None
    return operator.itemgetter(*edges)


def recipe_of(graphdef: GraphDef) -> Recipe:
    """Return the recipe of a graphdef, which is kept."""
    if graphdef.recipe is None:
        graphdef.recipe = Recipe.of(graphdef.entries)
    return graphdef.recipe


class Built:
    """Objects by index, and what each of them was made of."""

    __slots__ = ("arrays", "cells", "held", "objects", "recipe", "resolve")

    def __init__(
        self,
        recipe: Recipe,
        objects: list[Any],
        cells: list[Any],
        arrays: list[Any],
        held: dict[int, Sequence[Any]],
        resolve: Callable[[Edge], Any],
    ) -> None:
        self.recipe = recipe
        self.objects = objects  # known objects first
        self.cells, self.arrays = cells, arrays  # those among them that are cells, and their leaves
        self.held = held  # by place in the table, the children; else one child, which is a leaf
        self.resolve = resolve  # from an edge to the object, leaf or static value


def build(
    entries: Sequence[Entry] | GraphDef,
    leaf: Callable[[int], Any],
    known: Sequence[Any] = (),
    existing: Mapping[int, Any] = _NONE,
    at: Callable[[int, int], Any] | None = None,
) -> Built:
    """Build the objects of a table.

    Arguments:
        entries: their indices start at `len(known)`.
        leaf: from the number of a leaf to its value.
        known: the objects that lower indices refer to.
        existing: nodes, by position in the table, that exist already: they are referred to, and
            left as they are.
        at: from the place of a static value in the caller's objects to the value.
    """
    if isinstance(entries, GraphDef):
        recipe, entries = recipe_of(entries), entries.entries
    else:
        recipe = Recipe.of(entries)
    base = len(known)
    objects: list[Any] = [*known, *[None] * len(entries)]
    held: dict[int, Sequence[Any]] = {}
    places, classes, leaves = recipe.cells
    arrays = [*map(leaf, leaves)]
    cells = _cells_of(classes, arrays)
    for i, cell in zip(places, cells, strict=True):
        objects[base + i] = cell
    for i, (kind, cls, extra, keys, _), number in recipe.variables:
        objects[base + i] = kind.build(cls, extra, keys, (leaf(number),))
    for kind, (places, classes, extras) in recipe.nodes.items():
        for i, node in zip(places, kind.create_all(classes, extras), strict=True):
            objects[base + i] = node
    for i, node in existing.items():
        objects[base + i] = node

    def resolve(edge: Any) -> Any:
        if type(edge) is int:
            return objects[edge] if edge >= 0 else leaf(~edge)
        if edge[0] is _static.LOCATED and at is not None:
            return at(edge[1], edge[2])
        return _static.decode(edge)

    for i, (kind, cls, extra, keys, edges) in recipe.values:
        held[i] = values = [resolve(edge) for edge in edges]
        objects[base + i] = kind.build(cls, extra, keys, values)
    for kind, fillings in recipe.fillings.items():
        nodes: list[tuple[Any, Any, Sequence[Any], Sequence[Any]]] = []
        for i, (_, _, extra, keys, edges), pick in fillings:
            held[i] = values = [*map(resolve, edges)] if pick is None else pick(objects)
            nodes.append((objects[base + i], extra, keys, values))
        if existing:
            nodes = [
                node for node, (i, _, _) in zip(nodes, fillings, strict=True) if i not in existing
            ]
        kind.complete_all(nodes)
    return Built(recipe, objects, cells, arrays, held, resolve)


def _cells_of(classes: Sequence[type], arrays: Sequence[Any]) -> list[Any]:
    """Make Variables of the current trace that hold one array each, in C."""
    cells = [*map(_new, classes)]
    contents = (arrays, *map(itertools.repeat, (NO_METADATA, current_token(), None)))
    for write, given in zip(_WRITERS, contents, strict=True):
        deque(map(write, cells, given), maxlen=0)
    return cells
