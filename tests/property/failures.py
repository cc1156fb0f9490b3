"""A failing program as text, as small as it gets."""

from __future__ import annotations

import dataclasses

from tests.property.scenario import shrink
from tests.property.worlds import Case, run


def failure(case: Case) -> str:
    """Describe how a program fails, after making it as small as possible; "" if it does not."""
    symptom = symptom_of(case)
    if symptom in ("equal", "refused"):
        return ""
    small = shrink(
        case.scenario,
        lambda scenario: symptom_of(dataclasses.replace(case, scenario=scenario)) == symptom,
    )
    outcome = run(dataclasses.replace(case, scenario=small))
    return f"{small.text()}\n{outcome.kind}: {outcome.message}"


def symptom_of(case: Case) -> str:
    """Run a program; tell the failures apart that are likely to have different causes."""
    try:
        outcome = run(case)
    except Exception:  # what was left out made it no program
        return "broken"
    if outcome.kind in ("equal", "refused"):
        return outcome.kind
    _, first, *_ = outcome.message.splitlines()
    text = first if first.startswith("raised") else first.partition(": ")[2]  # without the path
    return " ".join([outcome.kind, *text.split()[:2]])
