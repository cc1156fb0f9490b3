"""Where the objects of a program are: the expressions that reach them at this moment."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import anabranch as ab
from tests.property.contents import edges, is_array, is_node, is_value, may_be_traced
from tests.property.objects import ATTRIBUTE_NODES

_DEEPEST = 4
_MOST = 80


@dataclass(frozen=True, slots=True)
class Place:
    """An expression and what it evaluates to now."""

    path: str
    obj: Any
    assignable: bool
    """Whether `path = ...` and `del path` are statements about a mutable object."""


@dataclass(slots=True)
class Places:
    """Everything that is reached from some names, an object by two paths at most."""

    names: dict[str, Any]
    rng: random.Random
    all: list[Place] = field(default_factory=list)
    nodes: int = 0

    def __post_init__(self) -> None:
        seen: Counter[int] = Counter()
        roots = [Place(name, obj, False) for name, obj in self.names.items()]
        self.rng.shuffle(roots)
        todo = deque((place, 0) for place in roots)
        while todo and len(self.all) < _MOST:
            place, depth = todo.popleft()
            obj = place.obj
            if is_node(obj):
                seen[id(obj)] += 1
                if seen[id(obj)] > 2:
                    continue
            self.all.append(place)
            if depth < _DEEPEST:
                todo.extend((inner, depth + 1) for inner in _inside(place))
        self.nodes = len(seen)

    def where(self, *kinds: type) -> list[Place]:
        return [place for place in self.all if type(place.obj) in kinds]

    def variables(self) -> list[Place]:
        return [place for place in self.all if isinstance(place.obj, ab.Variable)]

    def arrays(self) -> list[Place]:
        return [place for place in self.all if is_array(place.obj)]

    def holders(self) -> list[Place]:
        return self.where(*ATTRIBUTE_NODES)

    def movable(self) -> list[Place]:
        """What may be put anywhere: all but the small numbers, which are static on objects only."""
        return [place for place in self.all if is_movable(place.obj)]

    def slots(self) -> list[Place]:
        return [place for place in self.all if place.assignable]


def is_movable(obj: Any) -> bool:
    return not isinstance(obj, int | float) or may_be_traced(obj)


def _inside(place: Place) -> list[Place]:
    obj, path = place.obj, place.path
    if isinstance(obj, ab.Variable):
        # A pytree in a Variable is read and written as a whole.
        return [Place(f"{path}.value", obj.value, False)] if is_array(obj.value) else []
    if is_node(obj):
        return [Place(path + label, child, True) for label, child in edges(obj)]
    if is_value(obj):
        labels = [(label, child) for label, child in edges(obj) if label != ".__func__"]
        return [Place(path + label, child, False) for label, child in labels]
    return []
