"""`nnx.StateAxes`, `nnx.StateSharding`, `nnx.DiffState` and `nnx.Carry` mean what ours mean."""

from __future__ import annotations

from typing import Any

from anabranch.transforms._carry import Carry
from anabranch.transforms._specs import DiffState, StateAxes, StateSharding


def translate(spec: Any) -> Any:
    """Return what a specification of flax is called here; anything else as it is."""
    cls: type = spec if isinstance(spec, type) else type(spec)
    if not cls.__module__.startswith("flax.nnx"):
        return spec
    if cls.__name__ == "Carry":
        return Carry
    if cls.__name__ == "StateAxes":
        return StateAxes({f: translate(a) for f, a in zip(spec.filters, spec.axes, strict=True)})
    if cls.__name__ == "StateSharding":
        return StateSharding(dict(zip(spec.filters, spec.shardings, strict=True)))
    return DiffState(spec.argnum, spec.filter) if cls.__name__ == "DiffState" else spec
