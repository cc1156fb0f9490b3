"""The transforms under test, and a failing program as text, as small as it gets."""

from __future__ import annotations

import anabranch as ab
from tests.property import chains
from tests.property.programs import generate
from tests.property.scenario import Scenario, shrink
from tests.property.worlds import Transform, run

TRANSFORMS: dict[str, Transform] = {"jit": ab.transforms.jit}


def case(name: str, seed: int) -> tuple[Scenario, Transform, bool]:
    """Return the program of a seed, the transform for it, and whether that may refuse it."""
    if name != "nested":
        return generate(seed), TRANSFORMS[name], False
    names = chains.chain_of(seed)
    return chains.program_of(seed), chains.nested(names), chains.may_refuse(names)


def failure(scenario: Scenario, transform: Transform) -> str:
    """Describe how a program fails, after making it as small as possible; "" if it does not."""
    symptom = symptom_of(scenario, transform)
    if symptom == "equal":
        return ""
    small = shrink(scenario, lambda candidate: symptom_of(candidate, transform) == symptom)
    outcome = run(small, transform)
    return f"{small.text()}\n{outcome.kind}: {outcome.message}"


def symptom_of(scenario: Scenario, transform: Transform) -> str:
    """Run a program; tell the failures apart that are likely to have different causes."""
    try:
        outcome = run(scenario, transform)
    except Exception:  # what was left out made it no program
        return "broken"
    if outcome.kind == "equal":
        return outcome.kind
    _, first, *_ = outcome.message.splitlines()
    text = first if first.startswith("raised") else first.partition(": ")[2]  # without the path
    return " ".join([outcome.kind, *text.split()[:2]])
