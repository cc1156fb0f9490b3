"""Variables of flax are found by their use, as ours are: see `graph._scope`.

Theirs do not ask what stands for them. So while a scope is open in which it matters, the slots of
their class do; and what belongs to a level of its own within a trace is told from what does not.
When no such scope is open, the class and the module of flax are as flax has made them. (It is not
done for every scope: Python 3.13 looks up attributes of a class that was changed a thousand times
without a cache.)
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from flax.nnx import tracers

from anabranch.graph._scope import here, open_scopes
from anabranch.interop import _layout
from anabranch.interop._nnx import VARIABLE


class _Redirected:
    """A slot of what stands for the Variable."""

    def __init__(self, slot: Any) -> None:
        self._get, self._set, self._delete = slot.__get__, slot.__set__, slot.__delete__

    def __get__(self, variable: Any, cls: Any = None) -> Any:
        return self if variable is None else self._get(_here(variable), cls)

    def __set__(self, variable: Any, value: Any) -> None:
        self._set(_here(variable), value)

    def __delete__(self, variable: Any) -> None:
        self._delete(_here(variable))


def _here(variable: Any) -> Any:
    if not open_scopes():
        return variable
    try:
        token = VARIABLE.token(variable)
    except AttributeError:
        return variable  # it is being made
    return here(variable, token)


_LAST = "_trace_state"  # who may write is told last, when the write will go to the right place
_REDIRECTED = {
    name: _Redirected(_layout.SLOTS[name]) for name in (*_layout.SLOTS.keys() - {_LAST}, _LAST)
}


def attach() -> None:
    """Let Variables ask."""
    tracers.current_jax_trace = _layout.trace_or_level
    for name, slot in _REDIRECTED.items():
        setattr(nnx.Variable, name, slot)


def detach() -> None:
    """Let flax be as it was."""
    tracers.current_jax_trace = _layout.jax_trace
    for name, slot in _layout.SLOTS.items():
        setattr(nnx.Variable, name, slot)
