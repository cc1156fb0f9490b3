"""Random nestings of transforms, sets and reads against a model of twenty lines.

The invariant: inside a jit-like trace the outcome of `get` depends only on what was set inside
that trace. So programs are run with and without values outside, and again through JAX's caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.contextvars_ext import JitAwareContextVar
from anabranch.errors import BehindBoundaryError, ContextValueNotSetError
from tests.contextvars_ext.nesting import BOUNDARIES, NESTABLE

ONE = np.float32(1.0)
VARIABLES = 2


@dataclass
class Read:
    variable: int
    outcomes: set = field(default_factory=set)


@dataclass
class Set:
    variable: int
    value: int
    body: list


@dataclass
class Apply:
    transform: str
    body: list


def program_strategy():
    reads = st.builds(Read, st.integers(0, VARIABLES - 1))

    def extend(statements):
        bodies = st.lists(statements, min_size=1, max_size=3)
        sets = st.builds(Set, st.integers(0, VARIABLES - 1), st.integers(1, 9), bodies)
        return sets | st.builds(Apply, st.sampled_from(sorted(NESTABLE)), bodies)

    return st.lists(st.recursive(reads, extend, max_leaves=6), min_size=1, max_size=3)


def outcome(var):
    """What `get` does, and what it does with a fallback, as one comparable thing."""
    try:
        plain = var.get()
    except BehindBoundaryError:
        plain = "behind"
    except ContextValueNotSetError:
        plain = "unset"
    return plain, var.get("fallback")


def execute(statements, variables, x):
    for statement in statements:
        match statement:
            case Read(variable, outcomes):
                outcomes.add(outcome(variables[variable]))
            case Set(variable, value, body):
                with variables[variable].set_on_enter(value):
                    x = execute(body, variables, x)
            case Apply(transform, body):
                x = NESTABLE[transform](lambda y, body=body: execute(body, variables, y))(x)
    return x


def predict(statements, stacks, boundaries=0):
    """Yield each read with its expected outcome.

    `stacks` has, for each variable, pairs of a value and the number of boundaries around its set.
    """
    for statement in statements:
        match statement:
            case Read(variable):
                if not stacks[variable]:
                    yield statement, ("unset", "fallback")
                elif stacks[variable][-1][1] < boundaries:
                    yield statement, ("behind", "fallback")
                else:
                    value = stacks[variable][-1][0]
                    yield statement, (value, value)
            case Set(variable, value, body):
                stacks[variable].append((value, boundaries))
                yield from predict(body, stacks, boundaries)
                stacks[variable].pop()
            case Apply(transform, body):
                yield from predict(body, stacks, boundaries + (transform in BOUNDARIES))


def all_reads(statements) -> Iterator[Read]:
    for statement in statements:
        if isinstance(statement, Read):
            yield statement
        else:
            yield from all_reads(statement.body)


@settings(max_examples=60)
@given(program_strategy())
def test_every_read_has_the_outcome_of_the_model(program):
    variables = [JitAwareContextVar(str(n)) for n in range(VARIABLES)]
    execute(program, variables, ONE)
    for read, expected in predict(program, [[] for _ in variables]):
        assert read.outcomes == {expected}
    assert [var.get(None) for var in variables] == [None] * VARIABLES


@settings(max_examples=40)
@given(program_strategy(), st.sampled_from(sorted(BOUNDARIES.keys() & NESTABLE.keys())))
def test_inside_a_boundary_reads_do_not_depend_on_what_is_set_outside(program, transform):
    """But for which of the two errors: a cached trace cannot tell them apart, as it has failed."""

    def run(outer):
        variables = [JitAwareContextVar(str(n)) for n in range(VARIABLES)]
        with contextlib.ExitStack() as stack:
            for var, value in zip(variables, outer, strict=True):
                if value is not None:
                    stack.enter_context(var.set_on_enter(value))
            NESTABLE[transform](lambda x: execute(program, variables, x))(ONE)
        seen = []
        for read in all_reads(program):
            plain, with_fallback = read.outcomes.pop()
            assert read.outcomes == set()
            seen.append(("error" if plain in {"behind", "unset"} else plain, with_fallback))
        return seen

    assert run([None] * VARIABLES) == run([100] * VARIABLES) == run([None, 200])


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(sorted(NESTABLE)), min_size=1, max_size=3),
    st.lists(st.none() | st.integers(1, 9), min_size=2, max_size=4),
)
def test_programs_that_are_cached_give_what_fresh_ones_give(transforms, outer_values):
    """One function object through all calls, so that JAX's caches are hit."""
    var = JitAwareContextVar("v")

    def build():
        def body(x):
            return x * var.get(5.0)

        for name in transforms:
            body = NESTABLE[name](body)
        return body

    cached = build()
    hidden = any(name in BOUNDARIES for name in transforms)
    for value in outer_values:
        with contextlib.nullcontext() if value is None else var.set_on_enter(float(value)):
            expected = 5.0 if hidden or value is None else float(value)
            np.testing.assert_allclose(cached(ONE), expected, rtol=1e-6)
            np.testing.assert_allclose(build()(ONE), expected, rtol=1e-6)


def test_the_model_itself_tells_the_three_outcomes_apart():
    reads = [Read(0), Read(0), Read(1)]
    program = [Set(0, 3, [Apply("vmap", [reads[0]]), Apply("jit", [reads[1], reads[2]])])]
    expected = [expected for _, expected in predict(program, [[], []])]
    assert expected == [(3, 3), ("behind", "fallback"), ("unset", "fallback")]
    assert jax.numpy.shape(execute(program, [JitAwareContextVar() for _ in range(2)], ONE)) == ()
    assert [read.outcomes for read in reads] == [{outcome} for outcome in expected]
