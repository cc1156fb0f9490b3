"""The migration page knows every name of the graph and transform layer of flax nnx."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from flax import nnx

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating-from-nnx.md"
LAYERS = (
    "flax.nnx.graphlib flax.nnx.statelib flax.nnx.filterlib flax.nnx.rnglib flax.nnx.pytreelib "
    "flax.nnx.extract flax.nnx.module flax.nnx.transforms flax.nnx.training.optimizer"
).split()
NAMES = [
    name
    for name, obj in vars(nnx).items()
    if not name.startswith("_")
    and len(name) > 1  # type variables
    and not inspect.ismodule(obj)
    and any(str(getattr(obj, "__module__", "")).startswith(layer) for layer in LAYERS)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_replaces_a_name(name):
    assert re.search(rf"`nnx\.{name}\b", PAGE.read_text())


def test_there_are_names():
    assert len(NAMES) > 80
