"""Static values in comparable form.

A static value is part of the cache key, so it is compared by type and value: 1, True and 1.0
differ, floats compare by bit pattern. Plain `==` cannot do that, hence a value is encoded into
nested tuples for which `==` and `hash` are exact, and decoded when an object is built.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from anabranch.errors import StaticValueError

Encoded: TypeAlias = "tuple[Any, ...]"
"""`(tag, type, payload)`: equal exactly if the static values have equal types and values."""

HASHED, FLOAT, COMPLEX, SCALAR, TUPLE, FROZENSET = "hashed", "float", "complex", "np", "()", "{}"
LOCATED = "at"  # made by the walk: the static value at a place of the caller's objects
SLICE = "slice"
OPAQUE = "opaque"  # made by the walk: an object that is compared by identity and contents

# `1 == True` but their types differ; these types need no more than a type tag.
EXACT_BY_TYPE = frozenset({int, str, bool, bytes, type(None), type(...), type(NotImplemented)})

SAME_AS: dict[type, type] = {}
"""Classes whose instances are those of another one in disguise, to `==` and `hash` as well."""

HOLDERS: list[type] = []
"""Classes that hash by identity but hold arrays: filled by `_classify`."""

_PACK_FLOAT = struct.Struct("<d")
_PACK_COMPLEX = struct.Struct("<dd")


def encode(value: Any) -> Encoded:
    """Encode a hashable static value; raise `StaticValueError` if it cannot be hashed."""
    cls = type(value)
    if cls in EXACT_BY_TYPE:
        return (HASHED, cls, value)
    if cls is float:
        return (FLOAT, cls, _PACK_FLOAT.pack(value))
    if cls is complex:
        return (COMPLEX, cls, _PACK_COMPLEX.pack(value.real, value.imag))
    if cls is tuple:
        return (TUPLE, cls, tuple([encode(x) for x in value]))
    if cls is frozenset:
        return (FROZENSET, cls, frozenset([encode(x) for x in value]))
    if cls is slice:
        return (SLICE, cls, (encode(value.start), encode(value.stop), encode(value.step)))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return (SCALAR, cls, value.dtype, value.tobytes())
    if isinstance(value, tuple(HOLDERS)):
        raise StaticValueError(
            f"a {cls.__qualname__} is part of a static value here (a key, an element of a "
            "frozenset, metadata), where it cannot be tracked: hold it in a list, a dict or a "
            "tuple"
        )
    what = "hashed"
    try:
        hash(value)
        what = "compared"
        bool(value == value)  # noqa: PLR0124 - does it say so, and by one truth value?
    except Exception as error:
        raise StaticValueError(
            f"a {cls.__qualname__} is static here but cannot be {what} ({error}); "
            "hold an array, a node (a Module, a list, a dict, a class decorated with "
            "`@graph.node`) or a hashable value instead"
        ) from None
    if cls.__module__ == "decimal":
        return (HASHED, cls, value, str(value))  # 1 and 1.0 are equal, and are written differently
    return (HASHED, SAME_AS.get(cls, cls), value)


_DECODERS: dict[str, Callable[[Encoded], Any]] = {
    HASHED: lambda e: e[2],
    FLOAT: lambda e: _PACK_FLOAT.unpack(e[2])[0],
    COMPLEX: lambda e: complex(*_PACK_COMPLEX.unpack(e[2])),
    SCALAR: lambda e: np.ndarray((), e[2], e[3])[()],
    TUPLE: lambda e: tuple([decode(x) for x in e[2]]),
    SLICE: lambda e: slice(*[decode(x) for x in e[2]]),
    FROZENSET: lambda e: frozenset([decode(x) for x in e[2]]),
    OPAQUE: lambda e: e[2].obj,
}


def decode(encoded: Encoded) -> Any:
    """Return the static value that was encoded."""
    return _DECODERS[encoded[0]](encoded)


class _Packed:
    """An encoded value in a pickle, without its type: that of a function has no name to go by."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Packed, (self.value,))


def pack(x: Any) -> Any:
    """Return what can be pickled in the place of tuples with encoded values."""
    if isinstance(x, tuple):
        given: tuple[Any, ...] = x
        if type(x) is tuple and len(x) == 3 and x[0] == HASHED and type(x[2]) is x[1]:
            return _Packed(x[2])
        return _like(given, [pack(child) for child in given])
    return x


def unpack(x: Any) -> Any:
    """Return what was packed."""
    if isinstance(x, tuple):
        given: tuple[Any, ...] = x
        return _like(given, [unpack(child) for child in given])
    return encode(x.value) if type(x) is _Packed else x


def _like(old: tuple[Any, ...], children: list[Any]) -> Any:
    cls: Any = type(old)
    return cls._make(children) if hasattr(cls, "_make") else cls(children)
