"""Time several contestants in one run, in turn, so that a noisy machine is noisy for all of them.

A round runs each contestant for about a millisecond, less than a time slice of the system, in an
order that rotates. What is reported is the median over many rounds, and ratios of medians.

On a machine that others keep busy, elapsed time favours short calls, which often fit between two
interruptions. The CPU time of the process, all its threads, is the fairer clock there.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

OURS, BARE = "ours", "bare jax"
NNX, NNX_TREE = "nnx.jit", "nnx.jit(graph=False)"
NNX_PARTIAL, NNX_CACHED = "nnx.jit_partial", "nnx.cached_partial"
EQUINOX = "eqx.filter_jit"
CONTESTANTS = (OURS, BARE, NNX, NNX_TREE, NNX_PARTIAL, NNX_CACHED, EQUINOX)


class Absent(Exception):
    """A contestant cannot take part; the message says why."""


class Step(NamedTuple):
    """What is timed."""

    call: Callable[[], Any]
    pending: Callable[[], Any] = tuple
    """Returns the arrays to wait for at the end of a round, inside the time."""
    before: Callable[[], Any] | None = None
    """Runs before each round, outside the time: what makes the next calls cold, for example."""


class Effort(NamedTuple):
    """How much time a measurement may take."""

    quick: bool
    seconds: float  # for one contestant in one round
    rounds: int  # at most
    budget: float  # seconds for one line, after which no round is begun
    least_rounds: int  # the least number
    contestants: tuple[str, ...] = CONTESTANTS
    clock: str = "wall"

    def pick(self, quick: Any, full: Any) -> Any:
        """Return one of two choices."""
        return quick if self.quick else full


FULL = Effort(quick=False, seconds=0.002, rounds=301, budget=6.0, least_rounds=7)
QUICK = Effort(quick=True, seconds=0.001, rounds=101, budget=1.0, least_rounds=3)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Line(NamedTuple):
    """One line of a table: what each contestant took, or why it did not take part."""

    row: int
    case: str
    size: int | None
    """The number of leaves, or whatever else grows."""
    unit: str
    values: dict[str, float]
    ratios: dict[str, float]
    """To bare JAX."""
    absent: dict[str, str]


Makers = Mapping[str, Callable[[], Step]]
Clock = Callable[[], float]
Made = TypeVar("Made", Step, float)


def compare(
    row: int,
    case: str,
    size: int | None,
    makers: Makers,
    effort: Effort,
    *,
    unit: str = "us",
    per: float = 1,
    slow: bool = False,
) -> Line:
    """Time contestants against each other.

    Arguments:
        row: the number of the row.
        case: the name of the line.
        size: how large the problem is.
        makers: by contestant, what makes its step.
        effort: how long to measure.
        unit: `us` or `ms`.
        per: what the time of one call is divided by.
        slow: a call takes long enough to be timed by itself.
    """
    steps, absent = made(makers, effort)
    seconds = rounds_of(steps, effort, slow=slow)
    scale = {"us": 1e6, "ms": 1e3}[unit] / per
    values = {name: statistics.median(found) * scale for name, found in seconds.items()}
    return Line(row, case, size, unit, values, ratios(values), absent)


def counted(
    row: int,
    case: str,
    size: int,
    makers: Mapping[str, Callable[[], float]],
    effort: Effort,
    *,
    unit: str,
) -> Line:
    """Compare what is counted, not timed: each maker returns a number."""
    values, absent = made(makers, effort)
    return Line(row, case, size, unit, values, ratios(values), absent)


def ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return values in units of bare JAX, if it took part."""
    bare = values.get(BARE, 0)
    return {name: value / bare for name, value in values.items()} if bare > 0 else {}


def rounds_of(steps: Mapping[str, Step], effort: Effort, *, slow: bool) -> dict[str, list[float]]:
    """Return the seconds per call of each contestant in each round."""
    clock = CLOCKS[effort.clock]
    counts = {
        name: 1 if slow else _count(step, effort.seconds, clock) for name, step in steps.items()
    }
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    end = time.perf_counter() + effort.budget
    for i in range(effort.rounds):
        if i >= effort.least_rounds and time.perf_counter() > end:
            break
        turn = i % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            found[name].append(_timed(steps[name], counts[name], clock))
    return found


def made(
    makers: Mapping[str, Callable[[], Made]], effort: Effort
) -> tuple[dict[str, Made], dict[str, str]]:
    """Make what is measured, steps once called; return also why some could not be made."""
    found: dict[str, Made] = {}
    absent: dict[str, str] = {}
    for name, make in makers.items():
        if name not in effort.contestants:
            continue
        try:
            step = make()
            if isinstance(step, Step):
                _timed(step, 1, time.perf_counter)  # compiles
            found[name] = step
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # another library may refuse what it likes
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found, absent


_WARM = 10  # calls


def _count(step: Step, seconds: float, clock: Clock) -> int:
    """Return how many calls take about as long, and call it that often, to warm it up."""
    for _ in range(_WARM):  # first calls trace, and make what later ones use
        step.call()
    count = 1
    while count < 100_000 and count * _timed(step, count, clock) < seconds / 2:
        count *= 2
    return count


def _timed(step: Step, count: int, clock: Clock) -> float:
    call = step.call
    if step.before is not None:
        step.before()
    start = clock()
    for _ in range(count):
        call()
    jax.block_until_ready(step.pending())
    return (clock() - start) / count


def each_call(steps: Mapping[str, Step], calls: int, clock: Clock) -> dict[str, list[float]]:
    """Time single calls, in turn, when all is warm; return the seconds of each."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    for _ in range(_WARM):
        for step in steps.values():
            step.call()
    for _ in range(calls):
        for name, step in steps.items():
            found[name].append(_timed(step, 1, clock))
    return found
