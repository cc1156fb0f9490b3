"""Random programs whose calls are repeated, so that plans are followed, and as often dropped."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import anabranch as ab
from anabranch.transforms._plan import AGAIN
from anabranch.transforms._plans import Plans
from tests.property.chains import CASES
from tests.property.failures import failure, symptom_of
from tests.property.scenario import Call, Scenario

CHUNK = 20

# a number that an object holds and that every call changes is told, as it should be
pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")


def repeated(scenario: Scenario) -> Scenario:
    """Make every call three times."""
    actions: list[Any] = []
    for action in scenario.actions:
        actions.append(action)
        if isinstance(action, Call):
            names = [f"{action.result}{letter}" for letter in "bc"]
            actions += [dataclasses.replace(action, result=name) for name in names]
    return dataclasses.replace(scenario, actions=tuple(actions))


def without_plans(function: Any) -> Any:
    jitted = ab.jit(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        jitted._plans.clear()
        return jitted(*args, **kwargs)

    return call


@pytest.mark.parametrize("chunk", range(6))
@pytest.mark.parametrize("name", ["jit", "captured"])
@pytest.mark.parametrize("transform", [ab.jit, without_plans])
def test_repeated_calls_are_equal_to_plain_ones_with_and_without_plans(transform, name, chunk):
    broken = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = CASES[name](seed)
        case = dataclasses.replace(case, scenario=repeated(case.scenario), transform=transform)
        symptom = symptom_of(case)
        broken += symptom == "broken"  # the first call has removed what the others are passed
        if symptom not in ("equal", "refused", "broken"):
            pytest.fail(f"{name} {seed}\n{failure(case)}", pytrace=False)
    assert broken < CHUNK / 2


def test_repeated_calls_do_follow_plans(monkeypatch):
    followed: list[Any] = []
    call = Plans.call

    def counting(*args: Any) -> Any:
        result = call(*args)
        followed.append(result is not AGAIN)
        return result

    monkeypatch.setattr(Plans, "call", counting)
    for seed in range(20):
        case = CASES["jit"](seed)
        symptom_of(dataclasses.replace(case, scenario=repeated(case.scenario)))
    assert sum(followed) > 4  # most programs change the structure in every call
