"""A call that fails leaves nothing behind, wherever it fails (R2).

`benchmarks/faults.py` lets any number of programs fail at all of their points.
"""

from __future__ import annotations

import dataclasses

import pytest

import anabranch as ab
from tests.property import faults
from tests.property.chains import CASES
from tests.property.faults import (
    AtPoint,
    AtStage,
    Failing,
    LeftBehindError,
    every_point,
    late,
    some_points,
    weakened,
)
from tests.property.scenario import Call, Function, Scenario
from tests.property.worlds import Case, run
from tests.property.wrong import undo

CHUNK = 4


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("name", ["nested", "captured"])
@pytest.mark.parametrize("when", ["early", "late"])
def test_random_programs_fail_and_then_do_as_the_plain_call(when, name, chunk):
    failed = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = CASES[name](seed)
        program = weakened(case.scenario) if when == "late" else case.scenario
        failing = Failing(case.transform, late if when == "late" else some_points(4), seed)
        outcome = run(dataclasses.replace(case, scenario=program, transform=failing))
        failed += failing.counts.total() - failing.counts["calls"]
        if outcome.kind == "unequal":
            pytest.fail(f"{program.text()}\n{outcome.message}", pytrace=False)
    assert failed >= CHUNK


WRITES = Function("f", "p", ("p.n.value = p.n.value + 1", "p.s = 's'", "p.l.append(1)"), "p", False)
CALLS = (Call("r", "f", "o"),) * 2
SMALL = Scenario(0, ("o = Block(n=Param(f32(1.0)), l=[])",), (WRITES,), CALLS)


def test_all_points_of_a_call_are_tried():
    failing = Failing(ab.jit, every_point)
    assert run(Case(SMALL, failing)).kind == "equal"
    counts = failing.counts
    assert counts["calls"] == 2
    for kind in faults.KINDS:
        assert counts[f"Fault at a {kind}"] + counts[f"Interrupt at a {kind}"] >= 2, counts


def test_a_call_fails_late_once_at_each_stage():
    failing = Failing(ab.jit, late)
    assert run(Case(weakened(SMALL), failing)).kind == "equal"
    # every call of this program is a call of another structure
    late_faults = {f"Fault when it came to {stage}": 2 for stage in faults.STAGES}
    assert failing.counts == {"calls": 2, **late_faults}


@pytest.mark.parametrize(
    ("wrongly", "message"),
    [
        (lambda function: function, "raised instead|was .*, is |had .*, has "),
        (lambda function: _swallowing(undo(function)), "was swallowed"),
        (lambda function: _renaming(undo(function)), "was raised instead"),
        (lambda function: _leaving_open(undo(function)), "attempts"),
    ],
    ids=["keep what was written", "swallow", "wrap", "leave open"],
)
def test_what_is_left_behind_is_seen(wrongly, message):
    failing = Failing(wrongly, every_point)(SMALL.function("f", {}))
    try:
        with pytest.raises(LeftBehindError, match=message):
            failing(SMALL.world()["o"])
    finally:
        ATTEMPTS.clear()
    assert not faults.left_open()


ATTEMPTS = faults._lifting._ATTEMPTS.stack


def _swallowing(function):
    def call(*args):
        try:
            return function(*args)
        except BaseException:
            return None

    return call


def _renaming(function):
    def call(*args):
        try:
            return function(*args)
        except BaseException as error:
            raise RuntimeError("another one") from error

    return call


def _leaving_open(function):
    def call(*args):
        ATTEMPTS.append(None)
        return function(*args)

    return call


@pytest.mark.parametrize(
    "attempt", [AtPoint(0, kind="read"), AtStage("run")], ids=["a point", "a stage"]
)
def test_nothing_is_injected_when_the_attempt_is_over(attempt):
    before = dict(vars(ab.Variable)), dict(vars(ab.Module))
    with attempt:
        pass
    assert (dict(vars(ab.Variable)), dict(vars(ab.Module))) == before
    assert faults.WEAK_POINT.fails is None
    assert attempt.raised is None
