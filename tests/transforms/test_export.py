"""Exported functions (C22): programs of arrays that are called with objects."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import ArgumentError, MissingExtraError, StructureError


class Layer(ab.Module):
    def __init__(self, value: float = 1.0) -> None:
        self.w = ab.Param(jnp.full(2, value))


class Net(ab.Module):
    def __init__(self, value: float = 1.0) -> None:
        layer = Layer(value)
        self.layers = [layer, layer]
        self.n = ab.Variable(jnp.array(0))
        self.rate = 0.5

    @transforms.jit
    def step(self, x: Any) -> Any:
        self.n.value += 1
        self.layers[0].w.value = self.layers[0].w + self.rate * x
        return {"sum": self.layers[1].w.value.sum(), "layer": self.layers[0]}


@transforms.jit
def train(net: Net, x: Any, *, scale: float = 1.0) -> Any:
    net.n.value += 1
    net.layers[0].w.value = net.layers[0].w + scale * x
    net.seen = net.n.value
    return net.layers[1].w.value.sum()


def test_what_is_exported_writes_the_objects_that_it_is_called_with():
    net, x = Net(), jnp.arange(2.0)
    exported = ab.export(train)(net, x)
    assert int(net.n) == 0
    assert isinstance(exported.program, jax.export.Exported)
    other, plain = Net(3.0), Net(3.0)
    # an attribute is added, so that the structure is another one for a second call
    found, expected = exported.call(other, x), train.__wrapped__(plain, x)
    np.testing.assert_allclose(found, expected)
    assert ab.graph.equal(other, plain)
    assert other.layers[0] is other.layers[1]
    with pytest.raises(StructureError, match="exported"):
        exported.call(other, x)


def test_a_method_is_exported_with_its_object():
    net, x = Net(), jnp.ones(2)
    exported = ab.export(net.step)(x)
    other = Net()
    for i in range(1, 4):
        result = exported.call(other, x)
        assert result["layer"] is other.layers[0]
        assert float(result["sum"]) == 2 * (1 + 0.5 * i)
    assert (int(net.n), int(other.n)) == (0, 3)


def test_captured_objects_are_written_too():
    net = Net()

    def count(x: Any) -> Any:
        net.n.value += 1
        return x * net.n

    exported = ab.export(transforms.jit(count))(1.0)
    assert [float(exported.call(2.0)) for _ in range(3)] == [2.0, 4.0, 6.0]
    assert int(net.n) == 3


def test_bytes_are_read_in_another_process(tmp_path):
    exported = ab.export(train)(Net(), jnp.ones(2), scale=2.0)
    file = tmp_path / "program"
    file.write_bytes(exported.serialize())
    program = f"""
import anabranch as ab, jax.numpy as jnp, pathlib
from tests.transforms.test_export import Net
net = Net(3.0)
exported = ab.Exported.deserialize(pathlib.Path({str(file)!r}).read_bytes())
print(float(exported.call(net, jnp.ones(2), scale=2.0)), int(net.n), int(net.seen))
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["10.0", "1", "1"], done.stderr


def test_without_flatbuffers_it_says_what_to_install(monkeypatch):
    exported = ab.export(transforms.jit(abs))(-1.0)
    monkeypatch.setitem(sys.modules, "jax._src.export.serialization", None)
    with pytest.raises(MissingExtraError, match=r"anabranch\[export\]"):
        exported.serialize()


def test_what_cannot_be_exported_says_so():
    with pytest.raises(ArgumentError, match=r"export\(jit\(f\)\)"):
        ab.export(lambda v: v)
    with pytest.raises(ArgumentError, match="module"):
        ab.export(transforms.jit(lambda v: v * 2))(ab.Param(1.0)).serialize()


def test_a_graphdef_is_pickled_with_the_functions_in_it():
    net = Net()
    net.act, net.hooks = len, (max, {"f": min})
    graphdef, state = ab.split(net)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef
    merged = ab.merge(pickle.loads(pickle.dumps(graphdef)), state)
    assert merged.act is len
    assert merged.hooks == (max, {"f": min})
