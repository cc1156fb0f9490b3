"""`map`: a function of one slice, applied to every slice, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from anabranch._boundary import boundary, where
from anabranch.errors import ArgumentError
from anabranch.transforms._box import finish
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._lanes import common_size
from anabranch.transforms._lifting import lifting
from anabranch.transforms._loop import Loop, calling, refuse_writes, slice_perturbations
from anabranch.transforms._names import number_leaves
from anabranch.transforms._runners import Targets, call_kept


@boundary("map")
@lifting
def map(f: Callable[..., Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """Apply a function to every slice of arrays or objects, as `jax.lax.map` does.

    Equal to `[f(x) for x in xs]`, stacked along the first axis; so are the arrays of new objects
    that the function returns. It may read objects, but write none: the order is undefined. Called
    again with the same function and structure, it is not traced again.

    Arguments:
        f: a function, method or callable object.
        xs: arrays, objects or containers of them, sliced along their first axes.
        batch_size: how many slices are computed at once; see `jax.lax.map`.

    Raises:
        StructureError: the function writes an object; sizes differ, or there are no arrays.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> layers = {"w": ab.Param(jnp.arange(3.0))}
    >>> ab.map(lambda layer: layer["w"] * 2, layers).tolist()
    [0.0, 2.0, 4.0]
    """
    check_functions("map", f=f)
    _check_batch_size(batch_size)
    targets = Targets([f])
    flat = flatten_call(targets.shown, (xs,), {}, targets.functions)
    loop = Loop(f"map of {where(f)}", flat, (0,), result=0)
    size = common_size(flat, loop.inputs, loop.axes, None, "xs")
    slice_perturbations(loop, flat, size)
    call = calling(targets.refs, 0)

    def make() -> Any:
        def run(*leaves: Any) -> Any:
            carried, fixed = loop.carry_in(leaves), loop.fixed(leaves)

            def step(slices: list[Any]) -> Any:
                done = loop.step(call, carried, slices, fixed)
                refuse_writes(loop.name, loop.graphdef, done.report.delta, may_record=True)
                return done.report, done.stacked

            slices = loop.slices(leaves)
            report, stacked = jax.lax.map(loop.named(step), slices, batch_size=batch_size)
            return report, loop.outputs((), (), stacked)

        return number_leaves(run, loop.graphdef)

    report, groups = call_kept(
        ("map", flat.graphdef, tuple(loop.axes), batch_size), targets, make, *flat.leaves
    )
    return finish(flat, report, groups)


def _check_batch_size(size: Any) -> None:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if size is not None and (not whole or size < 1):
        raise ArgumentError(f"map: batch_size is a positive integer or None, not {size!r:.200}")
