"""Every transform as one that equals the plain call: what the contract suite runs over.

`wrap(f)(*args, **kwargs)` runs `f` once under a transform, with axes and arguments that do not
change its meaning, and returns what `f` returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from anabranch import transforms

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def packed(run: Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]) -> Wrap:
    """Make a wrapper of a function that gets the arguments as a list and a dict."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def unpacked(args: list[Any], kwargs: dict[str, Any]) -> Any:
            return f(*args, **kwargs)

        return lambda *args, **kwargs: run(unpacked, list(args), kwargs)

    return wrap


def loss_of(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, args, kwargs: (x * 2.0, f(args, kwargs))


LANES: dict[str, Any] = {"in_axes": (0, None, None), "out_axes": None}


def in_lanes(lanes: Any) -> Wrap:
    def run(f: Any, args: Any, kwargs: Any) -> Any:
        mapped = lanes(lambda lane, args, kwargs: f(args, kwargs), **LANES)
        return mapped(jnp.arange(2.0), args, kwargs)

    return packed(run)


def shard_map(f: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    spec = jax.sharding.PartitionSpec()
    return transforms.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


EXACT: dict[str, Wrap] = {
    "jit": transforms.jit,
    "vmap": in_lanes(transforms.vmap),
    "pmap": in_lanes(transforms.pmap),
    "shard_map": shard_map,
    "grad": packed(lambda f, a, k: transforms.grad(loss_of(f), has_aux=True)(1.0, a, k)[1]),
    "value_and_grad": packed(
        lambda f, a, k: transforms.value_and_grad(loss_of(f), has_aux=True)(1.0, a, k)[0][1]
    ),
    "vjp": packed(
        lambda f, a, k: transforms.vjp(loss_of(f), 1.0, a, k, has_aux=True, argnums=(0,))[2]
    ),
    "jvp": packed(
        lambda f, a, k: transforms.jvp(
            functools.partial(lambda a, k, x: loss_of(f)(x, a, k), a, k),
            (1.0,),
            (1.0,),
            has_aux=True,
        )[2]
    ),
    "linearize": packed(
        lambda f, a, k: transforms.linearize(
            functools.partial(lambda a, k, x: loss_of(f)(x, a, k), a, k), 1.0, has_aux=True
        )[2]
    ),
    "jacfwd": packed(lambda f, a, k: transforms.jacfwd(loss_of(f), has_aux=True)(1.0, a, k)[1]),
    "jacrev": packed(lambda f, a, k: transforms.jacrev(loss_of(f), has_aux=True)(1.0, a, k)[1]),
    "hessian": packed(lambda f, a, k: transforms.hessian(loss_of(f), has_aux=True)(1.0, a, k)[1]),
    "remat": transforms.remat,
    "cond": packed(lambda f, a, k: transforms.cond(True, f, f, a, k)),
    "switch": packed(lambda f, a, k: transforms.switch(1, [f, f, f], a, k)),
    "custom_vjp": packed(lambda f, a, k: _with_vjp(f)(a, k)),
    "custom_jvp": packed(lambda f, a, k: _with_jvp(f)(a, k)),
    "checkify": lambda f: lambda *args, **kwargs: transforms.checkify(f)(*args, **kwargs)[1],
    "lift": transforms.lift(jax.named_call),
}
"""Equal to the plain call, whatever the function does."""


def _with_vjp(f: Callable[..., Any]) -> Any:
    wrapped = transforms.custom_vjp(f)
    wrapped.defvjp(lambda a, k: (f(a, k), None), lambda residuals, ct: (None, None))
    return wrapped


def _with_jvp(f: Callable[..., Any]) -> Any:
    wrapped = transforms.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: (f(*primals), None))
    return wrapped


def _scan(f: Any, args: Any, kwargs: Any, steps: int) -> Any:
    def step(count: Any, x: Any, args: Any, kwargs: Any) -> Any:
        return count + 1, f(args, kwargs)

    axes = (ab.Carry, 0, None, None)
    return transforms.scan(step, in_axes=axes)(0, jnp.arange(float(steps)), args, kwargs)[1]


def _fori(f: Any, args: Any, kwargs: Any, steps: int) -> None:
    def body(i: Any, state: Any) -> Any:
        f(*state)
        return state

    transforms.fori_loop(0, steps, body, (args, kwargs))


def _while(f: Any, args: Any, kwargs: Any, steps: int) -> None:
    def body(state: Any) -> Any:
        f(*state[1:])
        return (state[0] + 1, *state[1:])

    transforms.while_loop(lambda state: state[0] < steps, body, (0, args, kwargs))


def loops(steps: int) -> dict[str, Wrap]:
    """Return the loops, with some number of steps."""
    found = {"scan": _scan, "fori_loop": _fori, "while": _while}
    return {name: packed(functools.partial(run, steps=steps)) for name, run in found.items()}


def without_jit(wraps: dict[str, Wrap]) -> dict[str, Wrap]:
    """Return the same where JAX does not trace: functions run in the trace of their caller."""

    def disabled(wrap: Wrap) -> Wrap:
        def wrapped(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with jax.disable_jit():
                    return wrap(f)(*args, **kwargs)

            return call

        return wrapped

    return {f"{name} without jit": disabled(wrap) for name, wrap in wraps.items()}


EXACT_WITHOUT_JIT = without_jit({name: EXACT[name] for name in ("jit", "cond", "switch")})
STEADY_WITHOUT_JIT = without_jit(loops(1))
EXACT |= EXACT_WITHOUT_JIT
STEADY: dict[str, Wrap] = {**loops(1), **STEADY_WITHOUT_JIT}
"""Equal to the plain call if the function leaves the structure that it started from."""


def _map(f: Any, args: Any, kwargs: Any) -> Any:
    return transforms.map(lambda x: f(args, kwargs), jnp.arange(1.0))


def _associative(f: Any, args: Any, kwargs: Any) -> Any:
    return transforms.associative_scan(lambda a, b: (f(args, kwargs), a + b)[1], jnp.arange(4.0))


READING: dict[str, Wrap] = {"map": packed(_map), "associative_scan": packed(_associative)}
"""Their functions must not write, since nobody knows in which order they run."""

ALL = {**EXACT, **STEADY, **READING}
