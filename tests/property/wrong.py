"""Transforms that do nothing, rightly and wrongly: the comparison has to tell which is which.

`undo` is a correct transform: the plain call, and everything put back if it raises. Each of
`DAMAGES` spoils one thing after the call, if it finds it, and tells whether it did.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import anabranch as ab
from tests.property.contents import Snapshot, edges, is_array, is_node, is_value, reachable
from tests.property.objects import ATTRIBUTE_NODES, DICTS
from tests.property.spread import LANES
from tests.property.worlds import Transform, same_leaf

Damage = Callable[[Snapshot, list[Any]], bool]


def undo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call plainly; put everything back if the call raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = Snapshot(reachable([args, *kwargs.values()]))
        try:
            return function(*args, **kwargs)
        except Exception:
            before.restore()
            raise

    return call


class Wrong:
    """`undo`, and a damage after every call that returned; `acted` counts the damages."""

    def __init__(self, damage: Damage, right: Transform = undo) -> None:
        self.damage = damage
        self.right = right
        self.acted = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        inner = self.right(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = Snapshot(reachable([args, *kwargs.values()]))
            result = [inner(*args, **kwargs)]
            self.acted += self.damage(before, [result, args, *kwargs.values()])
            return result[0]

        return call


# Every damage gets what the arguments held before, and the roots after: a list of the result first.


def _slots(roots: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    for node in reachable(roots):
        if not isinstance(node, ab.Variable):
            yield from ((node, label, child) for label, child in edges(node))


def _assign(holder: Any, label: str, new: Any) -> None:
    exec(f"holder{label} = new", {}, {"holder": holder, "new": new})


def _written_statics(before: Snapshot) -> Iterator[tuple[Any, str, Any, Any]]:
    for node, held in zip(before.nodes, before.held, strict=True):
        if not isinstance(node, ATTRIBUTE_NODES):
            continue
        old = dict(held)
        for label, new in edges(node):
            if not (is_node(new) or is_value(new) or is_array(new)):
                yield node, label, old.get(label), new


def drop_static_write(before: Snapshot, roots: list[Any]) -> bool:
    for node, label, old, new in _written_statics(before):
        if not (is_node(old) or is_value(old) or same_leaf(old, new)):
            _assign(node, label, old)
            return True
    return False


def confuse_equal_statics(before: Snapshot, roots: list[Any]) -> bool:
    """Take 1 for True, 1 for 1.0 and 0.0 for -0.0."""
    for node, label, old, new in _written_statics(before):
        if old is not new and new in (0, 1):
            _assign(node, label, {int: bool, bool: int}.get(type(new), int)(new))
            return True
        if type(new) is float and str(new) == "-0.0":
            _assign(node, label, 0.0)
            return True
    return False


def static_becomes_array(before: Snapshot, roots: list[Any]) -> bool:
    for node, label, old, new in _written_statics(before):
        if type(new) is int and new < 300 and old is not new:
            _assign(node, label, jnp.asarray(new))
            return True
    return False


def copy_an_object(before: Snapshot, roots: list[Any]) -> bool:
    """Put a copy everywhere in the place of an object."""
    slots = list(_slots(roots))
    for old in before.nodes:
        places = [(holder, label) for holder, label, child in slots if child is old]
        if places:
            new = copy.copy(old)
            for holder, label in places:
                _assign(holder, label, new)
            return True
    return False


def lose_an_alias(before: Snapshot, roots: list[Any]) -> bool:
    slots = list(_slots(roots))
    for holder, label, child in slots:
        if is_node(child) and sum(other is child for _, _, other in slots) > 1:
            _assign(holder, label, copy.copy(child))
            return True
    return False


def merge_equal_objects(before: Snapshot, roots: list[Any]) -> bool:
    """Make one object of two that hold the same."""
    first: dict[tuple[type, str], Any] = {}
    for holder, label, child in _slots(roots):
        if is_node(child):
            other = first.setdefault((type(child), str(edges(child))), child)
            if other is not child:
                _assign(holder, label, other)
                return True
    return False


def return_a_copy(before: Snapshot, roots: list[Any]) -> bool:
    if any(roots[0][0] is node for node in before.nodes):
        roots[0][0] = copy.copy(roots[0][0])
        return True
    return False


def reorder_keys(before: Snapshot, roots: list[Any]) -> bool:
    for node in reachable(roots):
        if type(node) in DICTS and len(node) > 1:
            node[next(iter(node))] = node.pop(next(iter(node)))
            return True
    return False


def reorder_attributes(before: Snapshot, roots: list[Any]) -> bool:
    for node in reachable(roots):
        if isinstance(node, ATTRIBUTE_NODES) and hasattr(node, "__dict__") and len(vars(node)) > 1:
            name, child = next(iter(vars(node).items()))
            delattr(node, name)
            setattr(node, name, child)
            return True
    return False


def forget_detached(before: Snapshot, roots: list[Any]) -> bool:
    """Lose what was written to objects that are no longer reached."""
    attached = {id(node) for node in reachable(roots)}
    lost = [
        (variable, old)
        for variable, old in _values(before)
        if id(variable) not in attached and not same_leaf(variable.value, old)
    ]
    for variable, old in lost:
        variable.value = old
    return bool(lost)


def _values(before: Snapshot) -> Iterator[tuple[Any, Any]]:
    for node, held in zip(before.nodes, before.held, strict=True):
        if isinstance(node, ab.Variable) and isinstance(node.value, jax.Array) and node.value.size:
            yield node, dict(held).get(".value")


def off_by_one(before: Snapshot, roots: list[Any]) -> bool:
    for variable, old in _values(before):
        if variable.value is not old:
            variable.value = variable.value.at[(0,) * variable.value.ndim].add(1)
            return True
    return False


def change_dtype(before: Snapshot, roots: list[Any]) -> bool:
    for variable, old in _values(before):
        if variable.value is not old:
            variable.value = variable.value.astype({"f": "int32", "i": "float32"}[_kind(variable)])
            return True
    return False


def _kind(variable: Any) -> str:
    return variable.value.dtype.kind


def write_what_was_read(before: Snapshot, roots: list[Any]) -> bool:
    """Give a Variable that was not written an equal array."""
    for variable, old in _values(before):
        if variable.value is old:
            variable.value = jnp.array(old, copy=True)
            return True
    return False


def lose_metadata(before: Snapshot, roots: list[Any]) -> bool:
    for node, held in zip(before.nodes, before.held, strict=True):
        if isinstance(node, ab.Variable) and edges(node)[1:]:
            name, value = next(iter(node.get_metadata().items()))
            node.set_metadata(**{name: "lost" if value != "lost" else "found"})
            return bool(held)
    return False


def wrong_kind(before: Snapshot, roots: list[Any]) -> bool:
    """Put another kind of Variable in the place of a new one."""
    for holder, label, child in _slots(roots):
        if type(child) is ab.Param and not any(child is node for node in before.nodes):
            _assign(holder, label, ab.Variable(child.value, **child.get_metadata()))
            return True
    return False


DAMAGES: list[Damage] = [
    drop_static_write,
    confuse_equal_statics,
    static_becomes_array,
    copy_an_object,
    lose_an_alias,
    merge_equal_objects,
    return_a_copy,
    reorder_keys,
    reorder_attributes,
    forget_detached,
    off_by_one,
    change_dtype,
    write_what_was_read,
    lose_metadata,
    wrong_kind,
]


def keep_going(function: Callable[..., Any]) -> Callable[..., Any]:
    """Swallow what the function raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return undo(function)(*args, **kwargs)
        except Exception:
            return None

    return call


def wrap_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Raise another type of error."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return undo(function)(*args, **kwargs)
        except Exception as error:
            raise RuntimeError("wrapped") from error

    return call


def remember(function: Any) -> Callable[..., Any]:
    """Keep what a function captures now."""
    cells = [types.CellType(cell.cell_contents) for cell in function.__closure__ or ()]
    scope = dict(function.__globals__)
    made = types.FunctionType(function.__code__, scope, closure=tuple(cells) or None)
    made.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return made


def once_more(transform: Transform) -> Transform:
    """Call the function once more than is right."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            transform(function)(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return wrap


def other_lanes(before: Snapshot, roots: list[Any]) -> bool:
    """Give the lanes of a Variable to other lanes."""
    for variable, _ in _values(before):
        value = variable.value
        if value.shape[:1] == (LANES,) and not same_leaf(value, value[::-1]):
            variable.value = value[::-1]
            return True
    return False
