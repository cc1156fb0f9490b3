"""`eval_shape`: what a call would return, without computing it or changing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from anabranch._boundary import boundary
from anabranch.graph._build import build
from anabranch.graph._flatten import Flat
from anabranch.transforms._box import ONE_GROUP, Report, finish, run_inside
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._lifting import lifting
from anabranch.transforms._names import name_inside


@boundary("eval_shape")
@lifting
def eval_shape(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a call would return, with a `jax.ShapeDtypeStruct` in place of each array.

    Nothing is computed, and the arguments are not changed: where the result refers to them, it
    refers to copies, in the state that the call would leave them in. What is one object in the
    result of the call is one object here.

    Arguments:
        function: a function, method or callable object.
        *args: its arguments; arrays in them, and those of objects, may be `ShapeDtypeStruct`s.
        **kwargs: its keyword arguments.

    >>> import anabranch as ab, jax, jax.numpy as jnp
    >>> class Linear(ab.Module):
    ...     def __init__(self, key, size):
    ...         self.w = ab.Param(jax.random.normal(key, (size, size)))
    >>> make = lambda key: Linear(key, 10_000)
    >>> ab.eval_shape(make, jax.random.key(0)).w.value.shape
    (10000, 10000)
    """
    check_functions("eval_shape", function=function)
    flat = flatten_call(function, args, kwargs)

    def run(*leaves: Any) -> Any:  # a new one each time: JAX would remember what it closes over
        inside = run_inside(flat.graphdef, leaves, ONE_GROUP)
        return inside.report, inside.groups

    report, groups = jax.eval_shape(name_inside(run, function, flat.graphdef), *flat.leaves)
    return finish_on_copies(flat, report, groups)


def finish_on_copies(flat: Flat, report: Report, groups: Sequence[Sequence[Any]]) -> Any:
    """Step 4 on copies of the caller's objects that hold shapes and dtypes."""
    shapes = [_shape_of(leaf) for leaf in flat.leaves]
    copy = build(flat.graphdef, shapes)
    return finish(Flat(flat.graphdef, shapes, copy.objects, copy.held), report, groups)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval: Any = jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
