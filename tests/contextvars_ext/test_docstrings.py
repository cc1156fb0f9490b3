"""The example in the docstring of every public name runs, and every name has one."""

from __future__ import annotations

import doctest
import inspect

import pytest

from anabranch import contextvars_ext as cx

NAMES = sorted({*cx.__all__, *(f"random.{name}" for name in cx.random.__all__)})
# Made by other public names, which show them.
WITHOUT_EXAMPLE = {"NodeId", "SetOnEnter", "random"}


def find(name):
    return getattr(cx.random, name[7:]) if name.startswith("random.") else getattr(cx, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name):
    thing = find(name)
    assert inspect.getdoc(thing)
    if inspect.ismodule(thing):
        return
    tests = doctest.DocTestFinder().find(thing, name, module=False, globs={})
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.failed for result in results) == 0
    assert (sum(result.attempted for result in results) > 0) == (name not in WITHOUT_EXAMPLE)


def test_samplers_have_one_home():
    for name in set(cx.random.__all__) & set(cx.__all__):
        assert getattr(cx, name) is getattr(cx.random, name)
