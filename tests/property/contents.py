"""What an object holds, in order, by labels that are Python: `.a`, `[0]`, `['k']`, `.value`.

Two objects with equal labels have the same attributes or keys in the same order, type for type.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import anabranch as ab
from tests.property.objects import ATTRIBUTE_NODES, DICTS, LISTS, Pair, Slotted

Edges = list[tuple[str, Any]]
VARIABLES: list[type] = [ab.Variable]
HOLDERS: list[type] = [*ATTRIBUTE_NODES]
"""Base classes of what there is; those of other libraries are added."""
_MISSING = object()


def is_node(obj: Any) -> bool:
    """Tell what is mutable and has identity."""
    return is_variable(obj) or isinstance(obj, tuple(HOLDERS)) or type(obj) in DICTS + LISTS


def is_variable(obj: Any) -> bool:
    """Tell what holds a value and metadata."""
    return isinstance(obj, tuple(VARIABLES))


def is_value(obj: Any) -> bool:
    """Tell what is immutable and holds other things."""
    return isinstance(obj, (tuple, Pair, types.MethodType, functools.partial))


def is_array(obj: Any) -> bool:
    return isinstance(obj, (jax.Array, np.ndarray))


def may_be_traced(obj: Any) -> bool:
    """Tell the numbers that programs put where arguments are, from those that stay static.

    Static integers are below 300 and static floats are not positive multiples of 1/4.
    """
    return (type(obj) is int and obj >= 300) or (type(obj) is float and obj > 0 and obj % 0.25 == 0)


def edges(obj: Any) -> Edges:
    """List what a node or a value holds, under labels."""
    if is_variable(obj):
        metadata = obj.get_metadata()
        return [(".value", obj.value), *((f"<{k}>", metadata[k]) for k in metadata)]
    if type(obj) in LISTS:
        return [(f"[{i}]", child) for i, child in enumerate(obj)]
    if type(obj) in DICTS:
        return [(f"[{key!r}]", child) for key, child in obj.items()]
    if isinstance(obj, types.MethodType):
        return [(".__func__", obj.__func__), (".__self__", obj.__self__)]
    if isinstance(obj, functools.partial):
        keywords = [(f".keywords[{k!r}]", child) for k, child in obj.keywords.items()]
        positional = [(f".args[{i}]", child) for i, child in enumerate(obj.args)]
        return [(".func", obj.func), *positional, *keywords]
    if isinstance(obj, tuple):
        return [(f"[{i}]", child) for i, child in enumerate(obj)]
    return [(f".{name}", child) for name, child in _attributes(obj).items()]


def _attributes(obj: Any) -> dict[str, Any]:
    if isinstance(obj, Slotted):
        found = {name: getattr(obj, name, _MISSING) for name in ("a", "b", "c")}
        return {name: child for name, child in found.items() if child is not _MISSING}
    own = ("_pytree__state", "_pytree__nodes")  # of objects of flax
    return {name: child for name, child in vars(obj).items() if name not in own}


def reachable(roots: Iterable[Any]) -> list[Any]:
    """List the nodes that are reached from some objects."""
    found: dict[int, Any] = {}
    values: list[Any] = []  # kept alive: a bound method is made when it is read
    stack = list(roots)
    while stack:
        obj = stack.pop()
        if is_node(obj):
            if id(obj) in found:
                continue
            found[id(obj)] = obj
        elif is_value(obj):
            values.append(obj)
        else:
            continue
        stack.extend(child for _, child in edges(obj))
    return list(found.values())


def signature_of(roots: Iterable[Any]) -> list[Any]:
    """Describe the structure of objects: equal if they differ in what arrays hold, at most.

    Containers may be others of the same structure; all other nodes are themselves.
    """
    numbers: dict[int, int] = {}
    kept: list[Any] = list(roots)
    stack, found = kept[::-1], list[Any]()
    while stack:
        obj = stack.pop()
        if is_array(obj):
            found.append((type(obj), obj.shape, obj.dtype, getattr(obj, "weak_type", False)))
        elif is_node(obj) or is_value(obj):
            new = id(obj) not in numbers
            number = numbers.setdefault(id(obj), len(numbers)) if is_node(obj) else -1
            itself = is_node(obj) and type(obj) not in DICTS + LISTS
            found.append((type(obj), number, id(obj) if itself else None))
            if new:
                kept.append(obj)
                held = edges(obj)
                found.append([label for label, _ in held])
                stack.extend(child for _, child in reversed(held))
        else:
            found.append((type(obj), repr(obj)))
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What some objects hold at one moment, by identity."""

    nodes: list[Any]
    held: list[Edges] = field(init=False)
    raw: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", [edges(node) for node in self.nodes])
        object.__setattr__(self, "raw", [raw(node) for node in self.nodes])

    def changes(self) -> list[str]:
        """Name every entry that is not the very same object any more."""
        found: list[str] = []
        for i, (node, before) in enumerate(zip(self.nodes, self.held, strict=True)):
            now, name = edges(node), f"{type(node).__name__} {i}"
            if [label for label, _ in now] != [label for label, _ in before]:
                shown = [[label for label, _ in side] for side in (before, now)]
                found.append(f"{name} had {shown[0]}, has {shown[1]}")
                continue
            found += [
                f"{name}{label} was {old!r:.80}, is {new!r:.80}"
                for (label, old), (_, new) in zip(before, now, strict=True)
                if old is not new and not _same_key(label, old, new)
            ]
        return found

    def restore(self) -> None:
        """Put everything back."""
        for node, held in zip(self.nodes, self.raw, strict=True):
            put_back(node, held)


def _same_key(label: str, old: Any, new: Any) -> bool:
    """Metadata are handed out in a new dictionary, but its values are the ones that were set."""
    return label.startswith("<") and type(old) is type(new) and old == new


def raw(node: Any) -> Any:
    """Return what a node holds, for `put_back`."""
    if is_variable(node):
        return node.value, dict(node.get_metadata())
    if type(node) in LISTS:
        return list(node)
    if type(node) in DICTS:
        return list(node.items())
    return _attributes(node)


def put_back(node: Any, held: Any) -> None:
    """Give a node these contents."""
    if is_variable(node):
        value, metadata = held
        if node.value is not value:
            node.value = value
        # There is no public way to take metadata away; restored worlds only ever run plainly.
        if isinstance(node, ab.Variable):
            object.__setattr__(node, "_metadata", types.MappingProxyType(metadata))
        else:
            node.set_metadata(metadata)
    elif type(node) in LISTS:
        node.clear()
        node.extend(held)
    elif type(node) in DICTS:
        node.clear()
        node.update(held)
    else:
        for name in _attributes(node):
            delattr(node, name)
        for name, child in held.items():
            setattr(node, name, child)
