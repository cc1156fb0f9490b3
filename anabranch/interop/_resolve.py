"""Which classes of other libraries are known, told by the module that they derive from.

A class of flax can only be met if flax has been imported, so looking at names first keeps it
unimported for everybody else.
"""

from __future__ import annotations

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


class _EquinoxKind(PytreeKind):
    """A module of equinox: its arrays are traced and nothing else is, as equinox itself has it."""

    __slots__ = ()
    numbers = False


EQUINOX = _EquinoxKind("equinox module")
