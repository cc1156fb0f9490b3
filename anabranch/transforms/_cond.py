"""`cond` and `switch`: one of several functions runs, and what it did to its objects comes back.

Every branch is traced once, to learn what it writes; then `jax.lax` chooses between branches that
replay these traces and return a value for everything that any of them writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anabranch._boundary import boundary, where
from anabranch._jax import is_tracer
from anabranch.errors import ArgumentError, StructureError
from anabranch.graph import _classify
from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import ONE_GROUP, Report, array_leaves, finish, run_inside
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._lifting import lifting
from anabranch.transforms._names import number_leaves
from anabranch.transforms._runners import Targets, call_kept
from anabranch.transforms._specs import ABSENT
from anabranch.transforms._union import Outputs, outputs_of, unite

R = TypeVar("R")


@boundary("cond")
def cond(
    pred: Any,
    true_fun: Callable[..., R],
    false_fun: Callable[..., R],
    *operands: Any,
    operand: Any = ABSENT,
) -> R:
    """Call one of two functions that may read and write objects, as `jax.lax.cond` does.

    Equal to `true_fun(*operands) if pred else false_fun(*operands)`, for a traced `pred` too. Both
    functions are traced, and must leave the same structure: the same attributes set, the same kinds
    of objects made, the same structure returned. Arrays may differ, and each function may write
    Variables that the other one does not.

    Called again with the same functions and structure, they are not traced again, unless what they
    capture has changed, or is a Module, a Variable or another object that may have changed.

    Arguments:
        pred: a scalar: bool, or a number that is compared with zero.
        true_fun: a function, method or callable object.
        false_fun: the same.
        operands: arrays, objects, containers of them, static values.
        operand: one operand, by keyword.

    Raises:
        StructureError: the functions leave different structures, static values, shapes or dtypes.

    >>> import anabranch as ab
    >>> hits, misses = ab.Variable(0), ab.Variable(0)
    >>> def count(v, other):
    ...     v.value += 1
    >>> ab.cond(True, count, lambda v, other: count(other, v), hits, misses)
    >>> int(hits), int(misses)
    (1, 0)
    """
    check_functions("cond", true_fun=true_fun, false_fun=false_fun)
    pred = _scalar(pred, "cond: pred")

    def choose(pred: Any, branches: Sequence[Any], leaves: Sequence[Any]) -> Any:
        return jax.lax.cond(pred, *branches, *leaves)

    names = [f"true_fun ({where(true_fun)})", f"false_fun ({where(false_fun)})"]
    operands = _operands(operands, operand)
    if _is_debugged(pred):
        return _run_one(true_fun if pred else false_fun, operands)
    return _run("cond", choose, pred, (true_fun, false_fun), names, operands)


@boundary("switch")
def switch(
    index: Any,
    branches: Sequence[Callable[..., R]],
    *operands: Any,
    operand: Any = ABSENT,
) -> R:
    """Call one of several functions that may read and write objects, as `jax.lax.switch` does.

    Equal to `branches[clamp(index)](*operands)`, where indices out of range are clamped. See `cond`
    for what the branches must agree on, and when they are traced.

    Arguments:
        index: an integer scalar.
        branches: functions, methods or callable objects.
        operands: arrays, objects, containers of them, static values.
        operand: one operand, by keyword.

    Raises:
        StructureError: there are no branches, or they leave different structures, static values,
            shapes or dtypes.

    >>> import anabranch as ab
    >>> v = ab.Variable(3)
    >>> def double(v):
    ...     v.value *= 2
    >>> def reset(v):
    ...     v.value *= 0
    >>> ab.switch(0, [double, reset], v)
    >>> int(v)
    6
    """
    if not isinstance(branches, Iterable):
        raise ArgumentError(
            f"switch: branches is of type {type(branches).__name__}; give a list of functions"
        )
    branches = tuple(branches)
    if not branches:
        raise StructureError("switch: there are no branches; give a list of at least one function")
    for number, function in enumerate(branches):
        check_functions("switch", **{f"branches[{number}]": function})
    index = _scalar(index, "switch: index")
    if not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise StructureError(f"switch: index is {jnp.result_type(index)}, not an integer")

    def choose(index: Any, branches: Sequence[Any], leaves: Sequence[Any]) -> Any:
        return jax.lax.switch(index, branches, *leaves)

    names = [f"branches[{i}] ({where(f)})" for i, f in enumerate(branches)]
    operands = _operands(operands, operand)
    if _is_debugged(index):
        return _run_one(branches[min(max(int(index), 0), len(branches) - 1)], operands)
    return _run("switch", choose, index, branches, names, operands)


def _is_debugged(index: Any) -> bool:
    """Tell whether only the branch that is chosen is run, as JAX does with `jax.disable_jit`."""
    config: Any = jax.config
    return config.jax_disable_jit and not is_tracer(index)


def _scalar(value: Any, what: str) -> Any:
    value = _classify.value_of(value)
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float)):
        raise StructureError(f"{what} is a {type(value).__name__}, not a scalar")
    if np.shape(value) != ():
        raise StructureError(f"{what} has shape {np.shape(value)}; it must be a scalar")
    return value


def _operands(operands: tuple[Any, ...], operand: Any) -> tuple[Any, ...]:
    if operand is ABSENT:
        return operands
    if operands:
        raise StructureError("give operands by position or as `operand=`, not both")
    return (operand,)


@lifting
def _run(
    kind: str,
    choose: Callable[[Any, Sequence[Any], Sequence[Any]], Any],
    index: Any,
    functions: Sequence[Any],
    names: Sequence[str],
    operands: tuple[Any, ...],
) -> Any:
    targets = Targets(functions)
    flat = flatten_call(targets.shown, operands, {}, functions)
    graphdef, refs, count = flat.graphdef, targets.refs, len(functions)

    def make() -> Any:
        def run(index: Any, *leaves: Any) -> tuple[Report, list[Any]]:
            traced = [_trace(graphdef, number, refs) for number in range(count)]
            known = [function.eval_shape(*leaves) for function in traced]
            united = unite(graphdef, [report for report, _ in known], names)
            outputs = outputs_of(united)
            outputs.check_types(leaves, [shapes for _, (shapes,) in known], names)
            branches = [_branch(number, f, outputs) for number, f in enumerate(traced)]
            return outputs.report(united), choose(index, branches, leaves)

        return number_leaves(run, graphdef)

    leaves = array_leaves(flat.leaves)
    report, outputs = call_kept((kind, graphdef), targets, make, index, *leaves)
    return finish(flat, report, [outputs])


@lifting
def _run_one(function: Any, operands: tuple[Any, ...]) -> Any:
    """Run a branch in the trace of the caller."""
    flat = flatten_call(function, operands, {})
    inside = run_inside(flat.graphdef, flat.leaves, ONE_GROUP)
    return finish(flat, inside.report, inside.groups)


def _trace(graphdef: GraphDef, number: int, refs: Sequence[Any]) -> Any:
    """Return a function of the leaves whose trace JAX keeps."""

    def call(made: Any) -> Any:
        return Targets.resolve(made.function[number], refs)(*made.args)

    def run(*leaves: Any) -> Any:
        inside = run_inside(graphdef, leaves, ONE_GROUP, call=call)
        return inside.report, inside.groups

    return jax.jit(number_leaves(run, graphdef), inline=True)


def _branch(number: int, function: Any, outputs: Outputs) -> Callable[..., list[Any]]:
    def branch(*leaves: Any) -> list[Any]:
        _, (own,) = function(*leaves)
        return outputs.values(number, leaves, own)[0]

    return branch
