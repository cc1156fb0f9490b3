"""Step 1: flatten objects into a graphdef and leaves, and remember what was where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch.errors import StaticValueError, ValueWriteError
from anabranch.graph import _kinds, _static
from anabranch.graph._build import recipe_of
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._turn import COMMITS, in_turn
from anabranch.graph._walk import Contents, Walk, content_of, contents_of


class Flat:
    """What a walk of the caller's objects found.

    Arguments:
        graphdef: the structure.
        leaves: the caller's arrays and numbers.
        objects: by index: the RefMap, read the other way round.
        held: by index, what each object held; of one that is missing, the value is a leaf.
    """

    __slots__ = ("_contents", "graphdef", "held", "leaves", "objects")

    def __init__(
        self,
        graphdef: GraphDef,
        leaves: list[Any],
        objects: list[Any],
        held: Mapping[int, Sequence[Any]],
    ) -> None:
        self.graphdef, self.leaves, self.objects, self.held = graphdef, leaves, objects, held
        self._contents: list[Contents] | None = None

    @property
    def contents(self) -> list[Contents]:
        """What each object held: extra, keys and values."""
        if self._contents is None:
            self._contents = contents_of(self.graphdef.entries, self.held, self.leaves)
        return self._contents

    def content(self, index: int) -> Contents:
        """Return what one object held."""
        if self._contents is not None:
            return self._contents[index]
        entry, values = self.graphdef.entries[index], self.held.get(index)
        return content_of(entry, values, self.leaves)

    def owner(self, leaf: int) -> Any:
        """Return the Variable that holds a leaf, or the plain array itself."""
        variable = self.graphdef.owners[leaf]
        return self.leaves[leaf] if variable < 0 else self.objects[variable]


def flatten(obj: Any, *, numbers: bool = False) -> Flat:
    """Flatten an object and all that it reaches.

    Arguments:
        obj: any object.
        numbers: whether Python numbers in containers around nodes are leaves (as in arguments).

    Raises:
        NodeTypeError: something is neither an array, a node, a value nor a static.
    """
    ended = COMMITS.ended
    try:
        flat = _flatten(obj, numbers=numbers)
        if COMMITS.begun == ended:
            return flat
    except Exception:
        if COMMITS.begun == ended:
            raise
    # another thread was writing: what was seen may be half of it, or an emptied dictionary
    return in_turn(_flatten)(obj, numbers=numbers)


def _flatten(obj: Any, *, numbers: bool) -> Flat:
    walk = Walk()
    walk.add(obj, numbers=numbers)
    graphdef = GraphDef.of(tuple(walk.tokens), len(walk.leaves))
    return Flat(graphdef, walk.leaves, walk.objects, walk.held)


def check_opaques(graphdef: GraphDef) -> None:
    """Restore registered statics that were written, and raise for the first of them.

    Raises:
        ValueWriteError: an object that is registered as static was changed.
    """
    found: Any = None
    for _, entry in recipe_of(graphdef).statics:
        for edge in entry.edges:
            if type(edge) is tuple and edge[0] is _static.OPAQUE:
                _, _, reference, keys, encoded = edge
                extra, now, values = _kinds.OBJECT.open(reference.obj)
                if now != keys or tuple([_encoded(value) for value in values]) != encoded:
                    old = [_static.decode(value) for value in encoded]
                    _kinds.OBJECT.fill(reference.obj, extra, keys, old)
                    found = reference.obj if found is None else found
    if found is not None:
        raise ValueWriteError(
            f"a {type(found).__name__}, which is registered with `static=True`, was changed by "
            "the function; it was restored. Register the class with `@graph.node` instead"
        )


def _encoded(value: Any) -> Any:
    try:
        return _static.encode(value)
    except StaticValueError:
        return None  # an array, say, that the function has put there


Namer = Callable[[int], str]


def namer(graphdef: GraphDef) -> Namer:
    """Return a function from the index of an entry to how it is written, for error messages."""

    def name(index: int) -> str:
        above: dict[int, tuple[int, int]] = {}
        for visit in graphdef.visit():
            if type(visit.edge) is int and visit.edge >= 0 and visit.first:
                above[visit.edge] = (visit.parent, visit.position)
                if visit.edge == index:
                    break
        steps: list[tuple[int, int]] = []
        while index in above and above[index][0] >= 0:
            steps.append(above[index])
            index = above[index][0]
        text = ""
        for holder, position in reversed(steps):
            entry = graphdef.entry(holder)
            text = entry.kind.show_below(text, entry.keys[position])
        return text.lstrip(".")

    return name
