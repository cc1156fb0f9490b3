"""Transforms nested at random, with what they mean."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from anabranch import transforms
from anabranch.errors import BroadcastWriteError, StructureError
from tests.property.objects import VARIABLES
from tests.property.programs import Style, generate, repeated
from tests.property.scenario import Action, Call, Outside, Rebind, Scenario
from tests.property.spread import LANES, Spread
from tests.property.worlds import Case, Transform
from tests.transforms.contract import (
    EXACT,
    EXACT_WITHOUT_JIT,
    STEADY_WITHOUT_JIT,
    loops,
    packed,
)

INSIDE = {
    name: wrap
    for name, wrap in EXACT.items()
    # those of several devices are slow to compile; they have tests of their own
    if name not in ("pmap", "shard_map", *EXACT_WITHOUT_JIT)
}
STEADY = loops(1)
INNER = {**INSIDE, **STEADY}


def jit(seed: int) -> Case:
    """Return a program under `jit`."""
    return Case(generate(seed), transforms.jit)


def nested(seed: int, *, captures: bool = False) -> Case:
    """Return a program under one to three transforms that equal the plain call."""
    names = chain_of(seed)
    steady = any(name in STEADY for name in names)
    scenario = generate(seed, Style(captures=captures))
    if steady or drops_results(names):
        scenario = without_results(scenario)
    may_refuse = (StructureError,) if steady else ()
    return Case(scenario, composed([INNER[name] for name in names]), may_refuse=may_refuse)


def chain_of(seed: int) -> tuple[str, ...]:
    """Return the names of one to three transforms, outermost first."""
    choose = random.Random(f"chain {seed}")
    names = list(INNER)
    return tuple([choose.choice(names) for _ in range(choose.choice([1, 1, 2, 2, 3]))])


def captured(seed: int) -> Case:
    """Return a program that reaches objects without being passed them."""
    if seed % 2:
        return Case(generate(seed, Style(captures=True)), transforms.jit)
    return nested(seed, captures=True)


def untraced(seed: int) -> Case:
    """Return a program whose functions run in the trace of their caller, perhaps in another one."""
    choose = random.Random(f"untraced {seed}")
    steady = choose.random() < 0.4
    untraced = STEADY_WITHOUT_JIT if steady else EXACT_WITHOUT_JIT
    chain = [untraced[choose.choice(list(untraced))]]
    scenario = generate(seed, Style(captures=seed % 2 == 1))
    name = choose.choice([*INSIDE, *[""] * len(INSIDE)])
    if name:
        chain.insert(choose.choice([0, 1]), INSIDE[name])
    if steady or drops_results([name]):
        scenario = without_results(scenario)
    return Case(scenario, composed(chain), may_refuse=(StructureError,) if steady else ())


def repeating(seed: int) -> Case:
    """Return a program in a loop of several steps, with other transforms around and inside."""
    choose = random.Random(f"loop {seed}")
    steps = choose.choice([2, 3, 4])
    chain = [choose.choice(list(loops(steps).values()))]
    if choose.random() < 0.4:
        chain.append(choose.choice(list(INSIDE.values())))
    if choose.random() < 0.5:
        chain.insert(0, choose.choice(list(INSIDE.values())))
    scenario = without_results(
        generate(seed, Style(repeat=steps, captures=seed % 2 == 1, model=True))
    )
    plain = functools.partial(repeated, count=steps)
    return Case(scenario, composed(chain), plain, carries=True, may_refuse=(StructureError,))


def in_lanes(seed: int) -> Case:
    """Return a program in lanes of different values, with other transforms around and inside.

    Functions capture nothing, since that would be the same in all lanes.
    """
    choose = random.Random(f"lanes {seed}")
    spread = Spread(choose.choice([*[None] * len(VARIABLES), *VARIABLES]))
    axes: Any = spread.axes
    lanes = packed(
        lambda f, args, kwargs: transforms.vmap(
            f, in_axes=(axes, axes), out_axes=axes, axis_size=LANES
        )(args, kwargs)
    )
    chain = [lanes]
    names = [choose.choice(list(INSIDE)) for _ in range(2)]
    if choose.random() < 0.4:
        chain.append(INSIDE[names[0]])
    if choose.random() < 0.3:
        chain.insert(0, INSIDE[names[1]])
    scenario = generate(seed, Style(outside=False, model=True))
    if len(chain) > 1 and drops_results(names):
        scenario = without_results(scenario)
    return Case(scenario, composed(chain), lanes=spread, may_refuse=(BroadcastWriteError,))


CASES: dict[str, Callable[[int], Case]] = {
    "jit": jit,
    "nested": nested,
    "captured": captured,
    "untraced": untraced,
    "loops": repeating,
    "lanes": in_lanes,
}
"""From a seed to a program, and what it runs under."""


def composed(chain: Sequence[Transform]) -> Transform:
    """Return the transform that applies all of them, outermost first."""

    def transform(function: Any) -> Any:
        for wrap in reversed(chain):
            function = wrap(function)
        return function

    return transform


def drops_results(names: Sequence[str]) -> bool:
    """Tell whether programs have no results under these transforms.

    What the result of a custom rule reaches has passed through the rule, so that arrays which
    nobody wrote come back as other ones, of equal value.
    """
    return any(name.startswith("custom_") for name in names)


def without_results(scenario: Scenario) -> Scenario:
    """Return a program whose functions return nothing, as far as it can do without."""
    functions = [dataclasses.replace(f, returned="None") for f in scenario.functions]
    results = {action.result for action in scenario.actions if isinstance(action, Call)}
    captures = {f.name: [c.root for c in f.captures] for f in scenario.functions}

    def stays(action: Action) -> bool:
        if isinstance(action, Outside):
            read = [action.line]
        elif isinstance(action, Rebind):
            read = [action.capture.root]
        else:
            read = [action.arguments, *captures[action.function]]
        return results.isdisjoint(re.findall(r"\w+", " ".join(read)))

    actions = itertools.takewhile(stays, scenario.actions)
    return dataclasses.replace(scenario, functions=tuple(functions), actions=tuple(actions))
