"""Teach flax to read our States, so that `nnx.Optimizer.update` takes gradients as they are."""

from __future__ import annotations

from typing import Any

from flax import nnx

from anabranch.graph._state import State
from anabranch.interop import _layout
from anabranch.interop._nnx_state import from_nnx_state, to_nnx_state


def _flatten(state: State) -> tuple[list[tuple[Any, Any]], None]:
    nested: Any = to_nnx_state(state)
    items = nested.raw_mapping.items() if isinstance(nested, nnx.State) else [("value", nested)]
    return sorted(items, key=lambda item: (type(item[0]) is str, item[0])), None


def _unflatten(pairs: Any, _: None) -> State:
    return from_nnx_state(nnx.State(dict(pairs)))


def teach_flax() -> None:
    """Register State with flax; to be called once."""
    _layout.register_pytree_node_type(State, flatten=_flatten, unflatten=_unflatten)
