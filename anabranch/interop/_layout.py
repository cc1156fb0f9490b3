"""Where flax keeps what: the one door to its insides, for all releases that are supported.

Releases before 0.12 call the attributes `_object__...` and the value of a Variable `raw_value`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from flax import nnx
from flax.nnx import tracers

from anabranch.graph._kind import Cell
from anabranch.graph._tokens import current_token, is_level, levels_are_open, token_of, trace_of

try:
    from flax.nnx import graphlib as _registry
except ImportError:
    from flax.nnx import graph as _registry

BASE: Any = getattr(nnx, "Pytree", None) or nnx.Object
"""The class of everything that has attributes: modules, streams, optimizers."""

_PREFIX = "_pytree" if hasattr(nnx.Module, "_pytree__nodes") else "_object"
STATE, NODES = f"{_PREFIX}__state", f"{_PREFIX}__nodes"
OWN = frozenset({STATE, NODES})
"""The attributes that are bookkeeping."""

VALUE: str = next(slot for slot in nnx.Variable.__slots__ if slot.endswith("raw_value"))
SLOTS: dict[str, Any] = {name: vars(nnx.Variable)[name] for name in nnx.Variable.__slots__}
"""What a Variable holds. Read so, nobody is asked whether another one stands for it."""

raw_value: Callable[[Any], Any] = SLOTS[VALUE].__get__
metadata_of: Callable[[Any], Any] = SLOTS["_var_metadata"].__get__
_trace_state: Callable[[Any], Any] = SLOTS["_trace_state"].__get__
_set_trace_state: Callable[[Any, Any], None] = SLOTS["_trace_state"].__set__
set_value: Callable[[Any, Any], None] = SLOTS[VALUE].__set__
set_metadata: Callable[[Any, dict[str, Any]], None] = SLOTS["_var_metadata"].__set__


CELL = Cell(VALUE, raw_value, set_value, metadata_of, _trace_state)


def new_variable(cls: Any) -> Any:
    """Make a Variable of the current trace, without value and metadata."""
    variable = object.__new__(cls)
    _set_trace_state(variable, _new_trace_state())
    return variable


def new_variable_of(cls: Any, token: Any) -> Any:
    """Make a Variable of the trace that a token belongs to, without value and metadata."""
    variable = new_variable(cls)
    _trace_state(variable)._jax_trace = _trace_for(token)
    return variable


def known_metadata(variable: Any) -> Any:
    """Return the metadata of a Variable, None if it has none yet."""
    try:
        return metadata_of(variable)
    except AttributeError:
        return None


def new_state(initializing: bool, is_setup: bool) -> Any:
    """Make the bookkeeping of an object of the current trace."""
    state = _STATE_TYPE(initializing, is_setup)
    state._trace_state = _new_trace_state()
    return state


def token_of_variable(variable: Any) -> Any:
    """Return the token of the trace that a Variable was made in."""
    return _token(_trace_state(variable))


def variable_is_owned(variable: Any) -> bool:
    """Tell whether a Variable belongs to the current trace."""
    return _is_owned(_trace_state(variable))


def state_is_owned(state: Any) -> bool:
    """Tell whether an object with this bookkeeping belongs to the current trace."""
    return _is_owned(state._trace_state)


# The trace of an object is an opaque object of JAX, which knows nothing of our levels.


class _LevelTrace:
    """In its place for what is made at a level of its own."""

    def __init__(self, level: Any) -> None:
        self.level = level

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LevelTrace) and other.level is self.level

    def __hash__(self) -> int:
        return id(self.level)


jax_trace: Callable[[], Any] = tracers.current_jax_trace
_JAX_TRACE: Any = type(jax_trace())


def trace_or_level() -> Any:
    """Return what the objects that are made now belong to."""
    token = current_token() if levels_are_open() else None
    return _LevelTrace(token) if is_level(token) else jax_trace()


def _token(trace_state: Any) -> Any:
    trace = trace_state._jax_trace
    return trace.level if type(trace) is _LevelTrace else token_of(trace._trace_ref())


def _trace_for(token: Any) -> Any:
    return _LevelTrace(token) if is_level(token) else _JAX_TRACE(weakref.ref(trace_of(token)))


def _new_trace_state() -> Any:
    state = tracers.TraceState()
    if levels_are_open():
        state._jax_trace = trace_or_level()
    return state


def _is_owned(trace_state: Any) -> bool:
    return trace_state._jax_trace == trace_or_level()


class _RoomyTrace(tracers.TraceState):
    """A trace state with room where no function of flax looks; copies and pickles are plain."""

    __slots__ = ("__weakref__", "plans", "variable")

    plans: weakref.WeakKeyDictionary[Any, Any]
    variable: Any

    def __init__(self, trace_state: Any) -> None:
        self._jax_trace = trace_state._jax_trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (tracers.TraceState, ())


def plans_of(state: Any) -> Any:
    """Return what plans know of an object, by plan."""
    trace_state = state._trace_state
    if type(trace_state) is not _RoomyTrace:
        state._trace_state = trace_state = _RoomyTrace(trace_state)
        trace_state.plans = weakref.WeakKeyDictionary()
    return trace_state.plans


def reference_to(variable: Any) -> Callable[[], Any]:
    """Return a weak reference to a Variable, which in itself cannot have one."""
    trace_state = _trace_state(variable)
    if getattr(trace_state, "variable", None) is not variable:  # a copy may share it
        trace_state = _RoomyTrace(trace_state)
        trace_state.variable = variable
        _set_trace_state(variable, trace_state)
    reference = weakref.ref(trace_state)
    return lambda: getattr(reference(), "variable", None)


def empty_variable(variable: Any) -> None:
    """Let a Variable hold nothing, and no reference lead to it."""
    set_value(variable, None)
    _set_trace_state(variable, tracers.TraceState())


def static_nodes(nodes: Any) -> Any:
    """Return which attributes are data in a form that is hashed and compared in C."""
    return nodes if isinstance(nodes, frozenset) else tuple(nodes._mapping.items())


def static_nodes_without(static: Any, names: Sequence[str]) -> Any:
    """Return which attributes are data, without some, in the same form."""
    if isinstance(static, frozenset):
        return cast("frozenset[str]", static) - set(names)
    return tuple([pair for pair in static if pair[0] not in names])


def records_names(obj: Any) -> bool:
    """Tell whether flax replaces the bookkeeping of an object that gets or loses an attribute."""
    attributes = vars(obj)
    nodes = attributes[NODES]
    return getattr(obj, f"{_PREFIX}__is_pytree", False) and all(
        name in nodes or name in OWN for name in attributes
    )


def nodes_of(static: Any) -> Any:
    """Return which attributes are data, as flax keeps it."""
    return static if isinstance(static, frozenset) else _MAPPING_TYPE(dict(static), copy=False)


class _Probe(BASE):
    pass


_STATE_TYPE: Any = type(getattr(_Probe(), STATE))
_MAPPING_TYPE: Any = type(getattr(_Probe, NODES))

register_pytree_node_type: Callable[..., None] = _registry.register_pytree_node_type
"""Tell flax how objects of a class are taken apart."""
