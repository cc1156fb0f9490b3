"""Random programs behave under a transform as they do plainly (R1, R2, R3).

`benchmarks/random_programs.py` runs any number of them.
"""

from __future__ import annotations

import pytest

from tests.property.chains import chain_of
from tests.property.failures import TRANSFORMS, case, failure
from tests.property.programs import generate
from tests.property.worlds import run

CHUNK = 25
CHUNKS = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_random_programs_are_equal_to_the_plain_call(name, chunk):
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        if text := failure(generate(seed), TRANSFORMS[name]):
            pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("chunk", range(12))
def test_random_programs_are_equal_under_nested_transforms(chunk):
    refused = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        scenario, transform, refusing = case("nested", seed)
        outcome = run(scenario, transform)
        if refusing and outcome.kind == "refused":
            refused += 1
        elif outcome.kind != "equal":
            pytest.fail(f"{chain_of(seed)}\n{failure(scenario, transform)}", pytrace=False)
    assert refused < CHUNK / 2
