"""`associative_scan`: combine slices of arrays or objects, in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from anabranch._boundary import boundary
from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph._build import Built, build
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import Flat, flatten
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._tokens import call_at_own_level
from anabranch.transforms._box import Assignment, OneGroup, array_leaves, run_inside
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._lanes import common_size, input_axis
from anabranch.transforms._lifting import lifting
from anabranch.transforms._loop import refuse_writes
from anabranch.transforms._steady import Place, steady
from anabranch.transforms._step_groups import type_text
from anabranch.transforms._worlds import input_values, resolve_inputs

T = TypeVar("T")


@boundary("associative_scan")
@checks_options("associative_scan")
@lifting
def associative_scan(fn: Callable[[T, T], T], elems: T, reverse: bool = False, axis: int = 0) -> T:
    """Combine all prefixes with an associative function, as `jax.lax.associative_scan` does.

    The function gets two objects like `elems`, with some slices each, and returns a third one,
    a new one or one of the two. It may write none: the order is undefined. It is called as often
    as by JAX, about `2 * log2(n)` times.

    Arguments:
        fn: an associative function of two objects, of slices at once.
        elems: arrays, objects or containers of them.
        reverse: combine suffixes, from the last slice to the first.
        axis: along which the slices are.

    Returns:
        A new object of the structure of `elems`.

    Raises:
        StructureError: the function writes an object, or returns another structure, shape or
            dtype; sizes differ, or there are no arrays.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> elems = {"sum": ab.Variable(jnp.arange(4))}
    >>> fn = lambda a, b: {"sum": ab.Variable(a["sum"] + b["sum"])}
    >>> ab.associative_scan(fn, elems)["sum"].value.tolist()
    [0, 1, 3, 6]
    """
    check_functions("associative_scan", fn=fn)
    flat = flatten(elems, numbers=True)
    copy = build(flat.graphdef, flat.leaves).resolve(flat.graphdef.root)
    call = flatten_call(fn, (elems, copy), {})
    inputs = resolve_inputs(call, (axis, axis), None, None, input_axis)
    axes = input_values(call, inputs)
    common_size(call, inputs, axes, None, "elems")
    graphdef, first, second = call.graphdef, *_divide(flat, call)
    leaves = array_leaves(call.leaves)

    def combine(a: list[Any], b: list[Any]) -> list[Any]:
        inside = list(leaves)
        for numbers, values in ((first, a), (second, b)):
            for number, value in zip(numbers, values, strict=True):
                inside[number] = value
        combined = _Combined(first)
        # it runs in the trace of its caller, and must not write there
        call_at_own_level(run_inside, graphdef, inside, combined)
        return combined.values

    given = [leaves[i] for i in first]
    done = jax.lax.associative_scan(combine, given, reverse=reverse, axis=axes[first[0]] or 0)
    return build(flat.graphdef, done).resolve(flat.graphdef.root)


def _divide(elems: Flat, call: Flat) -> tuple[list[int], list[int]]:
    """Return the leaves of both arguments."""
    entries = call.graphdef.entries
    root: Any = call.graphdef.root
    function, args, _ = entries[root].edges
    assert type(args) is int
    held, first, second = [_leaves_below(entries, e) for e in (function, *entries[args].edges)]
    if held & first or len(first) != elems.graphdef.num_leaves:
        raise StructureError("associative_scan: the function holds an object of elems itself")
    return sorted(first), sorted(second)


def _leaves_below(entries: Sequence[Entry], edge: Edge) -> set[int]:
    pending, seen, found = [edge], set[int](), set[int]()
    while pending:
        edge = pending.pop()
        if type(edge) is int and edge < 0:
            found.add(~edge)
        elif type(edge) is int and edge not in seen:
            seen.add(edge)
            pending += entries[edge].edges
    return found


class _Combined(OneGroup):
    """Find what the function returned, in the order of the leaves of its first argument."""

    lanes = True

    def __init__(self, first: Sequence[int]) -> None:
        self._first = first
        self.values: list[Any] = []

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Remember the values; nothing else of what is found is used."""
        refuse_writes("associative_scan", graphdef, found.delta)
        root: Any = graphdef.root
        args: Any = graphdef.entries[root].edges[1]
        before = graphdef.entries[args].edges[0]
        place = Place(before, found.delta.root, True, "the return value", None)
        match = steady(graphdef, found.delta, [place], "associative_scan", anew=True)
        different: list[str] = []
        for leaf in self._first:
            written = match.written[leaf]
            value = found.slots[written.slot] if written.slot >= 0 else leaves[~written.slot]
            old, new = jax.typeof(leaves[leaf]), jax.typeof(value)
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                different.append(f"{written}: {type_text(old)} in, {type_text(new)} out")
            self.values.append(value)
        if different:
            raise StructureError(
                bounded(
                    "associative_scan: the function must keep shapes and dtypes (it gets several "
                    f"slices at once), but\n{first_few(different)}"
                )
            )
        return Assignment([0] * found.delta.num_slots)
