"""What a user sees of a failure: the call, the line that failed, and nothing between them."""

from __future__ import annotations

import functools
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import AnabranchError, NodeTypeError, StructureError

HERE = __file__


def fail(*_: Any, **__: Any) -> Any:
    raise ValueError("mine")


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(8))

    def fail(self, *_: Any) -> Any:
        fail()

    @ab.jit
    def method(self, *_: Any) -> Any:
        fail()

    def __call__(self, *_: Any) -> Any:
        fail()


def custom_vjp() -> Any:
    function = ab.custom_vjp(lambda x: x)
    function.defvjp(fail, fail)
    return function


def backward() -> Any:
    function = ab.custom_vjp(lambda x: x * 1.0)
    function.defvjp(lambda x: (x * 1.0, None), fail)
    return function


def custom_jvp() -> Any:
    function = ab.custom_jvp(lambda x: x)
    function.defjvp(fail)
    return function


def mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))


X = jnp.ones(8)
SPEC = jax.sharding.PartitionSpec("i")
CALLS: dict[str, Callable[[], Any]] = {
    "jit": lambda: ab.jit(fail)(X),
    "jit twice": lambda: ab.jit(ab.jit(fail))(X),
    "jit of a bound method": lambda: ab.jit(Model().fail)(X),
    "jit of a module": lambda: ab.jit(Model())(X),
    "jit in a class body": lambda: Model().method(X),
    "jit of a partial": lambda: ab.jit(functools.partial(fail, X))(1),
    "jit, donating": lambda: ab.jit(fail, donate_argnums=0)(X),
    "lower": lambda: ab.jit(fail).lower(X),
    "trace": lambda: ab.jit(fail).trace(X),
    "eval_shape of jit": lambda: ab.jit(fail).eval_shape(X),
    "lower of a method": lambda: Model().method.lower(X),
    "vmap": lambda: ab.vmap(fail)(X),
    "vmap of a bound method": lambda: ab.vmap(Model().fail)(X),
    "pmap": lambda: ab.pmap(fail)(X),
    "shard_map": lambda: ab.shard_map(fail, mesh=mesh(), in_specs=SPEC, out_specs=SPEC)(X),
    "grad": lambda: ab.grad(fail)(1.0),
    "value_and_grad": lambda: ab.value_and_grad(fail)(1.0),
    "vjp": lambda: ab.vjp(fail, 1.0),
    "jvp": lambda: ab.jvp(fail, (1.0,), (1.0,)),
    "linearize": lambda: ab.linearize(fail, 1.0),
    "jacfwd": lambda: ab.jacfwd(fail)(1.0),
    "jacrev": lambda: ab.jacrev(fail)(1.0),
    "hessian": lambda: ab.hessian(fail)(1.0),
    "custom_vjp": lambda: ab.grad(custom_vjp())(1.0),
    "backward rule": lambda: ab.grad(backward())(1.0),
    "custom_jvp": lambda: ab.grad(custom_jvp())(1.0),
    "remat": lambda: ab.remat(fail)(X),
    "scan": lambda: ab.scan(fail)(0.0, X),
    "associative_scan": lambda: ab.associative_scan(fail, X),
    "map": lambda: ab.map(fail, X),
    "fori_loop": lambda: ab.fori_loop(0, 3, fail, X),
    "while_loop": lambda: ab.while_loop(fail, fail, X),
    "cond": lambda: ab.cond(True, fail, fail, X),
    "switch": lambda: ab.switch(0, [fail, fail], X),
    "eval_shape": lambda: ab.eval_shape(fail, X),
    "make_jaxpr": lambda: ab.make_jaxpr(fail)(X),
    "checkify": lambda: ab.checkify(fail)(X),
    "capture": lambda: ab.capture(fail)(X),
    "lift": lambda: ab.lift(jax.named_call)(fail)(X),
    "split_rngs": lambda: ab.split_rngs(fail, splits=2)(ab.Rngs(0)),
    "nested": lambda: ab.jit(ab.vmap(ab.grad(ab.remat(fail))))(X),
    "inside plain jax": lambda: jax.jit(lambda x: ab.cond(True, fail, fail, x))(X),
    "map_leaves": lambda: ab.map_leaves(fail, Model()),
}


def frames_of(error: BaseException) -> list[tuple[str, str]]:
    return [(f.filename, f.name) for f in traceback.extract_tb(error.__traceback__)]


def caught(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("name", CALLS)
def test_only_frames_of_the_user_are_seen(name):
    error = caught(CALLS[name])
    assert isinstance(error, ValueError)
    assert str(error) == "mine"
    frames = frames_of(error)
    assert {filename for filename, _ in frames} == {HERE}
    assert frames[0][1] == "caught"
    assert frames[-1][1] == "fail"


@pytest.mark.parametrize("name", ["jit", "cond", "scan", "nested"])
def test_only_frames_of_the_user_are_seen_without_jit(name):
    with jax.disable_jit():
        error = caught(CALLS[name])
    assert {filename for filename, _ in frames_of(error)} == {HERE}


@pytest.mark.parametrize("name", ["jit", "vmap", "cond", "jit of a bound method"])
def test_the_environment_can_ask_for_all_frames(name, monkeypatch):
    monkeypatch.setenv("ANABRANCH_TRACEBACK", "full")
    names = [filename for filename, _ in frames_of(caught(CALLS[name]))]
    assert any("/anabranch/transforms/" in filename for filename in names)
    assert names[-1] == HERE


def test_frames_of_jax_stay_where_jax_is_asked_for_them():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        names = [filename for filename, _ in frames_of(caught(CALLS["jit"]))]
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert any("/jax/_src/" in filename for filename in names)
    assert not any("/anabranch/transforms/" in filename for filename in names)


def test_it_is_the_object_that_was_raised_with_what_it_came_from():
    original, cause = ValueError("mine"), KeyError("cause")

    def f(x):
        try:
            ab.vmap(g)(x)
        except KeyError as error:
            raise original from error

    def g(x):
        raise cause

    error = caught(lambda: ab.jit(f)(X))
    assert error is original
    assert error.__cause__ is cause
    assert {filename for filename, _ in frames_of(cause)} == {HERE}
    assert [name for _, name in frames_of(cause)] == ["f", "g"]


def test_groups_of_errors_are_looked_into():
    def f(x):
        errors = []
        for call in (CALLS["grad"], CALLS["vmap"]):
            try:
                call()
            except ValueError as error:
                errors.append(error)
        raise ExceptionGroup("two", errors)

    group = caught(lambda: ab.jit(f)(X))
    assert isinstance(group, ExceptionGroup)
    for error in group.exceptions:
        assert {filename for filename, _ in frames_of(error)} == {HERE}


def test_an_error_of_ours_is_seen_at_the_call():
    class Plain:
        def __init__(self) -> None:
            self.n = jnp.ones(3)

    error = caught(lambda: ab.jit(lambda x: x)(Plain()))
    assert isinstance(error, NodeTypeError)
    assert [name for _, name in frames_of(error)] == ["caught", "<lambda>"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: ab.cond(0, 1, 2),
        lambda: ab.split(Model(), ab.BatchStat),
        lambda: ab.update(Model(), {"v": 1}),
        lambda: ab.pop(Model(), 3),
        lambda: ab.vmap(fail, rngs="spilt"),
        lambda: ab.jit(lambda y: y, static_argnames="x")(1),
    ],
)
def test_a_call_that_is_refused_is_the_last_line(call):
    error = caught(call)
    assert isinstance(error, AnabranchError)
    assert [name for _, name in frames_of(error)] == ["caught", "<lambda>"]


def test_an_error_of_ours_names_the_transforms_that_it_came_through():
    def inner(x):
        raise StructureError("x: wrong; write y")

    def outer(x):
        return ab.vmap(inner)(x)

    error = caught(lambda: ab.jit(outer)(X))
    line = inner.__code__.co_firstlineno
    first, second, third = str(error).splitlines()
    assert first == "x: wrong; write y"
    assert second.endswith(f"in vmap of {inner.__qualname__} at {HERE}:{line}")
    assert third.endswith(f"in jit of {outer.__qualname__} at {HERE}:{line + 3}")


def test_grad_is_named_once():
    def loss(x):
        raise StructureError("x")

    assert str(caught(lambda: ab.grad(loss)(1.0))).count("\n  in grad of ") == 1
    assert "value_and_grad" not in str(caught(lambda: ab.grad(loss)(1.0)))


def test_an_error_keeps_its_text_when_it_is_pickled():
    error = caught(lambda: ab.vmap(fail, axis_size=3)(X))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert " in vmap" in str(error)


def test_an_exception_keeps_no_frame_of_ours_alive():
    error = caught(CALLS["jit"])
    entry = error.__traceback__
    while entry is not None:
        assert entry.tb_frame.f_code.co_filename == HERE
        entry = entry.tb_next


def test_success_costs_no_frame():
    depth: list[int] = []

    def f(x):
        frame, count = sys._getframe(), 0
        while frame is not None:
            count += frame.f_code.co_filename.endswith("_boundary.py")
            frame = frame.f_back
        depth.append(count)
        return x

    ab.vmap(f)(X)
    ab.jit(f)(X)
    assert depth == [0, 0]
