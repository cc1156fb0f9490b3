"""Empty inner twins when their trace has ended.

A twin that somebody kept would hold tracers, and its finaliser, if its class has one, would run for
an object that the caller never made. So a twin is emptied and, where Python allows it, its class is
set to a marker whose attributes raise our error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

from anabranch.errors import SpentTwinError
from anabranch.graph import _classify, _kinds, _module
from anabranch.graph._kinds import Kind, Opened
from anabranch.graph._module import SpentModule
from anabranch.graph._variable import Variable


class SpentVariable(Variable):
    """What an inner twin of a Variable becomes when its trace has ended."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in ("_value", "_metadata", "_token", "value"):
            raise SpentTwinError(
                "This Variable is the inner twin of an argument of a transformed function, and "
                "was kept (in a global, a list, a closure, a host callback) after that function "
                "had been traced. Return it, or use the object that was passed as the argument."
            )
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        return "<spent inner twin of a Variable>"


class SpentObject:
    """What an inner twin of another object becomes when its trace has ended."""

    def __repr__(self) -> str:
        return "<spent inner twin of an object>"


class _SpentKind(Kind):
    """A spent twin cannot be split: it would come back as an empty object."""

    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        raise SpentTwinError(
            f"{obj!r} was kept (in a global, a list, a closure, a host callback) after the "
            "function that it was made for had been traced, and is used again here. Return it from "
            "the function, or use the object that was passed as the argument."
        )


SPENT: Final = _SpentKind("spent twin")
_SPENT_CLASSES: dict[Kind, type] = {}


def add_spent_class(kind: Kind, cls: type) -> None:
    """Let twins of a kind become instances of a class, which has their layout."""
    _SPENT_CLASSES[kind] = cls
    _classify.declare(cls, SPENT)


add_spent_class(_kinds.VARIABLE, SpentVariable)
add_spent_class(_kinds.MODULE, SpentModule)
_classify.declare(SpentObject, SPENT)


def spend(twins: Iterable[Any]) -> None:
    """Empty twins; their classes become markers that raise `SpentTwinError` when used."""
    rules = _classify.RULES
    for twin in twins:
        kind = rules.get(type(twin)) or _classify.rule_of(twin)
        if not isinstance(kind, Kind) or not kind.identity:
            continue
        kind.empty(twin)
        if not kind.is_object:
            continue
        spent = _SPENT_CLASSES.get(kind)
        if spent is None:
            spent = _spent_class(_module.slot_names(type(twin)), hasattr(twin, "__dict__"))
        try:
            object.__setattr__(twin, "__class__", spent)
        except TypeError:  # where the layouts differ (slots of several classes)
            continue


@functools.lru_cache(maxsize=256)
def _spent_class(slots: tuple[str, ...], has_dict: bool) -> type:
    if not slots:
        return SpentObject
    names = (*slots, "__dict__", "__weakref__") if has_dict else slots
    cls = type("SpentObject", (), {"__slots__": names, "__repr__": SpentObject.__repr__})
    _classify.declare(cls, SPENT)
    return cls
