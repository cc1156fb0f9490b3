"""`grad` and `value_and_grad`: gradients of a node come back as a State, writes come back once.

The derivative is taken with respect to the values at entry. A shared Variable counts once, with the
summed gradient, in the first argument that reaches it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from anabranch._boundary import boundary
from anabranch.errors import StructureError
from anabranch.graph import _classify
from anabranch.transforms._box import (
    ONE_GROUP,
    array_leaves,
    array_outputs,
    as_array,
    finish,
    run_inside,
)
from anabranch.transforms._call import flatten_call, positions
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._differentiated import Argument, Differentiated, listed
from anabranch.transforms._options import GradOptions
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")


@overload
def value_and_grad(
    function: Callable[P, object], /, **options: Unpack[GradOptions]
) -> Callable[P, Any]: ...
@overload
def value_and_grad(
    **options: Unpack[GradOptions],
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
@boundary("value_and_grad")
@checks_options("value_and_grad")
def value_and_grad(
    function: Any = None,
    /,
    *,
    argnums: Argument | Sequence[Argument] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Return a function that computes a value and its gradients, as `jax.value_and_grad` does.

    What the function writes comes back once, as primal values.

    Arguments:
        function: returns a scalar, or `(scalar, aux)` with `has_aux`; aux can hold objects.
            Without it, `value_and_grad` is a decorator.
        argnums: which arguments are differentiated: positions, names or `DiffState`. Of
            objects, the `Param`s are by default; of plain containers, every inexact array.
        has_aux: whether the function returns a pair.
        holomorphic: see `jax.grad`.
        allow_int: accept integer arrays where a filter selects them.

    Returns:
        A function that returns `(value, gradients)`. The gradients of an object are a `State` with
        its paths; containers of objects and arrays keep their form, with None for what is not
        differentiated. Several argnums give a tuple.

    Raises:
        FilterError: nothing is selected, or something that has no gradient.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(3.0), "calls": ab.Variable(0)}
    >>> def loss(model, x):
    ...     model["calls"].value += 1
    ...     return model["w"] * x
    >>> value, grads = ab.value_and_grad(loss)(model, 2.0)
    >>> float(value), float(grads["w"][()]), int(model["calls"])
    (6.0, 2.0, 1)
    """
    options: dict[str, Any] = {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }
    remake = functools.partial(value_and_grad, **options)
    if function is None:
        return remake
    return wrap(_both(function, **options), function, remake, name="value_and_grad")


@overload
def grad(function: Callable[P, object], /, **options: Unpack[GradOptions]) -> Callable[P, Any]: ...
@overload
def grad(**options: Unpack[GradOptions]) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
@boundary("grad")
@checks_options("grad")
def grad(
    function: Any = None,
    /,
    *,
    argnums: Argument | Sequence[Argument] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Return a function that computes gradients, as `jax.grad` does; see `value_and_grad`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)` with `has_aux`.

    >>> import anabranch as ab
    >>> grads = ab.grad(lambda v: v**2)(ab.Param(3.0))
    >>> float(grads[()])
    6.0
    """
    options: dict[str, Any] = {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }
    remake = functools.partial(grad, **options)
    if function is None:
        return remake
    return wrap(_both(function, **options, value=False), function, remake, name="grad")


def _both(
    function: Any,
    argnums: Argument | Sequence[Argument],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    value: bool = True,
) -> Callable[..., Any]:
    """Return a function that returns the value, unless it is not asked for, and the gradients."""
    single, chosen = listed(argnums)
    names = functools.partial(positions, function)

    def pick_loss(result: Any) -> Any:
        return _loss(result, has_aux=has_aux)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, args, kwargs)
        parts = Differentiated(flat, chosen, len(args), names, allow_int=allow_int)

        def run(inputs: list[Any], leaves: list[Any]) -> Any:
            full = parts.insert(leaves, inputs)
            inside = run_inside(flat.graphdef, full, ONE_GROUP, pick_loss)
            return inside.picked, (inside.report, inside.groups)

        leaves = array_leaves(flat.leaves)
        differentiate = jax.value_and_grad(
            run, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (_, (report, groups)), gradients = differentiate(parts.inputs(leaves), leaves)
        result = finish(flat, report, array_outputs(groups))
        found = parts.derivatives(gradients)
        found = found[0] if single else found
        if value:
            return result, found
        return (found, result[1]) if has_aux else found

    return call


def _loss(result: Any, *, has_aux: bool) -> Any:
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise StructureError(
                "with has_aux=True the function returns a pair (loss, aux), but it returned a "
                f"{type(result).__name__}"
            )
        result = result[0]
    value = _classify.value_of(result)
    array = isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    if not array or np.shape(value) != ():
        shape = f"an array of shape {np.shape(value)}" if array else f"a {type(value).__name__}"
        raise StructureError(
            f"gradients are taken of a scalar, but the function returned {shape}; sum or average "
            "it, or return (loss, aux) with has_aux=True"
        )
    dtype = value.dtype if isinstance(value, jax.Array) else jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise StructureError(
            f"gradients are taken of a real number, but the function returned {dtype}; convert it "
            "(`astype(float)`), or return what it was computed from"
        )
    return as_array(value)
