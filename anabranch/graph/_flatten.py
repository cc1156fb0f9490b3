"""Step 1: flatten objects into a graphdef and leaves, and remember what was where."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.graph import _kinds
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._walk import Contents, Walk


@dataclasses.dataclass(slots=True)
class Flat:
    """What a walk of the caller's objects found."""

    graphdef: GraphDef
    leaves: list[Any]  # the caller's arrays and numbers
    objects: list[Any]  # by index: the RefMap, read the other way round
    contents: list[Contents]  # what each object held
    opaques: list[tuple[Any, Contents]]  # registered statics, compared after the trace

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
    walk = Walk()
    root = walk.edge(obj, numbers=numbers)
    entries: Any = tuple(walk.entries)  # none is None once the walk is done
    graphdef = GraphDef(entries, root, len(walk.leaves))
    return Flat(graphdef, walk.leaves, walk.objects, walk.contents, walk.opaques)


def is_same(a: Contents, b: Contents) -> bool:
    """Compare contents: keys and static extras by value, everything else by identity."""
    (extra, keys, values), (old_extra, old_keys, old_values) = a, b
    return (
        len(values) == len(old_values)
        and all(map(operator.is_, values, old_values))
        and keys == old_keys
        and (extra is old_extra or extra == old_extra)
    )


def changed_opaque(opaques: Sequence[tuple[Any, Contents]]) -> Any:
    """Restore registered statics that were written; return the first such object, or None."""
    found = None
    for obj, (extra, keys, values) in opaques:
        if not is_same(_kinds.OBJECT.open(obj), (extra, keys, values)):
            _kinds.OBJECT.fill(obj, extra, keys, values)
            found = obj if found is None else found
    return found


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
        parts: list[str] = []
        while index in above and above[index][0] >= 0:
            index, position = above[index]
            entry = graphdef.entry(index)
            parts.append(entry.kind.show_key(entry.keys[position]))
        return "".join(reversed(parts)).lstrip(".")

    return name
