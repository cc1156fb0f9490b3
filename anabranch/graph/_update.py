"""Write states into objects, in place."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from anabranch._boundary import boundary
from anabranch.errors import ArgumentError, UpdateError, bounded, first_few
from anabranch.graph._build import recipe_of
from anabranch.graph._delta import Write, commit, commit_values
from anabranch.graph._flatten import Flat, flatten
from anabranch.graph._graphdef import GraphDef, Path
from anabranch.graph._leaf_info import LeafInfo, path_text
from anabranch.graph._split import as_state, snapshots
from anabranch.graph._state import State

_Cell = tuple[int, int]  # the entry that holds a leaf, and the position in it


@boundary("update")
def update(
    node: Any,
    state: Any,
    *more: Any,
    relax: Collection[Literal["paths", "shapes", "kinds"]] = (),
) -> None:
    """Write states into an object, in place, all or nothing.

    An immutable value that holds arrays, as the state of an optimiser does, is replaced by a new
    one in the object that holds it.

    Arguments:
        node: a node, or any container of nodes.
        state: a State, of flax too, or a nested dict of arrays. Leaves that it lacks are not
            touched.
        more: further States.
        relax: what not to insist on: `"paths"` ignores leaves that the object does not have,
            `"shapes"` and `"kinds"` accept other ones.

    Raises:
        UpdateError: a path is unknown, a shape or kind differs, two values are given for one
            leaf, or a leaf is part of an immutable value that is given itself; nothing is written.

    >>> import anabranch as ab
    >>> v = ab.Param(1.0)
    >>> ab.update([v], {0: 3.0})
    >>> v.value
    3.0
    """
    collection = isinstance(relax, Collection) and not isinstance(relax, str)
    if not collection or not set(relax) <= {"paths", "shapes", "kinds"}:
        raise UpdateError(
            f"relax={relax!r}: it is a collection of 'paths', 'shapes' and 'kinds', "
            'for example `relax=["shapes"]`'
        )
    flat = flatten(node)
    if _write_by_number(flat, (state, *more), shapes="shapes" not in relax):
        return
    finder, top = _Finder(flat), _at_the_top(flat.graphdef)
    problems: list[str] = []
    new: dict[int, dict[int, Any]] = {}
    for given in (state, *more):
        nested = isinstance(given, (Mapping, list, tuple))
        if not nested and finder.find(()) is None:  # an array is the state of a Variable
            raise ArgumentError(
                f"update takes States or nested dicts of arrays after the object, not a "
                f"{type(given).__name__}; `state(obj)` is the State of an object"
            )
        source = as_state(given)
        for info, leaf in zip(source.infos, source.leaves, strict=True):
            cell = finder.find(info.path)
            if cell is None:
                if "paths" not in relax:
                    problems.append(f"{path_text(info.path)}: the object has no such leaf")
                continue
            found = _problem(flat, cell, info, leaf, relax, top)
            if found:
                problems.append(f"{path_text(info.path)}: {found}")
            (index, position), _ = cell
            held = new.setdefault(index, {})
            if held.setdefault(position, leaf) is not leaf:
                problems.append(f"{path_text(info.path)}: another value is given for this leaf")
    if problems and not flat.leaves:
        raise UpdateError(
            f"a {type(node).__name__} is given to be updated, in which there are no Variables or "
            "arrays; give an object first, then the states"
        )
    if problems:
        raise UpdateError(
            bounded(
                f"the state does not fit the object:\n{first_few(problems)}\n"
                "nothing was written; `relax=` accepts other paths, shapes or kinds"
            )
        )
    _write(flat, new)


def _write_by_number(flat: Flat, states: Sequence[Any], *, shapes: bool) -> bool:
    """Do the same without paths, if the states are of the same structure; return if it was done.

    Arguments:
        flat: the object.
        states: what is given.
        shapes: whether shapes must be the same.
    """
    graphdef, objects, leaves = flat.graphdef, flat.objects, flat.leaves
    cells = recipe_of(graphdef).cells
    holders = dict(zip(cells.leaves, cells.at, strict=True))
    new: dict[int, Any] = {}
    for given in states:
        numbers = given.numbers_in(graphdef) if isinstance(given, State) else None
        if numbers is None:
            return False
        for number, leaf in zip(numbers, given.leaves, strict=True):
            if number in new or number not in holders:
                return False
            if shapes and _shape(leaves[number]) != _shape(leaf):
                return False
            new[number] = leaf
    commit_values([objects[holders[number]] for number in new], snapshots([*new.values()]))
    return True


class _Finder:
    """Follow paths from the root of an object to its leaves, through any alias."""

    def __init__(self, flat: Flat) -> None:
        self._graphdef = flat.graphdef
        self._positions: dict[int, dict[Any, int]] = {}

    def find(self, path: Path) -> tuple[_Cell, int] | None:
        """Return where the leaf at a path is held, and its number; None if there is no leaf."""
        number = self._graphdef.leaf_at.get(path)
        return self._follow(path) if number is None else (self._graphdef.holders[number], number)

    def _follow(self, path: Path) -> tuple[_Cell, int] | None:
        cell, edge = self._enter((-1, 0), self._graphdef.root)
        for key in path:
            if type(edge) is not int or edge < 0:
                return None
            position = self._position(edge, key)
            if position is None:
                return None
            cell, edge = self._enter((edge, position), self._graphdef.entries[edge].edges[position])
        return (cell, ~edge) if type(edge) is int and edge < 0 else None

    def _enter(self, cell: _Cell, edge: Any) -> tuple[_Cell, Any]:
        """Go on to the value if the edge leads to a Variable."""
        if type(edge) is int and edge >= 0:
            entry = self._graphdef.entries[edge]
            if entry.kind.is_variable:
                return (edge, 0), entry.edges[0]
        return cell, edge

    def _position(self, index: int, key: Any) -> int | None:
        known = self._positions.get(index)
        if known is None:
            kind, _, _, keys, _ = self._graphdef.entries[index]
            known = {kind.path_key(k): i for i, k in enumerate(keys)}
            self._positions[index] = known
        return known.get(key)


def _problem(
    flat: Flat,
    cell: tuple[_Cell, int],
    info: LeafInfo,
    leaf: Any,
    relax: Collection[str],
    top: Collection[int],
) -> str:
    (index, _), number = cell
    if index < 0 or index in top:
        return "it is part of the value that is given, which cannot be written: use `merge`"
    own = flat.graphdef.infos[number]
    fits = info.kind is own.kind or info.kind is jax.Array  # a plain array fits any kind
    if "kinds" not in relax and not fits:
        return f"the kind is {own.kind_text}, the state has {info.kind_text}"
    old = flat.leaves[number]
    if "shapes" not in relax and _shape(old) != _shape(leaf):
        return f"the shape is {_shape(old)}, the state has {_shape(leaf)}"
    return ""


def _shape(leaf: Any) -> Any:
    found = getattr(leaf, "shape", None)
    return np.shape(leaf) if found is None else found


def _at_the_top(graphdef: GraphDef) -> set[int]:
    """Return the immutable values that are given, and those in them that are in no object."""
    found, pending = set[int](), [graphdef.root]
    while pending:
        edge = pending.pop()
        if type(edge) is int and edge >= 0 and not graphdef.entries[edge].kind.identity:
            found.add(edge)
            pending += graphdef.entries[edge].edges
    return found


def _write(flat: Flat, new: dict[int, dict[int, Any]]) -> None:
    """Write leaves, given by the entries that hold them and the positions in these.

    Those of immutable values go into new values, which take the places of the old ones.
    """
    entries = flat.graphdef.entries
    kept = iter(snapshots([leaf for held in new.values() for leaf in held.values()]))
    leaves = {index: dict(zip(held, kept, strict=False)) for index, held in new.items()}
    affected = _with_holders(flat.graphdef, leaves)

    def contents(index: int) -> Any:
        extra, keys, old = flat.contents[index]
        own = leaves.get(index, {})
        values = [own.get(i, value) for i, value in enumerate(old)]
        for i, edge in enumerate(entries[index].edges):
            if type(edge) is int and edge in affected and not entries[edge].kind.identity:
                values[i] = value(edge)
        return extra, keys, values

    @functools.cache
    def value(index: int) -> Any:
        kind, cls = entries[index][:2]
        return kind.build(cls, *contents(index))

    identities = [index for index in sorted(affected) if entries[index].kind.identity]
    commit([Write(flat.objects[i], entries[i].cls, contents(i)) for i in identities])


def _with_holders(graphdef: GraphDef, indices: Iterable[int]) -> set[int]:
    """Return entries, and what holds those that are immutable values, up to objects."""
    entries = graphdef.entries
    holders: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        for edge in entry.edges:
            if type(edge) is int and edge >= 0 and not entries[edge].kind.identity:
                holders.setdefault(edge, []).append(index)
    found, pending = set[int](), [*indices]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            if not entries[index].kind.identity:
                pending += holders.get(index, ())
    return found
