"""`scan`: a loop over slices of some arguments, in which the others may be written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from anabranch._boundary import boundary, where
from anabranch.errors import StructureError
from anabranch.graph._flatten import Flat
from anabranch.transforms._arguments import ArgumentSpecs
from anabranch.transforms._box import finish
from anabranch.transforms._call import flatten_call
from anabranch.transforms._carry import Carry
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._lanes import common_size
from anabranch.transforms._loop import Loop, calling, slice_perturbations
from anabranch.transforms._names import number_leaves
from anabranch.transforms._options import ScanOptions
from anabranch.transforms._prologue import Prologue, run_with_prologue
from anabranch.transforms._runners import Targets, call_kept
from anabranch.transforms._scanned import Scanned
from anabranch.transforms._specs import is_container
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def scan(function: Callable[P, R], /, **options: Unpack[ScanOptions]) -> Callable[P, R]: ...
@overload
def scan(**options: Unpack[ScanOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("scan")
@checks_options("scan")
def scan(
    function: Any = None,
    /,
    *,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> Any:
    """Run a function over slices of its arguments, one after the other, as `jax.lax.scan` does.

    Equal to the Python loop: `scan(f)(init, xs)` calls `carry, y = f(carry, x)` for each slice `x`
    of `xs` and returns the last carry and the stacked `y`. Objects may be written in each step,
    whether they are carried, broadcast, or held by the function (a bound `self`); what is written
    to an argument that is sliced comes back along its own axis. A step must leave the structure
    that it started from, except in slices.

    Arguments:
        function: a function, method or callable object; without it, `scan` is a decorator.
        in_axes: for each argument, by position or as a dict by name: `Carry`, an axis (int) that it
            is sliced along, or None, which gives every step the same; containers of these for
            containers, `StateAxes` for objects. Arguments that a dict does not mention, and keyword
            arguments whose parameter is not mentioned, get None.
        out_axes: for the result: `Carry` for what the next step gets in the place of `Carry`, an
            axis along which results are stacked. Objects of the arguments need none: they are
            returned as themselves. Containers that are stacked are new.
        length: the number of steps; needed only if nothing is sliced.
        reverse: go from the last slice to the first.
        unroll: see `jax.lax.scan`.

    Raises:
        AliasError: one object is given two axes; both paths are named.
        StructureError: a step leaves another structure, or another shape or dtype of what is
            carried; an axis does not exist, or sizes differ.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> mean = ab.BatchStat(0.0)
    >>> @ab.scan(in_axes=(ab.Carry, 0, None))
    ... def run(total, x, mean):
    ...     mean.value = 0.5 * mean + 0.5 * x
    ...     return total + x, mean * 1
    >>> total, means = run(0.0, jnp.array([2.0, 4.0]), mean)
    >>> float(total), means.tolist(), float(mean)
    (6.0, [1.0, 2.5], 2.5)
    """
    remake = functools.partial(
        scan,
        in_axes=in_axes,
        out_axes=out_axes,
        length=length,
        reverse=reverse,
        unroll=unroll,
    )
    if function is None:
        return remake
    specs = ArgumentSpecs(function, in_axes, "in_axes", None)
    options = {"reverse": reverse, "unroll": unroll}
    name = f"scan of {where(function)}"

    def attempt(targets: Targets, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = flatten_call(targets.shown, args, kwargs, targets.functions)
        loop, size = _prepare(name, flat, *specs.match(args, kwargs), out_axes, length)

        def make() -> Any:
            scanned = Scanned(loop, calling(targets.refs, 0), size, **options)

            def run(*leaves: Any) -> Any:
                return scanned.run(leaves)

            return number_leaves(run, loop.graphdef)

        axes = (frozen(in_axes), frozen(out_axes), *loop.axes)
        key = ("scan", flat.graphdef, axes, size, reverse, unroll)
        report, groups = call_kept(key, targets, make, *flat.leaves, keeps_traces=True)
        if type(report) is Prologue:
            return report, groups
        return finish(flat, report, groups)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_with_prologue(name, attempt, [function], args, kwargs)

    return wrap(call, function, remake, name="scan")


def _prepare(
    name: str, flat: Flat, args: Any, kwargs: Any, out_axes: Any, length: int | None
) -> tuple[Loop, int]:
    loop = Loop(name, flat, args, kwargs, out_axes)
    given = sum(value is Carry for value in plain_values(out_axes))
    if given != loop.carries:
        raise StructureError(
            f"scan: {loop.carries} arguments are `Carry` in in_axes, and {given} results are in "
            "out_axes; each carry has one place in both"
        )
    size = common_size(flat, loop.inputs, loop.axes, length, "length")
    slice_perturbations(loop, flat, size)
    return loop, size


def plain_values(spec: Any) -> Iterable[Any]:
    """Yield the values in a specification that are given by place, not by filter."""
    if is_container(spec):
        for part in spec.values() if isinstance(spec, dict) else spec:
            yield from plain_values(part)
    else:
        yield spec


def frozen(spec: Any) -> Hashable:
    """Return a specification in a form that can be hashed."""
    if not is_container(spec):
        return (type(spec), spec)
    if isinstance(spec, dict):
        return (dict, tuple([(key, frozen(value)) for key, value in spec.items()]))
    return (type(spec), tuple([frozen(value) for value in spec]))
