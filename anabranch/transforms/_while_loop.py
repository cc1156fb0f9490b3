"""`while_loop`: a value that holds objects is carried while a condition holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anabranch._boundary import boundary, where
from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph import _classify
from anabranch.graph._flatten import namer
from anabranch.transforms._box import as_array, finish
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._carry import Carry
from anabranch.transforms._lifting import lifting
from anabranch.transforms._loop import Loop, Stepped, calling, refuse_records
from anabranch.transforms._names import number_leaves
from anabranch.transforms._prologue import FirstStep, Prologue, run_with_prologue
from anabranch.transforms._runners import Targets, call_kept

T = TypeVar("T")


@boundary("while_loop")
@lifting
def while_loop(cond_fun: Callable[[T], Any], body_fun: Callable[[T], T], init_val: T) -> T:
    """Loop while a condition holds, as `jax.lax.while_loop` does; functions may write objects.

    Equal to `while cond_fun(val): val = body_fun(val)`. The body returns the objects that it was
    given; a step must leave the structure that it started from. What the condition writes counts
    too, once more than there are steps. Called again with the same functions and structure, they
    are not traced again.

    Arguments:
        cond_fun: from a value to a boolean scalar.
        body_fun: from a value to the next value.
        init_val: the first value: objects, arrays, containers of them.

    Returns:
        The last value; objects in it are those of `init_val`. Containers that the body makes anew
        are new, also if there were no steps.

    Raises:
        StructureError: a step leaves another structure, shape or dtype, or the condition is no
            boolean scalar.

    >>> import anabranch as ab
    >>> v = ab.Variable(1)
    >>> def double(v):
    ...     v.value = v * 2
    ...     return v
    >>> ab.while_loop(lambda v: v < 100, double, v) is v, int(v)
    (True, 128)
    """
    check_functions("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    name = f"while_loop of {where(body_fun)}"

    def attempt(targets: Targets, args: Sequence[Any], kwargs: Any) -> Any:
        flat = flatten_call(targets.shown, args, kwargs, targets.functions)
        loop = Loop(name, flat, (Carry,), names=["init_val"])

        def make() -> Any:
            return _while_runner(loop, targets.refs)

        key = ("while_loop", flat.graphdef)
        report, groups, pair = call_kept(key, targets, make, *flat.leaves)
        if type(report) is Prologue:
            return report, groups
        result = finish(flat, report, groups)
        return result if pair is None else result[0]

    return run_with_prologue(name, attempt, [cond_fun, body_fun], (init_val,), {})


def _while_runner(loop: Loop, refs: Sequence[Any]) -> Any:
    call_cond, call_body = calling(refs, 0), calling(refs, 1)

    def run(*leaves: Any) -> Any:
        fixed, first = loop.fixed(leaves), FirstStep()

        def test(carried: list[Any]) -> Stepped:
            done = loop.step(
                call_cond, carried, fixed=fixed, pick=_predicate, result=0, first=first
            )
            refuse_records(loop, done)
            return done._replace(stacked=[], fixed=[])

        # the loop replays the trace that is made here
        tested = jax.jit(loop.named(test), inline=True)
        carried = loop.carry_in(leaves)
        shape = tested.eval_shape(carried)
        if first.prologue is not None:
            return first.prologue, first.prologue.outputs(), None
        if any(mark is not None for mark in shape.marks):
            done = _testing_in_body(loop, tested, (call_cond, call_body), carried, fixed, first)
            return (
                done if first.prologue is None else (first.prologue, first.prologue.outputs(), None)
            )
        steps: list[Stepped] = []

        def body(carried: list[Any]) -> list[Any]:
            steps.append(loop.step(call_body, carried, fixed=fixed, first=first))
            refuse_records(loop, steps[-1])
            return steps[-1].carried

        last = jax.lax.while_loop(lambda carried: tested(carried).picked, loop.named(body), carried)
        if first.prologue is not None:
            return first.prologue, first.prologue.outputs(), None
        return steps[-1].report, loop.outputs(last, steps[-1].marks, ()), None

    return number_leaves(run, loop.graphdef)


def _testing_in_body(
    loop: Loop,
    tested: Any,
    calls: tuple[Any, Any],
    carried: list[Any],
    fixed: Any,
    first: FirstStep,
) -> Any:
    """Run a condition that writes: before the loop, and at the end of each step."""
    call_cond, call_body = calls
    steps: list[Stepped] = []

    def both(made: Any) -> Any:
        value = call_body(made)
        return value, call_cond(made._replace(args=(value,)))

    def pick(result: Any) -> Any:
        return _predicate(result[1])

    def body(state: tuple[Any, list[Any]]) -> Any:
        done = loop.step(both, state[1], fixed=fixed, pick=pick, result=(Carry, 0), first=first)
        refuse_records(loop, done)
        steps.append(done)
        return done.picked, done.carried

    before = tested(carried)
    state = (before.picked, before.carried)
    predicate, last = jax.lax.while_loop(lambda state: state[0], body, state)
    if first.prologue is None:
        _check_condition(loop, before, steps[-1])
    # `()` says that the result is a pair, without being an array that JAX would bring out
    return steps[-1].report, [*loop.outputs(last, steps[-1].marks, ()), [predicate]], ()


def _predicate(result: Any) -> Any:
    value = _classify.value_of(result)
    array = isinstance(value, (jax.Array, np.ndarray, np.bool_, bool))
    if not array or np.shape(value) != () or jnp.result_type(value) != jnp.bool_:
        kind = jax.typeof(value) if array else f"a {type(value).__name__}"
        raise StructureError(
            f"while_loop: cond_fun returned {kind}, but a condition is a boolean scalar"
        )
    return as_array(value)


def _check_condition(loop: Loop, first: Stepped, step: Stepped) -> None:
    """Raise if a step undoes what the condition writes: then it cannot be told afterwards."""
    kept = {index for index, _ in step.report.delta.changed}
    lost = [index for index, _ in first.report.delta.changed if index not in kept]
    if lost:
        name = namer(loop.graphdef)
        raise StructureError(
            bounded(
                "while_loop: cond_fun writes what a step then replaces or sets back:\n"
                f"{first_few([name(index) for index in lost])}\n"
                "write it in body_fun"
            )
        )
