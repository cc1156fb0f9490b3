"""Types that are registered with JAX: values, opened one level at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from anabranch.errors import NodeTypeError
from anabranch.graph import _static
from anabranch.graph._kind import Kind, Opened


class PytreeKind(Kind):
    """A type that is registered with JAX, opened one level by JAX."""

    __slots__ = ()
    identity = False

    def open(self, obj: Any) -> Opened:
        pairs, treedef = jtu.tree_flatten_with_path(obj, is_leaf=lambda x: x is not obj)
        aux = treedef.node_data()
        exact = None if aux is None else static_part(aux[1], treedef)
        keys = tuple([_pytree_key(path) for path, _ in pairs])
        return (treedef, exact), keys, tuple([child for _, child in pairs])

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(extra[0], values)

    def show_key(self, key: Any) -> str:
        return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def static_part(aux: Any, treedef: Any) -> Any:
    """Return the auxiliary data of a node in a form that is compared exactly."""
    return _static.encode(_hashable(aux, treedef))


def _hashable(aux: Any, treedef: Any) -> Any:
    """Return the auxiliary data if it can be hashed; JAX compares it otherwise."""
    if isinstance(aux, (list, dict)):
        aux = tuple(aux.items() if isinstance(aux, dict) else aux)
    elif dataclasses.is_dataclass(aux) and type(aux).__hash__ is None:
        aux = tuple([getattr(aux, field.name) for field in dataclasses.fields(aux)])
    try:
        hash(aux)
    except TypeError:
        raise NodeTypeError(
            f"the static part of this {treedef.node_data()[0].__qualname__}, as it is registered "
            "with JAX, cannot be hashed: move arrays to its children, or make the rest hashable"
        ) from None
    return aux


def _pytree_key(path: tuple[Any, ...]) -> Any:
    entry = path[0]
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)
