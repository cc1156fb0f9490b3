"""Kinds of Variables of other libraries that count as ours: what is a `Param` there is one here."""

from __future__ import annotations

_COUNTERPARTS: dict[type, tuple[type, ...]] = {}


def add_counterpart(kind: type, other: type) -> None:
    """Let a class of another library count as one of our kinds, in filters and elsewhere."""
    _COUNTERPARTS[kind] = (*counterparts(kind), other)


def counterparts(kind: type) -> tuple[type, ...]:
    """Return the classes of other libraries that count as a kind."""
    return _COUNTERPARTS.get(kind, ())


def is_kind(cls: type, kind: type) -> bool:
    """Tell whether a class is a kind, or counts as one."""
    return issubclass(cls, (kind, *counterparts(kind)))
