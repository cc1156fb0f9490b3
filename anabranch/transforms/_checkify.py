"""`checkify`: failed checks come back as a value, beside what the function returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from anabranch._boundary import boundary
from anabranch.transforms._box import ONE_GROUP, array_leaves, array_outputs, finish, run_inside
from anabranch.transforms._call import flatten_call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._names import name_inside
from anabranch.transforms._wrap import wrap


@boundary("checkify")
@checks_options("checkify")
def checkify(
    function: Callable[..., Any], errors: frozenset[Any] | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that returns also the error of the first check that failed.

    The arguments are those of `jax.experimental.checkify.checkify`, whose `check` and sets of
    errors are used. An error is a value here: nothing is raised, so what the function writes is
    written, also if a check has failed. To leave objects as they were then, look at `error.get()`
    inside of the function that is jitted, and write only if it is None; or work on an
    `anabranch.clone`.

    Arguments:
        function: a function, method or callable object.
        errors: which errors are looked for; `checkify.user_checks` if not given.

    Returns:
        A function that returns `(error, result)`; `error.throw()` raises it.

    >>> import anabranch as ab
    >>> from jax.experimental import checkify
    >>> def take(stock, n):
    ...     checkify.check(stock.value >= n, "out of stock")
    ...     stock.value -= n
    ...     return stock.value
    >>> stock = ab.Variable(3)
    >>> error, left = ab.jit(ab.checkify(take))(stock, 2)
    >>> error.get(), int(left), int(stock)
    (None, 1, 1)
    >>> error, left = ab.jit(ab.checkify(take))(stock, 2)
    >>> error.get().startswith("out of stock")
    True
    """
    from jax.experimental import checkify as jax_checkify  # slow to import, and seldom used

    wanted = jax_checkify.user_checks if errors is None else errors

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        flat = flatten_call(function, args, kwargs)

        def run(*leaves: Any) -> Any:
            inside = run_inside(flat.graphdef, leaves, ONE_GROUP)
            return inside.report, inside.groups

        checked = jax_checkify.checkify(name_inside(run, function, flat.graphdef), errors=wanted)
        error, (report, groups) = checked(*array_leaves(flat.leaves))
        return error, finish(flat, report, array_outputs(groups))

    return wrap(call, function, functools.partial(checkify, errors=errors), name="checkify")
