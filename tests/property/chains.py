"""Transforms nested at random, each applied so that it equals the plain call."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

from tests.property.programs import generate
from tests.property.scenario import Call, Outside, Scenario
from tests.transforms.contract import EXACT, STEADY

INNER = {
    name: wrap
    for name, wrap in {**EXACT, **STEADY}.items()
    # those of several devices are slow to compile; they have tests of their own
    if name not in ("pmap", "shard_map")
}


def chain_of(seed: int) -> tuple[str, ...]:
    """Return the names of one to three transforms, outermost first."""
    choose = random.Random(f"chain {seed}")
    names = list(INNER)
    return tuple([choose.choice(names) for _ in range(choose.choice([1, 1, 2, 2, 3]))])


def may_refuse(names: tuple[str, ...]) -> bool:
    """Tell whether a loop is among them, which refuses to change the structure of its state."""
    return any(name in STEADY for name in names)


def nested(names: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return the transform that applies all of them."""

    def transform(function: Any) -> Any:
        for name in reversed(names):
            function = INNER[name](function)
        return function

    return transform


def drops_results(names: tuple[str, ...]) -> bool:
    """Tell whether programs have no results under these transforms.

    A loop would stack or drop them. What the result of a custom rule reaches has passed through
    the rule, so that arrays which nobody wrote come back as other ones, of equal value.
    """
    return may_refuse(names) or any(name.startswith("custom_") for name in names)


def program_of(seed: int) -> Scenario:
    """Return the program of a seed, without results where they mean something else."""
    scenario = generate(seed)
    if not drops_results(chain_of(seed)):
        return scenario
    functions = [dataclasses.replace(f, returned="None") for f in scenario.functions]
    results = {action.result for action in scenario.actions if isinstance(action, Call)}
    actions = itertools.takewhile(
        lambda action: results.isdisjoint(re.findall(r"\w+", _reads(action))), scenario.actions
    )
    return dataclasses.replace(scenario, functions=tuple(functions), actions=tuple(actions))


def _reads(action: Call | Outside) -> str:
    return action.arguments if isinstance(action, Call) else action.line
