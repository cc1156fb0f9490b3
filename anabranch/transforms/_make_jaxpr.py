"""`make_jaxpr`: the program that a call would run, without running it or changing anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anabranch._boundary import boundary
from anabranch.transforms._box import ONE_GROUP, run_inside
from anabranch.transforms._call import Selection, flatten_call, with_static
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._eval_shape import finish_on_copies
from anabranch.transforms._names import name_inside
from anabranch.transforms._wrap import wrap


@boundary("make_jaxpr")
@checks_options("make_jaxpr")
def make_jaxpr(
    function: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: bool = False,
) -> Callable[..., Any]:
    """Return a function that returns the jaxpr of a call, as `jax.make_jaxpr` does.

    The inputs of the jaxpr are the arrays of the arguments, in the order in which they are found;
    its outputs are those arrays that the call would write or return, each once. An array that is
    passed on as it is, is no output. The arguments are not changed, and the function is traced
    anew each time, so that a change of what it closes over shows.

    Arguments:
        function: a function, method or callable object.
        static_argnums: positions of arguments that are static.
        axis_env: names and sizes of axes, for collectives.
        return_shape: whether to return also what `eval_shape` returns.

    Returns:
        A function that returns a jaxpr, or `(jaxpr, shapes)` with `return_shape`.

    >>> import anabranch as ab
    >>> def step(m):
    ...     m["n"].value += 1
    >>> m = {"n": ab.Variable(0), "w": ab.Param(1.0)}
    >>> jaxpr = ab.make_jaxpr(step)(m)
    >>> len(jaxpr.in_avals), len(jaxpr.out_avals), int(m["n"])
    (2, 1, 0)
    """
    static = Selection(function, static_argnums, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        args_given, kwargs_given = with_static(static, args, kwargs)
        flat = flatten_call(function, args_given, kwargs_given)

        def run(*leaves: Any) -> Any:
            inside = run_inside(flat.graphdef, leaves, ONE_GROUP)
            return inside.report, inside.groups

        make = jax.make_jaxpr(
            name_inside(run, function, flat.graphdef), axis_env=axis_env, return_shape=True
        )
        jaxpr, (report, groups) = make(*flat.leaves)
        return (jaxpr, finish_on_copies(flat, report, groups)) if return_shape else jaxpr

    remake = functools.partial(
        make_jaxpr, static_argnums=static_argnums, axis_env=axis_env, return_shape=return_shape
    )
    return wrap(call, function, remake, name="make_jaxpr")
