"""What is measured. Each module has a function `lines` that yields the lines of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.measure import Effort, Line
from benchmarks.rows import (
    adam,
    arguments,
    cold,
    containers,
    dispatch,
    growth,
    memory,
    steady,
    tracing,
)

ROWS: dict[int, Callable[[Effort], Iterator[Line]]] = {
    1: dispatch.lines,
    2: containers.lines,
    3: arguments.lines,
    4: adam.lines,
    5: tracing.lines,
    6: cold.lines,
    7: growth.lines,
    8: memory.lines,
    9: steady.lines,
}

TITLES = {
    1: "dispatch: one integer leaf written, own modules",
    2: "dispatch: other containers",
    3: "dispatch: several arguments",
    4: "a full Adam step",
    5: "tracing, and time to the first result",
    6: "cold operations",
    7: "growth",
    8: "memory",
    9: "steady state among many live objects",
}
