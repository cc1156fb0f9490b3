"""Tell a user whose function is traced again and again for a number that an object counts in.

A Python number that an object holds is static: when it changes, the function is traced again, as
it must be. If the same number is the only thing that changes from trace to trace, a Variable would
do, and the user is told once.
"""

from __future__ import annotations

import warnings
from typing import Any

from anabranch._boundary import where
from anabranch.errors import RetraceWarning
from anabranch.graph import _static
from anabranch.graph._flatten import namer
from anabranch.graph._graphdef import GraphDef

_ENOUGH = 3
_NUMBERS = (int, float, complex)


class Retraces:
    """The traces of one function."""

    def __init__(self) -> None:
        self._last: GraphDef | None = None
        self._counts: dict[tuple[int, int], int] = {}

    def note(self, graphdef: GraphDef, function: Any) -> None:
        """Note a trace, and warn if it is one of many for the same number.

        Arguments:
            graphdef: of the call.
            function: of the user.
        """
        last, self._last = self._last, graphdef
        place = None if last is None else _changed_number(last, graphdef)
        if last is None or place is None:
            return
        self._counts[place] = count = self._counts.get(place, 0) + 1
        if count == _ENOUGH:
            index, position = place
            entry = graphdef.entries[index]
            path = entry.kind.show_below(namer(graphdef)(index), entry.keys[position])
            edges: list[Any] = [g.entries[index].edges[position] for g in (last, graphdef)]
            old, new = map(_static.decode, edges)
            warnings.warn(
                f"{path}: {where(function)} was traced again {count} times because this Python "
                f"number has changed, the last time from {old!r} to {new!r}; every value of it "
                f"takes a trace of its own. Hold it in a Variable: `ab.Variable({new!r})`",
                RetraceWarning,
                stacklevel=2,
            )


def _changed_number(old: GraphDef, new: GraphDef) -> tuple[int, int] | None:
    """Return where the one number is in which two structures differ, if they differ in no more."""
    if len(old.entries) != len(new.entries):
        return None
    found: list[tuple[int, int]] = []
    for index, (before, after) in enumerate(zip(old.entries, new.entries, strict=True)):
        if before is after or before == after:
            continue
        if before[:4] != after[:4] or len(found) > 1:
            return None
        for position, (a, b) in enumerate(zip(before.edges, after.edges, strict=True)):
            if a != b:
                if not (_is_number(a) and _is_number(b)):
                    return None
                found.append((index, position))
    return found[0] if len(found) == 1 else None


def _is_number(edge: Any) -> bool:
    return type(edge) is tuple and edge[1] in _NUMBERS
