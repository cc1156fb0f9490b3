"""Random programs behave under a transform as they do plainly (R1, R2, R3).

`benchmarks/random_programs.py` runs any number of them.
"""

from __future__ import annotations

import pytest

from tests.property.failures import TRANSFORMS, failure
from tests.property.programs import generate

CHUNK = 25
CHUNKS = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_random_programs_are_equal_to_the_plain_call(name, chunk):
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        if text := failure(generate(seed), TRANSFORMS[name]):
            pytest.fail(text, pytrace=False)
