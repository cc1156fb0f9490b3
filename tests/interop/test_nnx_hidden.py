"""Variables of flax behind objects that are no nodes: found by their use, as ours are."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import tracers

import anabranch as ab
from anabranch.errors import CapturedWriteError

AXES = (ab.Carry, 0)
TRANSFORMS = {
    "jit": ab.jit,
    "vmap": lambda f: ab.vmap(f, axis_size=3, in_axes=None, out_axes=None),
    "grad": lambda f: lambda x: ab.value_and_grad(f)(x)[0],
    "remat": ab.remat,
    "capture": lambda f: lambda x: ab.capture(f)(x)[0],
    "lift": ab.lift(functools.partial(jax.named_call, name="f")),
    "scan": lambda f: lambda x: ab.scan(lambda c, x: (c, f(x)))(0.0, x[None])[1][0],
    "cond": lambda f: lambda x: ab.cond(True, f, lambda x: x, x),
    "jit of grad": lambda f: ab.jit(lambda x: ab.value_and_grad(f)(x)[0]),
    "jit of scan": lambda f: ab.jit(lambda x: ab.scan(lambda c, x: (c, f(x)))(0.0, x[None])[1][0]),
}


def slots() -> list[Any]:
    return [vars(nnx.Variable)[name] for name in nnx.Variable.__slots__]


PLAIN = [*slots(), tracers.current_jax_trace]


@pytest.fixture(autouse=True)
def flax_is_as_flax_has_made_it():
    yield
    assert [*slots(), tracers.current_jax_trace] == PLAIN


def variable(x: float = 1.0) -> Any:
    return nnx.Variable(jnp.array(x))


@pytest.fixture
def hidden():
    """An object that is no node, with a Variable, a module and streams behind it."""
    return types.SimpleNamespace(
        v=variable(), model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    )


@pytest.fixture(params=TRANSFORMS)
def transform(request):
    return TRANSFORMS[request.param]


def test_reads_are_fresh_on_every_call(transform, hidden):
    f = transform(lambda x: x * hidden.v[...])
    assert f(jnp.array(2.0)) == 2
    hidden.v[...] = jnp.array(5.0)
    assert f(jnp.array(2.0)) == 10


def test_writes_come_back(transform, hidden):
    def count(x):
        hidden.v[...] += 1
        return x * hidden.v[...]

    f = transform(count)
    assert f(jnp.array(2.0)) == 4
    assert f(jnp.array(2.0)) == 6
    assert hidden.v[...] == 3
    hidden.v[...] += 1  # still the caller's


def test_metadata_are_written_too(hidden):
    @ab.jit
    def f():
        hidden.v.set_metadata(unit="m")
        return hidden.v.unit

    assert f() == "m"
    assert hidden.v.get_metadata("unit") == "m"


def test_a_failure_leaves_everything_as_it_was(transform, hidden):
    def f(x):
        hidden.v[...] += 1
        raise KeyError("late")

    before = hidden.v[...]
    with pytest.raises(KeyError, match="late"):
        transform(f)(jnp.array(1.0))
    assert hidden.v[...] is before


def test_what_is_hidden_and_an_argument_is_one(hidden):
    @ab.jit
    def f(v, x):
        v[...] += 1
        hidden.v[...] += 10
        return v, hidden.v, x

    first, second, _ = f(hidden.v, 1.0)
    assert first is second is hidden.v
    assert hidden.v[...] == 12
    first, second, _ = f(variable(100.0), 1.0)
    assert (first[...], second[...]) == (101, 22)
    assert second is hidden.v


def test_models_and_streams_behind_an_object_are_lifted(hidden):
    def f(x):
        return hidden.model(x) + jax.random.normal(hidden.rngs(), (2,))

    g, x = ab.jit(f), jnp.ones(2)
    keys = nnx.Rngs(0)
    for _ in range(2):
        expected = hidden.model(x) + jax.random.normal(keys(), (2,))
        assert jnp.allclose(g(x), expected, rtol=1e-5)
    assert hidden.rngs.default.count[...] == 2
    hidden.model.kernel[...] += 1
    assert jnp.allclose(g(x), hidden.model(x) + jax.random.normal(keys(), (2,)), rtol=1e-5)


def test_a_compiled_function_is_traced_once(hidden):
    traces = []

    @ab.jit
    def f(x):
        traces.append(1)
        hidden.v[...] += x
        return hidden.v[...]

    for _ in range(3):
        f(jnp.array(1.0))
    assert hidden.v[...] == 4
    assert len(traces) == 2  # once in vain


def test_a_module_that_nobody_can_see_is_not_written(transform, hidden):
    def f(x):
        hidden.v[...] += 1
        hidden.model.new = nnx.Param(x)
        return x

    before = hidden.v[...]
    with pytest.raises(CapturedWriteError, match="a Linear is written"):
        transform(f)(jnp.array(1.0))
    assert not hasattr(hidden.model, "new")
    assert hidden.v[...] is before


@pytest.mark.parametrize("box", ["capture", "lift"])
def test_in_a_box_of_the_same_trace_a_module_outside_is_told_from_those_inside(box, hidden):
    def outside(x):
        hidden.model.new = nnx.Param(x)
        return x

    def inside(m):
        made = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        made.kernel[...] *= 2
        made.late = nnx.Param(jnp.ones(2))
        m.child = made
        m.v[...] += 1
        return made

    transform = TRANSFORMS[box]
    with pytest.raises(CapturedWriteError, match="a Linear is written"):
        transform(outside)(jnp.array(1.0))
    assert not hasattr(hidden.model, "new")
    m = nnx.Dict(v=variable())
    assert transform(inside)(m) is m.child
    m.child.kernel[...] += 1
    m.child.later = nnx.Param(jnp.ones(2))
    assert m.v[...] == 2


def test_plain_transforms_of_jax_and_of_flax_inside(hidden):
    def f(xs):
        doubled = jax.vmap(lambda x: x * hidden.v[...])(xs)
        return nnx.jit(lambda v, xs: v[...] * xs)(hidden.v, doubled)

    g = ab.jit(f)
    assert g(jnp.ones(2)).tolist() == [1, 1]
    hidden.v[...] = jnp.array(3.0)
    assert g(jnp.ones(2)).tolist() == [9, 9]


def test_other_threads_see_flax_as_it_is(hidden):
    other, seen = variable(3.0), []

    def elsewhere():
        assert vars(nnx.Variable)["_raw_value"] is not PLAIN[0]
        other[...] += 1
        seen.append(hidden.v[...])

    hidden.elsewhere = elsewhere

    @ab.jit
    def f(x):
        hidden.v[...] += 1
        thread = threading.Thread(target=hidden.elsewhere)
        thread.start()
        thread.join()
        return x

    before = hidden.v[...]
    f(1.0)
    assert seen
    assert all(x is before for x in seen)
    assert other[...] == 3 + len(seen)
    assert hidden.v[...] == 2


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, nnx.clone, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_a_copy_of_what_was_found_is_another_one(make, hidden):
    f = ab.jit(lambda x: x * hidden.v[...])
    assert f(1.0) == 1
    box = nnx.Dict(v=hidden.v)
    other = types.SimpleNamespace(v=make(box).v)
    other.v[...] = jnp.array(5.0)
    g = ab.jit(lambda x: x * other.v[...])
    shared = other.v is hidden.v
    for value in (6.0, 7.0):
        other.v[...] = jnp.array(value)
        assert g(1.0) == value
        assert f(1.0) == (value if shared else 1)


def test_what_was_found_is_not_kept_alive(hidden):
    f = ab.jit(lambda x: x * hidden.v[...])
    hidden.v = nnx.Variable(jnp.ones(1234))
    f(1.0)
    hidden.v = variable()
    gc.collect()  # Variables of flax have no weak references, but a way to themselves
    alive = [x for x in gc.get_objects() if type(x) is nnx.Variable and x.shape == (1234,)]
    assert alive == []
    assert f(1.0) == 1
