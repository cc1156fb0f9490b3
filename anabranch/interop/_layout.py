"""Where flax keeps what: the one door to its insides, for all releases that are supported.

Releases before 0.12 call the attributes `_object__...` and the value of a Variable `raw_value`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx import tracers

from anabranch.graph._kind import Cell

try:
    from flax.nnx import graphlib as _registry
except ImportError:
    from flax.nnx import graph as _registry

_set: Callable[[Any, str, Any], None] = object.__setattr__

BASE: Any = getattr(nnx, "Pytree", None) or nnx.Object
"""The class of everything that has attributes: modules, streams, optimizers."""

_PREFIX = "_pytree" if hasattr(nnx.Module, "_pytree__nodes") else "_object"
STATE, NODES = f"{_PREFIX}__state", f"{_PREFIX}__nodes"
OWN = frozenset({STATE, NODES})
"""The attributes that are bookkeeping."""

VALUE: str = next(slot for slot in nnx.Variable.__slots__ if slot.endswith("raw_value"))
raw_value: Callable[[Any], Any] = operator.attrgetter(VALUE)


CELL = Cell(
    (lambda variables: [variable._raw_value for variable in variables])
    if VALUE == "_raw_value"
    else (lambda variables: [variable.raw_value for variable in variables]),
    raw_value,
    vars(nnx.Variable)[VALUE].__set__,
    operator.attrgetter("_var_metadata"),
)


def new_variable(cls: Any) -> Any:
    """Make a Variable of the current trace, without value and metadata."""
    variable = object.__new__(cls)
    _set(variable, "_trace_state", tracers.TraceState())
    return variable


def set_value(variable: Any, value: Any) -> None:
    """Set the value of a Variable, whatever trace it belongs to."""
    _set(variable, VALUE, value)


def set_metadata(variable: Any, metadata: dict[str, Any]) -> None:
    """Set the metadata of a Variable, whatever trace it belongs to."""
    _set(variable, "_var_metadata", metadata)


def variable_is_owned(variable: Any) -> bool:
    """Tell whether a Variable belongs to the current trace."""
    return variable._trace_state.is_valid()


def new_state(initializing: bool, is_setup: bool) -> Any:
    """Make the bookkeeping of an object of the current trace."""
    return _STATE_TYPE(initializing, is_setup)


def plans_of(state: Any) -> Any:
    """Return what plans know of an object, by plan; it hangs where no function of flax looks."""
    trace_state = state._trace_state
    if type(trace_state) is not _PlannedTrace:
        kept = _PlannedTrace()
        kept._jax_trace = trace_state._jax_trace
        kept.plans = weakref.WeakKeyDictionary()
        state._trace_state = trace_state = kept
    return trace_state.plans


class _PlannedTrace(tracers.TraceState):
    """A trace state with room; copies and pickles are plain ones."""

    __slots__ = ("plans",)

    plans: weakref.WeakKeyDictionary[Any, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return (tracers.TraceState, ())


def state_is_owned(state: Any) -> bool:
    """Tell whether an object with this bookkeeping belongs to the current trace."""
    return state.trace_state.is_valid()


def static_nodes(nodes: Any) -> Any:
    """Return which attributes are data in a form that is hashed and compared in C."""
    return nodes if isinstance(nodes, frozenset) else tuple(nodes._mapping.items())


def nodes_of(static: Any) -> Any:
    """Return which attributes are data, as flax keeps it."""
    return static if isinstance(static, frozenset) else _MAPPING_TYPE(dict(static), copy=False)


class _Probe(BASE):
    pass


_STATE_TYPE: Any = type(getattr(_Probe(), STATE))
_MAPPING_TYPE: Any = type(getattr(_Probe, NODES))

register_pytree_node_type: Callable[..., None] = _registry.register_pytree_node_type
"""Tell flax how objects of a class are taken apart."""
