"""Contents of objects of any kind, and static values, in the form in which they are compared."""

from __future__ import annotations

from typing import Any

from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _static
from anabranch.graph._kind import Kind, Opened

_REFUSALS = (NodeTypeError, StaticValueError, RuntimeError)  # (somebody is writing it)


def contents_of(kind: Kind, obj: Any) -> Opened | None:
    """Return what an object holds, or None if it cannot be read."""
    try:
        return kind.open(obj) if _classify.rule_of(obj) is kind else None
    except _REFUSALS:
        return None


def static_of(x: Any) -> Any:
    """Return the comparable form of a static value, or None if it is none."""
    rule = _classify.rule_of(x)
    if isinstance(rule, Kind) or rule in (_classify.LEAF, _classify.OPAQUE, _classify.REF):
        return None
    try:
        if rule is _classify.UNKNOWN:
            _classify.check_static(x)
        return _static.encode(x)
    except _REFUSALS:
        return None
