"""Row 9: single steps in a process that holds many other objects, where a collection is slow."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator

from benchmarks import models
from benchmarks.measure import (
    BARE,
    CLOCKS,
    NNX,
    NNX_TREE,
    OURS,
    Effort,
    Line,
    each_call,
    made,
    ratios,
)
from benchmarks.rows import adam

OBJECTS = 1_000_000
DEPTH = 5


def lines(effort: Effort, count: int = OBJECTS, calls: int | None = None) -> Iterator[Line]:
    """Yield the lines of the row."""
    makers = models.on_nodes(adam.stepper, lambda library: adam.trained(library, DEPTH))
    chosen = {name: makers[name] for name in (OURS, NNX, NNX_TREE)}
    steps, absent = made({**chosen, BARE: lambda: adam.bare(DEPTH)}, effort)
    size = 1 + 6 * DEPTH
    for objects in (0, count):
        load = [[i] for i in range(objects)]
        seconds = each_call(steps, calls or effort.pick(300, 3_000), CLOCKS[effort.clock])
        for what, pick in PICKED.items():
            values = {name: 1e6 * pick(found) for name, found in seconds.items()}
            case = f"Adam step, {what}, {objects:,} objects"
            yield Line(9, case, size, "us", values, ratios(values), absent)
        del load
        gc.collect()


PICKED: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "worst": max}
