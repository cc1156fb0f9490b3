"""The examples of the samplers run. (The test of the architecture has those of `__all__`.)"""

from __future__ import annotations

import doctest

import pytest

from anabranch import contextvars_ext as cx


@pytest.mark.parametrize("name", cx.random.__all__)
def test_the_example_of_a_sampler_runs(name):
    (example,) = doctest.DocTestFinder().find(getattr(cx.random, name), name, globs={})
    result = doctest.DocTestRunner().run(example)
    assert (result.failed, result.attempted) == (0, 4)


def test_samplers_are_importable_from_the_package_whose_all_leaves_them_to_the_submodule():
    for name in cx.random.__all__:
        assert getattr(cx, name) is getattr(cx.random, name)
    assert not set(cx.random.__all__) & set(cx.__all__)
