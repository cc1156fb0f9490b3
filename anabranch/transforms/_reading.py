"""The lines of a follower that compare a segment with what it was, and read its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from gc import get_referents
from itertools import compress
from typing import Any

import jax

from anabranch._source import Source
from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.transforms._columns import has_plain_attributes, leaf_types
from anabranch.transforms._places import Loose, Place, spine_of
from anabranch.transforms._segment import Attributes, Segment
from anabranch.transforms._taken import Arguments
from anabranch.transforms._visit import Visit
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._words import Words, ids_in

_FEW = 16  # dictionaries that are asked one by one
_ELEMENTS = 128  # of lists and objects that are named one by one; more are compared in one call


class Reading:
    """Adds the lines for one segment.

    Arguments:
        source: where the lines go.
        number: of the segment.
        segment: the segment.
        root: the name of its root.
        arguments: of the call; the lists and dictionaries in loose places are added to its nodes.
    """

    def __init__(
        self, source: Source, number: int, segment: Segment, root: str, arguments: Arguments
    ) -> None:
        self.source, self.number, self.segment = source, number, segment
        self.root, self.arguments = root, arguments
        self.trees: dict[tuple[int, int], str] = {}
        """What is in places with trees: by the index of the object, and the position in it."""

    def add(self) -> list[str]:
        """Add the lines, and return the names of the leaves, in the order of the walk."""
        source, segment, names = self.source, self.segment, list[str]()
        if segment.variables:
            names += self._read_variables()
        shown = segment.visit.root
        if segment.own is not None and shown is not None and shown.dictionary is not None:
            source.names["id"] = id
            source.unless(f"id({self._attributes(segment.own)}) == {shown.dictionary}")
        if segment.visit:
            names += self._visit()
        if segment.own is not None and shown is None:
            names += self._compare_attributes(segment.own)
        if segment.places.arrays:
            names += self._read_by(f"{self._name}.places.read_arrays()", len(segment.places.arrays))
        if segment.places.trees or segment.places.loose:
            names += self._read_trees()
        if segment.has_more:
            names += self._read_by(f"{self._name}.read_more()", len(segment.leaves) - len(names))
        order = sorted(zip(segment.numbers, names, strict=True))
        return [name for _, name in order]

    @property
    def _name(self) -> str:
        return f"s{self.number}"

    def _read_by(self, expression: str, count: int, *, may_be_none: bool = True) -> list[str]:
        """Read so many leaves by a call, which returns None if it has found a change."""
        name = self.source.fresh("y")
        self.source.add(f"{name} = {expression}")
        if may_be_none:
            self.source.unless(f"{name} is not None")
        self.arguments.lengths[name] = count
        return [f"{name}[{i}]" for i in range(count)]

    def _read_variables(self) -> list[str]:
        memory, values, count = f"k{self.number}", f"x{self.number}", len(self.segment.variables)
        self.source.add(f"{memory} = {self._name}.memory")
        self.source.add(f"{values} = {memory}.values")
        self.source.add(f"{values} = tuple({memory}.read() if {values} is None else {values})")
        self.arguments.lengths[values] = count
        return [f"{values}[{i}]" for i in range(count)]

    def _visit(self) -> list[str]:
        segment = self.segment
        if segment.lists is not None:
            self._compare_lists(segment.lists)
            return []
        source, visit, found = self.source, segment.visit, self.source.fresh()
        source.names["get_referents"] = get_referents
        if visit.slots is None and len(visit.kept) <= _ELEMENTS:
            return self._visit_by_name(visit)
        if visit.slots is not None:
            words, seen = self._words(visit.slots.words), source.constant(visit.slots.seen)
            slots = f"{self._name}.visit.slots"
            source.unless(f"{words}.tobytes() == {seen}[0] or {slots}.are_same()")
        now = source.fresh()
        if visit.visited:
            source.add(f"{found} = {self._name}.visit")
            source.add(f"{now} = get_referents(*{found}.visited)")
            ids = ids_in(source, now, len(visit.kept))
            pick = visit.pick_ids
            ids = f"{ids}.raw" if pick is None else f"{source.constant(pick)}({ids})"
            source.unless(f"len({now}) == {len(visit.kept)} and {ids} == {found}.ids")
        self._compare_names(visit)
        if not visit.variables:
            return []
        read = f"{source.constant(visit.pick_values)}({now})"
        if visit.slots is not None:
            read = f"{self._words(visit.slots.values)}.tolist()"
        return self._read_by(read, len(visit.variables), may_be_none=False)

    def _words(self, words: Words) -> str:
        """Return an expression for an array of words in memory."""
        return f"{self.source.constant(words.take)}({self.source.constant(words.places)})"

    def _visit_by_name(self, visit: Visit) -> list[str]:
        """Compare all that nodes refer to, and return the values of the Variables."""
        source, now = self.source, [self.source.fresh() for _ in visit.kept]
        pairs = [(name, source.fresh()) for name in compress(now, visit.kept)]
        source.add(f"[{', '.join(now)}] = get_referents(*{self._name}.visit.visited)")
        if pairs:
            source.add(f"[{', '.join([then for _, then in pairs])}] = {self._name}.visit.snapshot")
            source.unless(" and ".join([f"{now} is {then}" for now, then in pairs]))
        self._compare_names(visit)
        return [now[i] for i in visit.values]

    def _compare_names(self, visit: Visit) -> None:
        """Compare what a visit does not show: metadata, names and sizes."""
        source, metadata = self.source, f"{self._name}.visit.metadata"
        if visit.metadata:
            same = f"{metadata}.are_same()"
            if 0 < len(visit.metadata.cells) <= _FEW:
                seen = [source.fresh() for _ in visit.metadata.cells]
                source.add(f"[{', '.join(seen)}] = {metadata}.seen")
                pairs = zip(visit.metadata.cells, seen, strict=True)
                cells = [f"{source.constant(cell)}.value == {then}" for cell, then in pairs]
                same = f"({' and '.join(cells)}) or {same}"
            source.unless(same)
        if visit.compares_names:
            source.unless(f"{self._name}.visit.has_names()")

    def _compare_lists(self, lists: Sequence[tuple[list[Any], list[Any]]]) -> None:
        """Compare lists with what they held: the elements by name if there are not too many."""
        source = self.source
        if sum(len(held) for _, held in lists) > _ELEMENTS:
            source.add(f"for items, held in {self._name}.lists:")
            source.add(
                "if not (len(items) == len(held) and all(map(is_, items, held))): return AGAIN", 2
            )
            return
        pairs: list[str] = []
        same: list[str] = []
        for _, held in lists:
            names = [(source.fresh(), source.fresh()) for _ in held]
            targets = [
                f"({''.join([f'{name}, ' for name in side])})" for side in zip(*names, strict=True)
            ]
            pairs.append(f"({', '.join(targets or ['()', '()'])})")
            same += [f"{now} is {then}" for now, then in names]
        source.add(f"{', '.join(pairs)}, = {self._name}.lists")
        if same:
            source.unless(" and ".join(same))

    def _attributes(self, own: Attributes) -> str:
        """Return the name of the attributes of the root."""
        attributes = self.source.fresh()
        held = f"{self.source.constant(own.kind.attributes)}({self.root})"
        if has_plain_attributes(self.segment.root()):
            held = f"{self.root}.__dict__"
        self.source.add(f"{attributes} = {held}")
        return attributes

    def _compare_attributes(self, own: Attributes) -> list[str]:
        """Compare the attributes of a root that cannot report a write; return the arrays."""
        source, count = self.source, len(own.arrays)
        if len(own.names) > _ELEMENTS:
            return self._read_by(f"{self._name}.own.read({self.root})", count)
        attributes, pairs = (
            self._attributes(own),
            [(source.fresh(), source.fresh()) for _ in own.names],
        )
        if not own.records_names:
            source.unless(f"[*{attributes}] == {self._name}.own.names")
        source.unless(f"type({self.root}) is {source.constant(own.cls)}")
        source.add(f"{''.join([f'{now}, ' for now, _ in pairs])} = {attributes}.values()")
        source.add(f"{''.join([f'{then}, ' for _, then in pairs])} = {self._name}.own.values")
        compared = [pair for i, pair in enumerate(pairs) if i not in own.left_out]
        if compared:
            source.unless(" and ".join([f"{now} is {then}" for now, then in compared]))
        arrays = [pairs[i][0] for i in own.arrays]
        if arrays:
            types = source.constant(leaf_types(numbers=False))
            source.unless(" and ".join([f"type({name}) in {types}" for name in arrays]))
        return arrays

    def _read_trees(self) -> list[str]:
        """Read trees of arrays as if they were arguments."""
        source, places = self.source, self.segment.places
        found = [(source.fresh(), place) for place in places.trees]
        loose = [(source.fresh(), each) for each in places.loose]
        every = [(f"trees[{i}]", name) for i, (name, _) in enumerate(found)]
        every += [(f"loose[{i}].place", name) for i, (name, _) in enumerate(loose)]
        for expression, name in every:
            source.add(f"{name} = {self._name}.places.{expression}.get()")
        trees = [_tree_in(place) for _, place in found]
        if jax.tree.structure(trees) != places.treedef:
            raise Unplannable
        names: list[str] = []
        for (name, place), tree in zip(found, trees, strict=True):
            names += self._take(name, place, tree)
        for name, each in loose:
            names += self._take(name, each.place, _tree_in_loose(each))
        return names

    def _take(self, name: str, place: Place, tree: Any) -> list[str]:
        self.trees[place.at] = name
        leaves = self.arguments.leaves
        start = len(leaves)
        self.arguments.take(name, tree, numbers=False)
        names = leaves[start:]
        del leaves[start:]
        return names


def _tree_in(place: Place) -> Any:
    try:
        return place.get()
    except LookupError:
        raise Unplannable from None


def _tree_in_loose(loose: Loose) -> Any:
    """Return what is in a loose place, if it has the structure that is known."""
    tree = _tree_in(loose.place)
    try:
        if tuple(spine_of(tree).tokens) == loose.tokens:
            return tree
    except (NodeTypeError, StaticValueError):
        pass
    raise Unplannable
