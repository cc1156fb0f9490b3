"""The ways on which functions reach objects that no look at the code tells: found by searching.

A Variable that was found by its use is an input of later calls only as long as the function still
reaches it: an attribute of an instance that is no node, of a class or of a module may have been
bound to another object since, and nothing tells us. Which of several ways the function takes is not
known, so all of them must still lead there.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from anabranch.graph._function import plain_function, what_is_captured
from anabranch.graph._search import Found, Step, follow, search

_MOST = 4096  # functions that capture one another


class Ways(NamedTuple):
    """All ways that were found from a function to an object."""

    starts: tuple[weakref.ref[types.FunctionType], ...]
    edges: tuple[tuple[int, Step, int], ...]
    target: int
    text: str | None  # how the shortest one is written, if it can be


class Together:
    """The ways to many objects, of which each step is taken once.

    Arguments:
        ways: to each of them.
    """

    def __init__(self, ways: Sequence[Ways]) -> None:
        self._starts = [*dict.fromkeys([ref for each in ways for ref in each.starts])]
        self._steps: list[tuple[int, Step]] = []  # to each further place: from which one, and how
        self._same: list[tuple[int, int]] = []  # places that hold one object
        taken: dict[tuple[int, Step], int] = {}
        self._targets = [self._add(each, taken) for each in ways]

    def _add(self, ways: Ways, taken: dict[tuple[int, Step], int]) -> int:
        places = [self._starts.index(ref) for ref in ways.starts]
        for parent, step, number in ways.edges:
            at = (places[parent], step)
            place = taken.get(at)
            if place is None:
                place = taken[at] = len(self._starts) + len(self._steps)
                self._steps.append(at)
            if number == len(places):
                places.append(place)
            elif places[number] != place:
                self._same.append((places[number], place))
        return places[ways.target]

    def find(self) -> list[Any] | None:
        """Return what they lead to; None if some of them do not lead to one object any more."""
        places: list[Any] = [ref() for ref in self._starts]
        try:
            for parent, step in self._steps:
                places.append(follow(places[parent], step))
        except Exception:  # of whatever is met: then they lead elsewhere
            return None
        if all([places[a] is places[b] for a, b in self._same]):  # noqa: C419
            return [places[target] for target in self._targets]
        return None


def ways_to(functions: Iterable[Any], objs: Sequence[Any]) -> list[Ways | None]:
    """Return the ways from functions to each of some objects, None if there is none.

    Ways that begin with a node that a function captures count only if there are no others: what is
    reached from those is an input in any case.
    """
    starts = [f for f in map(plain_function, functions) if isinstance(f, types.FunctionType)]
    roots = [("", function) for function in starts]
    hidden = search(objs, roots, _visible_from(starts))
    found = zip(hidden, search(objs, roots) if None in hidden else hidden, strict=True)
    refs = (*map(weakref.ref, starts),)
    return [None if (one := a or b) is None else _ways(refs, one) for a, b in found]


def _ways(starts: tuple[Any, ...], found: Found) -> Ways:
    return Ways(starts, found.edges, found.target, found.text)


def _visible_from(functions: Sequence[types.FunctionType]) -> set[int]:
    """Return the ids of functions, and of those that they capture, as a look at the code does."""
    pending, seen = [*functions], set[int]()
    while pending and len(seen) < _MOST:
        function = pending.pop()
        if id(function) not in seen:
            seen.add(id(function))
            behind = [plain_function(x) for _, x in what_is_captured(function)]
            pending += [f for f in behind if isinstance(f, types.FunctionType)]
    return seen
