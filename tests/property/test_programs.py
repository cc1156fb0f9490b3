"""Random programs behave under a transform as they do plainly (R1, R2, R3).

`benchmarks/random_programs.py` runs any number of them.
"""

from __future__ import annotations

import pytest

from tests.property.chains import CASES
from tests.property.failures import failure
from tests.property.worlds import run

CHUNK = 25


def check(name, chunk):
    refused = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        outcome = run(case := CASES[name](seed))
        if outcome.kind == "unequal":
            pytest.fail(f"{name} {seed}\n{failure(case)}", pytrace=False)
        refused += outcome.kind == "refused"
    assert refused < CHUNK / 2


@pytest.mark.parametrize("chunk", range(20))
def test_random_programs_are_equal_to_the_plain_call(chunk):
    check("jit", chunk)


@pytest.mark.parametrize("chunk", range(12))
def test_random_programs_are_equal_under_nested_transforms(chunk):
    check("nested", chunk)


@pytest.mark.parametrize("chunk", range(12))
def test_random_programs_are_equal_with_captured_objects(chunk):
    check("captured", chunk)


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_are_equal_where_jax_does_not_trace(chunk):
    check("untraced", chunk)


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_in_loops_are_equal_to_the_python_loop(chunk):
    check("loops", chunk)


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_in_lanes_are_equal_to_each_lane_alone(chunk):
    check("lanes", chunk)
