"""Which classes of other libraries are known, told by the module that they derive from.

A class of flax can only be met if flax has been imported, so looking at names first keeps it
unimported for everybody else.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from anabranch.graph._kind import Kind
from anabranch.graph._pytrees import PytreeKind


def resolve(cls: type) -> Kind | None:
    """Return how instances of a class are opened, or None for what is no concern of ours."""
    for base in cls.__mro__:
        library, _, below = base.__module__.partition(".")
        if library == "flax" and below.partition(".")[0] == "nnx":
            from anabranch.interop import _nnx

            return _nnx.kind_of(cls)
        if library == "equinox" and base.__name__ == "Module":
            return EQUINOX
    return None


class FlaxHook:
    """Variables of flax are found by their use, if there can be any."""

    def attach(self) -> None:
        """Let them ask what stands for them."""
        if hasattr(sys.modules.get("flax.nnx"), "Variable"):
            from anabranch.interop import _nnx_use

            _nnx_use.attach()

    def detach(self) -> None:
        """Let flax be as it was."""
        found = sys.modules.get("anabranch.interop._nnx_use")
        if found is not None:
            found.detach()

    def refused(self, error: Exception) -> Any:
        """Return the object of which flax says that it belongs to another trace, or None."""
        cls = type(error)
        if cls.__name__ != "TraceContextError" or cls.__module__ != "flax.errors":
            return None
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_locals.get("self") if frame.f_code.co_name.startswith("_check") else None


class _EquinoxKind(PytreeKind):
    """A module of equinox: its arrays are traced and nothing else is, as equinox itself has it."""

    __slots__ = ()
    numbers = False


EQUINOX = _EquinoxKind("equinox module")
