"""Places: where a segment finds arrays, and trees of arrays, which are read anew on every call.

An attribute, an element, a Variable. What is in it may be replaced by something of the same
structure without making a plan stale: an array, or a **tree**, the state of an optax optimiser
say. A tree is a value, which JAX takes apart in C.

Lists and dictionaries are no values. They have identity, so a segment knows each of them and sees
when another one is in its place. But some functions put new ones there in every call: `model.cache
= {"k": k, "v": v}`. Such a place is **loose**: what is in it is read as if it were an argument, and
belongs to the spine. A place becomes loose when a function is seen to do that, and is remembered
here, so that plans of other functions for the same objects make it loose, too. That is a hint, no
more: whoever puts something in a place of a Module tells those to whom it is not loose.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.transforms._spine import Spine, are_arrays
from anabranch.transforms._trees import statics_of
from anabranch.transforms._watch import Unplannable


class _Value:
    """The only key of its kind."""


VALUE = _Value()
"""The key of what a Variable holds."""


class Place(NamedTuple):
    """Where something is."""

    holder: Any  # attributes or elements, or a Variable
    key: Any
    at: tuple[int, int]  # the index of the object, and the position in it

    def get(self) -> Any:
        """Return what is there.

        Raises:
            LookupError: somebody has deleted it.
        """
        return self.holder._value if self.key is VALUE else self.holder[self.key]


class Loose(NamedTuple):
    """A place with a tree of arrays that lists and dictionaries are part of."""

    place: Place
    tokens: tuple[Any, ...]  # of its spine

    def read(self, nodes: list[Any]) -> list[Any] | None:
        """Return the arrays, or None if the structure has changed; add the containers to nodes."""
        try:
            spine = spine_of(self.place.get())
        except (LookupError, Unplannable, NodeTypeError, StaticValueError):
            return None
        nodes += spine.nodes
        return spine.leaves if tuple(spine.tokens) == self.tokens else None


def spine_of(tree: Any) -> Spine:
    """Read a tree of arrays.

    Raises:
        Unplannable, NodeTypeError, StaticValueError: it is none.
    """
    spine = Spine()
    spine.add(tree, numbers=False)
    return spine


class Places:
    """All places of a segment."""

    def __init__(self) -> None:
        self.arrays: list[Place] = []
        self.trees: list[Place] = []
        self.treedef: Any = None  # of the list of all trees
        self.statics: tuple[Any, ...] = ()  # see `statics_of`
        self.loose: list[Loose] = []

    def __bool__(self) -> bool:
        return bool(self.arrays or self.trees or self.loose)

    def read(self, nodes: list[Any]) -> list[Any] | None:
        """Return the arrays, or None if the structure has changed.

        Arguments:
            nodes: the lists and dictionaries in loose places are added to it.
        """
        leaves = self.read_arrays()
        if leaves is not None and self.trees:
            found = self._read_trees()
            leaves = None if found is None else leaves + found
        for loose in self.loose:
            found = loose.read(nodes)
            if leaves is None or found is None:
                return None
            leaves += found
        return leaves

    def read_arrays(self) -> list[Any] | None:
        """Return what is in the places with arrays, or None if that is something else now."""
        try:
            arrays = [holder[key] for holder, key, _ in self.arrays]
        except LookupError:
            return None
        return arrays if are_arrays(arrays) else None

    def _read_trees(self) -> list[Any] | None:
        try:
            trees = [place.get() for place in self.trees]
        except LookupError:
            return None
        leaves, treedef = jax.tree.flatten(trees)
        same = treedef == self.treedef and (not self.statics or statics_of(treedef) == self.statics)
        return leaves if same and are_arrays(leaves) else None


_MOST = 4096
_loosened: dict[tuple[int, Hashable], None] = {}


def loosen(obj: Any, key: Hashable) -> None:
    """Remember that functions put new lists or dictionaries in a place of an object."""
    if len(_loosened) >= _MOST:
        _loosened.clear()
    _loosened[id(obj), key] = None  # of another object, one day: that costs time, and no more


def is_loosened(obj: Any, key: Hashable) -> bool:
    """Tell whether that is remembered."""
    return (id(obj), key) in _loosened
