"""Transforms as functions from a scalar function to a scalar function, for nesting them.

Each maps a function `f` with `f(x) = c * x` to a function with the value `c` at 1.0, so that the
value shows which `c` was read inside, however the transforms are nested.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec


def _mesh(n):
    return jax.make_mesh((n,), ("i",), axis_types=(AxisType.Auto,))


def shard_map(f):
    def over_devices(x):
        run = jax.shard_map(
            lambda y: f(y[0])[None],
            mesh=_mesh(8),
            in_specs=PartitionSpec("i"),
            out_specs=PartitionSpec("i"),
        )
        return run(jnp.full(8, x))[3]

    return over_devices


def pmap(f):
    return lambda x: jax.pmap(f)(jnp.full(8, x))[3]


def scan(f):
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0]


def fori_loop(f):
    return lambda x: lax.fori_loop(0, 1, lambda _, c: f(c), x)


def while_body(f):
    return lambda x: lax.while_loop(lambda c: c[1] < 1, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0]


def while_cond(f):
    # Counts up while it is below f(x) = c.
    return lambda x: lax.while_loop(lambda c: c < f(x), lambda c: c + 1.0, 0.0 * x)


def cond(f):
    return lambda x: lax.cond(x > 0, f, f, x)


def switch(f):
    return lambda x: lax.switch(jnp.int32(x), [f, f], x)


def lax_map(f):
    return lambda x: lax.map(f, x[None])[0]


def checkpoint(f):
    return jax.checkpoint(f)


def make_jaxpr(f):
    return lambda x: jax.core.eval_jaxpr(*_open(jax.make_jaxpr(f)(x)), x)[0]


def _open(closed):
    return closed.jaxpr, closed.consts


def lower(f):
    return lambda x: jax.jit(f).lower(x).compile()(x)


def eval_shape(f):
    def by_shape(x):
        assert jax.eval_shape(f, x).shape == ()
        return jax.jit(f)(x)  # JAX takes the trace that eval_shape made

    return by_shape


def closure_convert(f):
    def converted(x):
        g, consts = jax.closure_convert(f, x)
        return g(x, *consts)

    return converted


def linear_solve(f):
    # A diagonal system with the matrix c; the solution is multiplied by c squared.
    def solve(x):
        c = lax.custom_linear_solve(f, x, lambda matvec, b: b / matvec(1.0))
        return 1.0 / c

    return solve


def custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), tangents[0]))
    return g


def vmap(f):
    return lambda x: jax.vmap(f)(jnp.stack([x, x]))[1]


def grad(f):
    return lambda x: x * jax.grad(f)(x)


def value_and_grad(f):
    return lambda x: jax.value_and_grad(f)(x)[0]


def vjp(f):
    return lambda x: x * jax.vjp(f, x)[1](jnp.ones_like(x))[0]


def jvp(f):
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[0]


def linearize(f):
    return lambda x: x * jax.linearize(f, x)[1](jnp.ones_like(x))


def jacfwd(f):
    return lambda x: x * jax.jacfwd(f)(x)


def jacrev(f):
    return lambda x: x * jax.jacrev(f)(x)


def hessian(f):
    return lambda x: jax.hessian(lambda y: f(y) * y)(x) / 2.0


def vectorize(f):
    return lambda x: jnp.vectorize(f)(jnp.stack([x, x]))[1]


def named_scope(f):
    def scoped(x):
        with jax.named_scope("scope"):
            return f(x)

    return scoped


def disable_jit(f):
    def eager(x):
        with jax.disable_jit():
            return jax.jit(f)(x)

    return eager


BOUNDARIES = {
    "jit": jax.jit,
    "jit with options": functools.partial(jax.jit, inline=True),
    "lower": lower,
    "eval_shape": eval_shape,
    "make_jaxpr": make_jaxpr,
    "pmap": pmap,
    "shard_map": shard_map,
    "scan": scan,
    "fori_loop": fori_loop,
    "while_body": while_body,
    "while_cond": while_cond,
    "cond": cond,
    "switch": switch,
    "lax.map": lax_map,
    "checkpoint": checkpoint,
    "closure_convert": closure_convert,
    "custom_linear_solve": linear_solve,
}

TRANSPARENT = {
    "vmap": vmap,
    "vectorize": vectorize,
    "grad": grad,
    "value_and_grad": value_and_grad,
    "vjp": vjp,
    "jvp": jvp,
    "linearize": linearize,
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "hessian": hessian,
    "custom_jvp": custom_jvp,
    "named_scope": named_scope,
    "disable_jit": disable_jit,
}

# Those that nest in each other in any order and are cheap to compile.
NESTABLE = {
    name: {**BOUNDARIES, **TRANSPARENT}[name]
    for name in ("jit", "scan", "cond", "checkpoint", "vmap", "grad", "jvp", "linearize")
}
