"""Random programs on objects of flax nnx behave under our transforms as they do plainly."""

from __future__ import annotations

import pytest

from tests.property.chains import CASES
from tests.property.failures import failure
from tests.property.flax_objects import objects_of_flax
from tests.property.worlds import run

CHUNK = 15


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("name", ["jit", "nested", "captured", "loops"])
def test_random_programs_on_objects_of_flax_are_equal_to_the_plain_call(name, chunk):
    refused = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        case = CASES[name](seed)
        with objects_of_flax():
            outcome = run(case)
            if outcome.kind == "unequal":
                pytest.fail(f"{name} {seed}\n{failure(case)}", pytrace=False)
        refused += outcome.kind == "refused"
    assert refused < CHUNK / 2
