"""The samplers of `jax.random` without their key argument.

Each takes the next key of the current stream (`get_next_key`) and hands everything else to its
namesake: the signatures, the results and the errors are those of `jax.random`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec

import jax
from jax import random as _jax_random

from anabranch.contextvars_ext._keystream_var import get_next_key

P = ParamSpec("P")

_DOC: Final = """Draw with `jax.random.{name}` and the next key of the current stream.

Arguments: those of `jax.random.{name}`, without the key.

Returns:
    What `jax.random.{name}` returns.

Raises:
    BehindBoundaryError: the current stream was set outside of a jit-like boundary.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from anabranch import contextvars_ext as cx
    >>> def draw(key):
    ...     with cx.set_keystream_on_enter(cx.KeyStream(key)):
    ...         return cx.random.{name}({example})
    >>> jax.eval_shape(draw, jax.random.key(0)).shape
    {shape}
"""


def _keyless(
    sampler: Callable[Concatenate[Any, P], jax.Array], example: str, shape: tuple[int, ...]
) -> Callable[P, jax.Array]:
    """Bind the first argument of a sampler, its key, to the current stream."""

    def draw(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
        return sampler(get_next_key(), *args, **kwargs)

    old = inspect.signature(sampler)
    without_key = old.replace(parameters=list(old.parameters.values())[1:])
    draw.__signature__ = without_key
    draw.__name__ = draw.__qualname__ = sampler.__name__
    draw.__doc__ = _DOC.format(name=sampler.__name__, example=example, shape=shape)
    return draw


ball = _keyless(_jax_random.ball, "3, shape=(2,)", (2, 3))
bernoulli = _keyless(_jax_random.bernoulli, "0.3, (4,)", (4,))
beta = _keyless(_jax_random.beta, "2.0, 3.0, (4,)", (4,))
binomial = _keyless(_jax_random.binomial, "10, 0.3, (4,)", (4,))
bits = _keyless(_jax_random.bits, "(4,)", (4,))
categorical = _keyless(_jax_random.categorical, "jnp.zeros((4, 3))", (4,))
cauchy = _keyless(_jax_random.cauchy, "(4,)", (4,))
chisquare = _keyless(_jax_random.chisquare, "3.0, (4,)", (4,))
choice = _keyless(_jax_random.choice, "10, (4,), replace=False", (4,))
dirichlet = _keyless(_jax_random.dirichlet, "jnp.ones(3), (4,)", (4, 3))
double_sided_maxwell = _keyless(_jax_random.double_sided_maxwell, "0.0, 1.0, (4,)", (4,))
exponential = _keyless(_jax_random.exponential, "(4,)", (4,))
f = _keyless(_jax_random.f, "2.0, 3.0, (4,)", (4,))
gamma = _keyless(_jax_random.gamma, "2.0, (4,)", (4,))
generalized_normal = _keyless(_jax_random.generalized_normal, "1.5, (4,)", (4,))
geometric = _keyless(_jax_random.geometric, "0.3, (4,)", (4,))
gumbel = _keyless(_jax_random.gumbel, "(4,)", (4,))
laplace = _keyless(_jax_random.laplace, "(4,)", (4,))
loggamma = _keyless(_jax_random.loggamma, "2.0, (4,)", (4,))
logistic = _keyless(_jax_random.logistic, "(4,)", (4,))
lognormal = _keyless(_jax_random.lognormal, "0.5, (4,)", (4,))
maxwell = _keyless(_jax_random.maxwell, "(4,)", (4,))
multinomial = _keyless(_jax_random.multinomial, "5, jnp.array([0.5, 0.5])", (2,))
multivariate_normal = _keyless(
    _jax_random.multivariate_normal, "jnp.zeros(3), jnp.eye(3), (4,)", (4, 3)
)
normal = _keyless(_jax_random.normal, "(4,)", (4,))
orthogonal = _keyless(_jax_random.orthogonal, "3", (3, 3))
pareto = _keyless(_jax_random.pareto, "2.0, (4,)", (4,))
permutation = _keyless(_jax_random.permutation, "4", (4,))
poisson = _keyless(_jax_random.poisson, "2.0, (4,)", (4,))
rademacher = _keyless(_jax_random.rademacher, "(4,)", (4,))
randint = _keyless(_jax_random.randint, "(4,), 0, 10", (4,))
rayleigh = _keyless(_jax_random.rayleigh, "2.0, (4,)", (4,))
t = _keyless(_jax_random.t, "3.0, (4,)", (4,))
triangular = _keyless(_jax_random.triangular, "0.0, 0.5, 1.0, (4,)", (4,))
truncated_normal = _keyless(_jax_random.truncated_normal, "-1.0, 1.0, (4,)", (4,))
uniform = _keyless(_jax_random.uniform, "(4,)", (4,))
wald = _keyless(_jax_random.wald, "2.0, (4,)", (4,))
weibull_min = _keyless(_jax_random.weibull_min, "2.0, 3.0, (4,)", (4,))

__all__ = [
    "ball",
    "bernoulli",
    "beta",
    "binomial",
    "bits",
    "categorical",
    "cauchy",
    "chisquare",
    "choice",
    "dirichlet",
    "double_sided_maxwell",
    "exponential",
    "f",
    "gamma",
    "generalized_normal",
    "geometric",
    "gumbel",
    "laplace",
    "loggamma",
    "logistic",
    "lognormal",
    "maxwell",
    "multinomial",
    "multivariate_normal",
    "normal",
    "orthogonal",
    "pareto",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "rayleigh",
    "t",
    "triangular",
    "truncated_normal",
    "uniform",
    "wald",
    "weibull_min",
]
