"""A call that raises leaves everything as it was, and the next one works (R2, C30, C31, C34)."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import anabranch as ab
from anabranch import contextvars_ext, transforms
from anabranch.errors import IndexWriteError
from tests.property.contents import Snapshot, reachable
from tests.property.faults import left_open
from tests.property.objects import Block


class Boom(Exception):
    pass


def world() -> Any:
    model = Block(v=ab.Param(jnp.array(1.0)), array=jnp.array(1.0), items=[1], n=0)
    model.me = model
    return model


def write_all(model: Any) -> None:
    model.v.value = model.v.value + 1
    model.array = model.array * 2
    model.items.append({})
    model.n += 1
    model.new = ab.Variable(model.array)


FAILING: dict[str, Any] = {
    "raise in the function": lambda x: _raise(Boom),
    "interrupt in the function": lambda x: _raise(KeyboardInterrupt),
    "raise while it is traced by JAX": lambda x: jnp.zeros(2) + jnp.zeros(3),
    "raise in a callback": lambda x: jax.debug.callback(lambda _: _raise(Boom), x),
    "raise in a callback with a result": lambda x: jax.debug.callback(
        lambda _: None, jax.pure_callback(lambda _: _raise(Boom), x, x)
    ),
    "raise in a transform of JAX": lambda x: jax.lax.scan(lambda c, _: _raise(Boom), x, None, 2),
}


def _raise(error: type[BaseException]) -> Any:
    raise error


def in_lanes(f: Any) -> Any:
    return transforms.vmap(f, in_axes=None, axis_size=2, out_axes=None)


WRAPS = {
    "jit": transforms.jit,
    "remat": transforms.remat,
    "vmap": in_lanes,
    "cond": lambda f: lambda m: transforms.cond(True, f, f, m),
    "jit of vmap": lambda f: transforms.jit(in_lanes(f)),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("how", FAILING)
def test_what_was_written_before_an_error_is_not_written(wrap, how):
    model, fails = world(), [True]
    before = Snapshot(reachable([model]))

    def f(model: Any) -> None:
        write_all(model)
        if fails:
            FAILING[how](model.v.value)

    call = WRAPS[wrap](f)
    with pytest.raises(BaseException) as caught:
        call(model)
    assert not isinstance(caught.value, AssertionError)
    assert before.changes() == [] and left_open() == []
    assert not isinstance(model.v.value, jax.core.Tracer)
    fails.clear()
    fresh = WRAPS[wrap](f)  # what was traced may be kept: the error is part of it
    fresh(model)
    assert (float(model.v.value), float(model.array), model.n, len(model.items)) == (2, 2, 1, 2)
    assert float(model.new.value) == 2 and model.me is model


def test_a_function_is_traced_once_whatever_calls_fail_in_between():
    """C34."""
    model, other, traces = world(), Block(), []

    @functools.partial(transforms.jit, static_argnames="fails")
    def f(model: Any, x: Any, *, fails: bool = False) -> None:
        traces.append(fails)
        model.v.value = model.v.value + x
        model.array = model.array + x
        if fails:
            raise Boom

    for n in range(5):
        f(model, 1.0)
        with pytest.raises(Boom):
            f(model, 1.0, fails=True)
        setattr(other, f"a{n}", n)
    assert (float(model.v.value), float(model.array)) == (6.0, 6.0)
    assert traces.count(False) == 1


@pytest.mark.parametrize("how", [Boom, KeyboardInterrupt])
def test_contexts_are_closed_after_an_error(how):
    unit = contextvars_ext.JitAwareContextVar[str]("unit")
    model = world()
    before = Snapshot(reachable([model]))

    @transforms.jit
    def f(model: Any) -> None:
        write_all(model)
        with unit.set_on_enter("inside"), ab.update_context("tag"):
            with ab.split_context("tag") as ctx:
                ctx.split(model)
            raise how

    with pytest.raises(how), unit.set_on_enter("outside"), ab.update_context("tag"):
        f(model)
    assert before.changes() == [] and left_open() == []
    assert unit.get(None) is None
    with pytest.raises(ab.errors.ContextTagError), ab.split_context("tag") as ctx:
        ctx.split(model)


def test_an_error_in_a_manual_context_leaves_everything_as_it_was():
    model = world()
    before = Snapshot(reachable([model]))

    def inside(graphdef: Any, state: Any) -> Any:
        with ab.merge_context("tag") as ctx:
            twin = ctx.merge(graphdef, state)
        write_all(twin)
        raise Boom

    with pytest.raises(Boom), ab.update_context("tag"):
        with ab.split_context("tag") as ctx:
            graphdef, state = ctx.split(model)
        jax.jit(inside)(graphdef, state)
    assert before.changes() == [] and left_open() == []


@pytest.mark.parametrize("how", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["captured", "found by its use"])
def test_captured_objects_are_left_as_they_were(way, how):
    model = world()
    hidden = types.SimpleNamespace(v=model.v)
    before = Snapshot(reachable([model]))
    fails = [True]

    def captured() -> None:
        write_all(model)
        if fails:
            raise how

    def found() -> None:
        hidden.v.value = hidden.v.value + 1
        if fails:
            raise how

    f = transforms.jit(captured if way == "captured" else found)
    for _ in range(2):
        with pytest.raises(how):
            f()
        assert before.changes() == [] and left_open() == []
    fails.clear()
    f()
    assert float(model.v.value) == 2.0


def test_a_failed_check_is_a_value_and_what_is_written_is_written():
    model = world()

    def f(model: Any) -> None:
        model.v.value = model.v.value + 1
        checkify.check(model.v.value < 3, "too large")

    checked = transforms.jit(transforms.checkify(f))
    for _ in range(3):
        error, _ = checked(model)
    with pytest.raises(checkify.JaxRuntimeError, match="too large"):
        error.throw()
    assert float(model.v.value) == 4.0


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, *WRAPS.values(), lambda f: lambda m: transforms.fori_loop(0, 5, _step(f), m)],
    ids=["plain", *WRAPS, "fori_loop"],
)
def test_a_float_written_into_an_int_by_index_is_refused_everywhere(wrap):
    """C30."""
    v = ab.Variable(jnp.array(0))

    def f(v: Any) -> None:
        v[...] = v[...] + 1.5

    call = wrap(f)
    for _ in range(5):
        with pytest.raises(IndexWriteError, match="float32 into a Variable of dtype int32"):
            call(v)
    assert int(v) == 0 and v.dtype == jnp.int32


def _step(f: Any) -> Any:
    def body(_: Any, v: Any) -> Any:
        f(v)
        return v

    return body


@pytest.mark.parametrize("wrap", [lambda f: f, *WRAPS.values()], ids=["plain", *WRAPS])
def test_a_float_added_to_an_int_is_what_plain_jax_makes_of_it(wrap):
    """C30."""
    v, plain = ab.Variable(jnp.array(0)), jnp.array(0)

    def f(v: Any) -> None:
        v.value = v.value + 1.5

    call = wrap(f)
    for _ in range(5):
        call(v)
        plain = plain + 1.5
    assert (v.dtype, float(v)) == (plain.dtype, float(plain)) == (jnp.float32, 7.5)
