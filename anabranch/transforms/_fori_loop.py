"""`fori_loop`: a value that holds objects is carried over a range of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anabranch import _jax
from anabranch._boundary import boundary, where
from anabranch.errors import ArgumentError, StructureError
from anabranch.graph import _classify
from anabranch.transforms._box import finish
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._carry import Carry
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._lifting import lifting
from anabranch.transforms._loop import (
    Loop,
    Stepped,
    calling,
    refuse_records,
    slice_perturbations,
)
from anabranch.transforms._names import number_leaves
from anabranch.transforms._prologue import FirstStep, Prologue, run_with_prologue
from anabranch.transforms._runners import Targets, call_kept
from anabranch.transforms._scanned import Scanned

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@boundary("fori_loop")
@checks_options("fori_loop")
@lifting
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
) -> T:
    """Loop over a range of integers, as `jax.lax.fori_loop` does; the body may write objects.

    Equal to `for i in range(lower, upper): val = body_fun(i, val)`. The body returns the objects
    that it was given; a step must leave the structure that it started from. Called again with the
    same body and structure, the body is not traced again.

    Arguments:
        lower: the first integer.
        upper: one past the last integer. If both are known when the function is traced, gradients
            can be taken in reverse mode.
        body_fun: from an integer and a value to the next value.
        init_val: the first value: objects, arrays, containers of them.
        unroll: see `jax.lax.scan`; only if both bounds are known.

    Returns:
        The last value; objects in it are those of `init_val`.

    Raises:
        StructureError: a step leaves another structure, shape or dtype; a bound is no integer.

    >>> import anabranch as ab
    >>> v = ab.Variable(1)
    >>> def body(i, v):
    ...     v.value = v * 2 + i
    ...     return v
    >>> ab.fori_loop(0, 3, body, v) is v, int(v)
    (True, 12)
    """
    check_functions("fori_loop", body_fun=body_fun)
    lower, upper = _bound(lower, "lower"), _bound(upper, "upper")
    known = not isinstance(lower, jax.Array) and not isinstance(upper, jax.Array)
    if known and int(upper) <= int(lower):
        return init_val
    if not known and unroll is not None:
        raise StructureError("fori_loop: unroll needs bounds that are known: give Python integers")
    start, stop = _same_type(lower, upper)
    bounds = (int(lower), int(upper)) if known else None
    name = f"fori_loop of {where(body_fun)}"

    def attempt(targets: Targets, args: Sequence[Any], kwargs: Any) -> Any:
        flat = flatten_call(targets.shown, args, kwargs, targets.functions)
        loop = Loop(name, flat, (None, Carry), names=["init_val"])
        loop.fix(_counter(flat.graphdef))
        if bounds is not None:
            slice_perturbations(loop, flat, bounds[1] - bounds[0])

        def make() -> Any:
            return _fori_runner(loop, targets.refs, bounds, unroll)

        key = ("fori_loop", flat.graphdef, tuple(loop.axes), bounds, unroll)
        end = None if known else stop
        report, groups = call_kept(key, targets, make, end, *flat.leaves, keeps_traces=known)
        if type(report) is Prologue:
            return report, groups
        return finish(flat, report, groups)

    return run_with_prologue(name, attempt, [body_fun], (start, init_val), {})


def _fori_runner(
    loop: Loop, refs: Sequence[Any], bounds: tuple[int, int] | None, unroll: Any
) -> Callable[..., Any]:
    call, counter = calling(refs, 0), _counter(loop.graphdef)
    scanned: Scanned | None = None
    if bounds is not None:
        start, stop = bounds
        options = {"unroll": 1 if unroll is None else unroll}
        scanned = Scanned(loop, call, stop - start, counter, **options)

    def run(stop: Any, *leaves: Any) -> Any:
        if scanned is not None:
            return scanned.run(leaves)
        return _until(loop, call, counter, stop, leaves)

    return number_leaves(run, loop.graphdef)


def _until(
    loop: Loop, call: Callable[[Any], Any], counter: int, stop: Any, leaves: Sequence[Any]
) -> Any:
    """Run steps until a bound that is known at run time only."""
    fixed, first = loop.fixed(leaves), FirstStep()
    steps: list[Stepped] = []  # a while loop returns what it carries: the report leaves by this way

    def body(state: tuple[Any, list[Any], Any]) -> Any:
        i, carried, stop = state
        steps.append(loop.step(call, carried, fixed={**fixed, counter: i}, first=first))
        refuse_records(loop, steps[-1])
        return i + 1, steps[-1].carried, stop

    _, carried, _ = jax.lax.while_loop(
        lambda state: state[0] < state[2],
        loop.named(body, counter),
        (leaves[counter], loop.carry_in(leaves), stop),
    )
    if first.prologue is not None:
        return first.prologue, first.prologue.outputs()
    return steps[-1].report, loop.outputs(carried, steps[-1].marks, ())


def _counter(graphdef: Any) -> int:
    """Return the leaf that is the first argument of the body."""
    _, args, _ = graphdef.entries[graphdef.root].edges
    return ~graphdef.entries[args].edges[0]


def _bound(bound: Any, name: str) -> Any:
    bound = _classify.value_of(bound)
    array = isinstance(bound, (jax.Array, np.ndarray, np.generic, int))
    if (
        not array
        or np.shape(bound) != ()
        or not jnp.issubdtype(jnp.result_type(bound), jnp.integer)
    ):
        kind = jax.typeof(bound) if array else f"a {type(bound).__name__}"
        raise StructureError(f"fori_loop: {name} is {kind}, but bounds are integer scalars")
    if isinstance(bound, int):
        dtype = jnp.result_type(int)
        if not jnp.iinfo(dtype).min <= bound <= jnp.iinfo(dtype).max:
            raise ArgumentError(
                f"fori_loop: {name} has {bound.bit_length()} bits, but the counter is {dtype}: "
                "nest two loops, or set `jax_enable_x64`"
            )
    if isinstance(bound, np.ndarray):
        return bound[()]
    concrete = isinstance(bound, jax.Array) and not _jax.is_tracer(bound)
    if concrete and not _jax.is_root(_jax.current_trace()):
        return np.asarray(bound)[()]  # known, so that gradients can be taken in reverse mode
    return bound


def _same_type(lower: Any, upper: Any) -> tuple[Any, Any]:
    """Return the bounds with one dtype; Python integers take that of the other bound."""
    types = {jnp.result_type(x) for x in (lower, upper) if not isinstance(x, int)}
    if len(types) > 1:
        first, second = jnp.result_type(lower), jnp.result_type(upper)
        raise StructureError(
            f"fori_loop: lower is {first}, but upper is {second}; give both the same dtype "
            "(`astype`), or Python integers"
        )
    if not types:
        return lower, upper
    (dtype,) = types
    return jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
