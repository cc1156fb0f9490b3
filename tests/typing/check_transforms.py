"""What a type checker says about transforms; pyright reads this file, nobody runs it."""

from __future__ import annotations

from typing import Any, assert_type

import jax

import anabranch as ab


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(1.0)

    @ab.jit
    def step(self, x: jax.Array) -> jax.Array:
        return self.w * x


def loss(model: Model, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return model.w * x * scale


def check_jit(model: Model, x: jax.Array) -> None:
    step = ab.jit(loss)
    assert_type(step(model, x, scale=2.0), jax.Array)
    step(model, "x")  # pyright: ignore[reportArgumentType] - the signature is that of the function
    step(model)  # pyright: ignore[reportCallIssue] - same
    assert_type(step.eval_shape(model, x), Any)
    assert_type(step.lower(model, x).compile()(model, x), jax.Array)
    assert_type(step.__wrapped__(model, x), jax.Array)


def check_jit_options(model: Model, x: jax.Array) -> None:
    assert_type(ab.jit(loss, static_argnames=("scale",), inline=True)(model, x), jax.Array)
    ab.jit(loss, static_argnames=1)  # pyright: ignore[reportArgumentType] - a str
    ab.jit(loss, donation=0)  # pyright: ignore[reportCallIssue] - no such option


@ab.jit(donate_argnums=0)
def decorated(model: Model, n: int) -> int:
    return n


def check_decorators(model: Model, x: jax.Array) -> None:
    assert_type(decorated(model, 1), int)
    decorated(model, "1")  # pyright: ignore[reportArgumentType] - the signature is kept
    assert_type(Model.step(model, x), jax.Array)
    assert_type(model.step(x), Any)  # a bound one has lost its signature
    assert_type(ab.vmap(in_axes=(None, 0))(loss)(model, x), jax.Array)
    assert_type(ab.grad(argnums=(0, 1))(loss)(model, x), Any)


def pick(model: Model, i: int) -> tuple[Model, int]:
    return model, i


def check_lanes(model: Model) -> None:
    assert_type(ab.vmap(pick)(model, i=1), tuple[Model, int])
    assert_type(ab.pmap(pick)(model, i=1), tuple[Model, int])
    axes = ab.StateAxes({ab.Param: 0, ...: None})
    assert_type(ab.vmap(pick, in_axes=(axes, 0), out_axes=0)(model, 1), tuple[Model, int])
    assert_type(ab.pmap(pick, axis_name="devices")(model, 1), tuple[Model, int])
    ab.vmap(pick, axis=0)  # pyright: ignore[reportCallIssue] - no such option
    ab.pmap(pick, axis_size="8")  # pyright: ignore[reportArgumentType] - an int


def check_grad(model: Model) -> None:
    assert_type(ab.grad(pick)(model, i=1), Any)
    assert_type(ab.value_and_grad(pick, has_aux=True)(model, 1), Any)
    ab.grad(pick, argnums=ab.DiffState(0, ab.Param))
    ab.grad(pick)(model, "1")  # pyright: ignore[reportArgumentType] - the signature is kept
    ab.grad(pick, argnum=0)  # pyright: ignore[reportCallIssue] - no such option
