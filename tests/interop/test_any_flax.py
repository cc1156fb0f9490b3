"""What holds with every release of flax that is supported, in the words that all of them know."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import SpentTwinError
from anabranch.interop._layout import metadata_of


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)
        self.again = self.first

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train(jit: Any, value_and_grad: Any) -> tuple[list[float], dict[Any, Any], int]:
    model = Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
    x, y = jax.random.normal(jax.random.key(1), (8, 3)), jnp.ones((8, 2))
    traces = []

    @jit
    def step(model, optimizer, x, y):
        traces.append(1)
        loss, grads = value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, x, y)) for _ in range(5)]
    assert model.again is model.first
    return losses, ab.state([model, optimizer], ab.Not(ab.RngKey)).flat(), len(traces)


def test_a_training_is_what_it_is_with_the_transforms_of_flax():
    ours, theirs = train(ab.jit, ab.value_and_grad), train(nnx.jit, nnx.value_and_grad)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for path, x in theirs[1].items():
        np.testing.assert_allclose(ours[1][path], x, rtol=1e-4, atol=1e-5, err_msg=str(path))
    assert ours[2] == theirs[2] == 1


def test_states_go_back_and_forth():
    model = Net(nnx.Rngs(0))
    graphdef, state = ab.split(model)
    nnx_state = ab.interop.to_nnx_state(state)
    assert isinstance(nnx_state, nnx.State)
    assert ab.interop.from_nnx_state(nnx_state) == state
    assert ab.graph.equal(ab.merge(graphdef, state), model)


def test_twins_are_spent():
    kept = []

    @ab.jit
    def f(model):
        kept.append((model, model.first.kernel))

    f(Net(nnx.Rngs(0)))
    for twin in kept[0]:
        with pytest.raises(SpentTwinError):
            ab.split(twin)


def test_a_write_to_an_outer_object_raises_the_error_of_flax():
    from flax.errors import TraceContextError

    model = Net(nnx.Rngs(0))

    def f(x):
        model.extra = x
        return x

    with pytest.raises(TraceContextError):
        jax.jit(f)(jnp.array(1.0))


def test_flax_is_imported_when_its_objects_appear_and_not_before():
    program = """if True:
        import sys
        import anabranch as ab
        ab.jit(lambda m: m.value + 1)(ab.Param(1.0))
        assert not [m for m in sys.modules if m.startswith(("flax", "optax", "equinox"))]
        assert "anabranch.interop._nnx" not in sys.modules
        from flax import nnx
        assert ab.jit(lambda v: v[...] + 1)(nnx.Param(1.0)) == 2
    """
    subprocess.run([sys.executable, "-c", program], check=True)


class Part(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), first="a", last="b")
        self.n = 1


class Parts(nnx.Module):
    def __init__(self):
        self.a, self.b = Part(), Part()


def seen(m):
    parts = {name: x for name, x in vars(m).items() if isinstance(x, Part)}
    statics = {
        name: {k: v for k, v in vars(x).items() if isinstance(v, (int, str))}
        for name, x in parts.items()
    }
    metadata = {name: dict(x.w.get_metadata()) for name, x in parts.items()}
    return sum(x.w[...].sum() for x in parts.values()), repr((statics, metadata))


DOORS = {
    "value": lambda m: m.a.w.__setitem__(..., jnp.full(2, 3.0)),
    "static": lambda m: setattr(m.b, "n", True),
    "new": lambda m: setattr(m.a, "late", 2),
    "renamed": lambda m: (delattr(m.b, "n"), setattr(m.b, "renamed", 1)),
    "replaced": lambda m: setattr(m.b, "w", nnx.Param(jnp.full(2, 5.0))),
    "metadata": lambda m: metadata_of(m.b.w).__setitem__("last", "c"),
    "metadata renamed": lambda m: (
        metadata_of(m.b.w).__delitem__("last"),
        metadata_of(m.b.w).__setitem__("renamed", "b"),
    ),
    "a part": lambda m: setattr(m, "c", Part()),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_planned_call_sees_what_was_written_before_it(door):
    compiled, ours, plain = ab.jit(seen), Parts(), Parts()
    for _ in range(4):
        assert str(compiled(ours)) == (before := str(seen(plain)))
    DOORS[door](ours)
    DOORS[door](plain)
    assert str(seen(plain)) != before
    for _ in range(3):
        assert str(compiled(ours)) == str(seen(plain))
