"""The compiled function for one structure of the arguments.

What it does to objects is its report, which is static. As a node in the tree of the outputs it
would be made anew, by a function in Python, in every call, which takes longer than to return an
array. So a compiled function returns nothing but arrays, and after them so many times None that no
other report of the function goes with that many outputs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax

from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import Grouping, Report, run_inside
from anabranch.transforms._names import name_inside
from anabranch.transforms._plans import call_traced


class Reports:
    """The reports of one compiled function.

    Arguments:
        groups: how many lists it returns; if it is one, nothing is around it.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._known: dict[int, tuple[Report, int]] = {}  # and how many arrays, by all outputs

    def mark(self, report: Report, groups: Sequence[list[Any]]) -> Any:
        """Return what the compiled function returns."""
        *others, last = groups
        count = sum(map(len, groups))
        length = count
        while self._known.setdefault(length, (report, count)) != (report, count):
            length += 1
        last = [*last, *[None] * (length - count)]
        return (*others, last) if others else last

    def outputs(self, found: Any) -> list[Any]:
        """Return in one list what the compiled function has returned."""
        return found if self.groups == 1 else [*chain.from_iterable(found)]

    def read(self, outputs: list[Any]) -> Report:
        """Return the report that belongs to outputs, of which only the arrays are left."""
        report, count = self._known[len(outputs)]
        del outputs[count:]
        return report

    def lengths(self, report: Report) -> tuple[int, int]:
        """Return how many outputs go with a report, and how many of them are arrays."""
        return next(
            (length, count) for length, (known, count) in [*self._known.items()] if known is report
        )


class Trace(NamedTuple):
    """What a function was traced for; `debug.explain_retrace` compares two of them."""

    number: int  # in the order in which they were made
    graphdef: GraphDef
    types: Sequence[Any]  # of the leaves


_TRACE_NUMBERS = itertools.count()


class Compiled:
    """The compiled function for one structure of the arguments."""

    def __init__(
        self, function: Any, graphdef: GraphDef, grouping: Grouping, options: dict[str, Any]
    ) -> None:
        def inside(*leaves: Any) -> tuple[Report, tuple[list[Any], ...]]:
            found = call_traced(graphdef, run_inside, graphdef, leaves, grouping)
            self.traces.append(Trace(next(_TRACE_NUMBERS), graphdef, [*map(jax.typeof, leaves)]))
            return found.report, found.groups

        def run(*leaves: Any) -> Any:
            return self.reports.mark(*inside(*leaves))

        self.traces: deque[Trace] = deque(maxlen=16)
        self.reports = Reports(grouping.count)
        self.inside, self.run = [name_inside(f, function, graphdef) for f in (inside, run)]
        self.options = options
        self.function: Any = jax.jit(self.run, **options)  # or a `Donation`
