"""The test of the property test: it sees what is wrong, and the programs are varied."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest

from tests.property import chains, wrong
from tests.property.failures import symptom_of
from tests.property.programs import generate
from tests.property.scenario import Call, Capture, Function, Outside, Rebind, Scenario, shrink
from tests.property.worlds import Case, run

program = functools.cache(generate)


def test_a_seed_is_a_program():
    texts = [generate(seed).text() for seed in range(20)]
    assert texts == [generate(seed).text() for seed in range(20)]
    assert len(set(texts)) == 20


def test_the_programs_are_varied():
    texts = [program(seed).text() for seed in range(200)]
    statements = """.value = |[...] =|+= |.append(|.insert(|.pop(|.clear()|.reverse()|.update(|
        del |.setdefault(|.extend(|.popitem()|.set_metadata(|.n += 1|.bump()|raise Boom|with skip"""
    objects = """Slotted|Record|Box|Strict|deque|OrderedDict|defaultdict|Point|Pair|partial|n32|
        poke|Own(|OwnParam|BatchStat|*rest|**kw|*, k"""
    for word in f"{statements}|{objects}".split("|"):
        assert sum(word.lstrip("\n ") in text for text in texts) >= 3, word
    calls = Counter(
        sum(isinstance(action, Call) for action in program(s).actions) for s in range(200)
    )
    assert set(calls) >= {1, 2, 3}


@pytest.mark.parametrize("chunk", range(4))
def test_the_plain_call_is_equal_to_itself(chunk):
    raised = 0
    for seed in range(chunk * 40, (chunk + 1) * 40):
        outcome = run(Case(program(seed), wrong.undo))
        assert outcome.kind == "equal", f"{program(seed).text()}\n{outcome.message}"
        raised += outcome.raised
    assert raised > 5


@pytest.mark.parametrize("damage", wrong.DAMAGES, ids=lambda damage: damage.__name__)
def test_a_wrong_transform_is_seen_whenever_it_acts(damage):
    seen = 0
    for seed in range(1000, 1200):
        transform = wrong.Wrong(damage)
        outcome = run(Case(program(seed), transform))
        expected = "unequal" if transform.acted else "equal"
        assert outcome.kind == expected, f"{program(seed).text()}\n{outcome.message}"
        seen += transform.acted
        if seen == 4:
            return
    pytest.fail(f"acted in {seen} programs only")


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (wrong.keep_going, "raised nothing instead of Boom"),
        (wrong.wrap_errors, "raised RuntimeError('wrapped') instead of Boom"),
        (lambda function: function, "raised, and yet"),
    ],
    ids=["swallow", "wrap", "keep what was written"],
)
def test_an_error_is_compared_and_leaves_everything_as_it_was(transform, message):
    function = Function("f", "p", ("p.a = 2", "raise Boom('injected')"), "None", False)
    scenario = Scenario(0, ("o = Block(a=1)",), (function,), (Call("r", "f", "o"),))
    assert run(Case(scenario, wrong.undo)).raised == 1
    outcome = run(Case(scenario, transform))
    assert outcome.kind == "unequal"
    assert message in outcome.message


def test_the_program_goes_on_after_an_error():
    function = Function("f", "p, q", ("p.a += 1", "q.a = p.a", "q.b.c = p"), "q", False)
    calls = (Call("r1", "f", "o, o"), Outside("o.b = Block(c=o)"), Call("r2", "f", "o, o"))
    scenario = Scenario(0, ("o = Block(a=1)",), (function,), calls)
    outcome = run(Case(scenario, wrong.undo))
    assert (outcome.kind, outcome.raised) == ("equal", 1)


def test_a_step_too_many_is_seen():
    kinds: Counter[str] = Counter()
    for seed in range(10):
        case = chains.repeating(seed)
        assert run(case).kind in ("equal", "refused")
        kinds[run(dataclasses.replace(case, plain=wrong.once_more(case.plain))).kind] += 1
    assert kinds["unequal"] >= 3


def test_lanes_that_are_confused_are_seen():
    seen = 0
    for seed in range(10):
        case = chains.in_lanes(seed)
        transform = wrong.Wrong(wrong.other_lanes, case.transform)
        outcome = run(dataclasses.replace(case, transform=transform))
        assert outcome.kind == ("unequal" if transform.acted else run(case).kind)
        seen += transform.acted
    assert seen >= 3


@pytest.mark.parametrize("route", ["cell", "global", "default"])
def test_what_a_function_captures_is_looked_up_at_each_call(route):
    function = Function("f", "", ("u.a += 1",), "u", False, (Capture("u", route, "o"),))
    build = ("o = Block(a=1)", "x = Block(a=2)")
    actions = (Call("r1", "f", ""), Rebind("f", Capture("u", route, "x")), Call("r2", "f", ""))
    scenario = Scenario(0, build, (function,), actions)
    assert run(Case(scenario, wrong.undo)).kind == "equal"
    outcome = run(Case(scenario, wrong.remember))
    assert outcome.kind == "unequal"
    assert "after r2" in outcome.message


def test_a_failing_program_is_made_smaller():
    lines = ("p.b = [p]", "p.a.value = p.a.value + 1", "p.c = 's'")
    function = Function("f", "p, q", lines, "[p]", True)
    build = ("o = Block(a=Param(f32(1.0)))", "x = [o]")
    scenario = Scenario(0, build, (function,), (Call("r", "f", "o, x"), Outside("x.clear()")))

    wrongly = wrong.Wrong(wrong.off_by_one)
    small = shrink(scenario, lambda candidate: "unequal" in symptom_of(Case(candidate, wrongly)))
    assert small.functions == (Function("f", "p, q", lines[1:2], "None", False),)
    assert small.actions == scenario.actions[:1]
    assert small.build == scenario.build
