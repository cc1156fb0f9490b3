"""What the loops share: which leaves are carried, and what one step of a body does with them.

Every leaf that is not scanned over is carried, written or not: JAX and XLA undo carries that do not
change. So nothing has to be known of the body before it is traced, and it is traced once. What it
did is the same in each step, and is played on the caller's objects once, with the last values of
what is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph import _classify
from anabranch.graph._delta import Delta, Diff
from anabranch.graph._flatten import Flat, namer
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._recording import Records
from anabranch.transforms._box import Report, as_array, run_inside
from anabranch.transforms._carry import Carry, Part, parts
from anabranch.transforms._lanes import broadcast_records, given_perturbations, input_axis
from anabranch.transforms._names import number_leaves, signature_of
from anabranch.transforms._prologue import FirstStep
from anabranch.transforms._rank import inner_graphdef, outer_delta
from anabranch.transforms._runners import Targets
from anabranch.transforms._steady import Place
from anabranch.transforms._step_groups import RANKS, StepGroups
from anabranch.transforms._worlds import input_values, resolve_inputs

F = TypeVar("F", bound=Callable[..., Any])


class Stepped(NamedTuple):
    """What one step did."""

    carried: list[Any]
    report: Report
    marks: list[tuple[()] | None]
    """For each carried leaf, whether it was written; static, as there are no leaves in it."""
    stacked: list[list[Any]]
    """By axis."""
    fixed: list[Any]
    picked: Any


class Loop:
    """How a call runs in steps. It keeps no array and no object of the caller.

    Arguments:
        name: what messages call it.
        flat: the call.
        args: the axes of the positional arguments: `Carry`, None, an axis, `StateAxes`.
        kwargs: the axes of the keyword arguments.
        result: the axes of the result.
        names: how messages call what is carried, if not by its place in the arguments.

    Raises:
        AliasError: one object is given two axes.
        StructureError: an axis does not exist, or what is carried does not come back.
    """

    def __init__(
        self,
        name: str,
        flat: Flat,
        args: Any,
        kwargs: Any = None,
        result: Any = Carry,
        names: Sequence[str] = (),
    ) -> None:
        self.name, self.result = name, result
        self.inputs = resolve_inputs(flat, args, kwargs, None, _input_axis, broadcast_records)
        self.axes: list[int | None] = input_values(flat, self.inputs)
        self._outer = flat.graphdef
        refs = {i for i, leaf in enumerate(flat.leaves) if _classify.rule_of(leaf) is _classify.REF}
        self._fixed = sorted(refs)
        self._parts = [*_taking_part(flat.graphdef, args, kwargs)]
        carries = [part for part in self._parts if part.spec is Carry]
        for at, own in enumerate(names):
            part = carries[at]._replace(name=own, step=None)
            self._parts[self._parts.index(carries[at])] = part
        self.carries = len(carries)
        self._divide()

    def _divide(self) -> None:
        self.graphdef = inner_graphdef(self._outer, self.axes)
        fixed = self._fixed
        self.scanned = [i for i, axis in enumerate(self.axes) if axis is not None]
        self.carried = [i for i, a in enumerate(self.axes) if a is None and i not in fixed]
        self.position = {leaf: at for at, leaf in enumerate(self.carried)}

    def fix(self, leaf: int) -> None:
        """Let a leaf be given to each step, instead of being carried."""
        self._fixed.append(leaf)
        self._divide()

    def slice(self, leaf: int) -> None:
        """Slice a leaf along axis 0."""
        self.axes[leaf] = 0
        self._divide()

    def carry_in(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are carried."""
        return [leaves[i] for i in self.carried]

    def slices(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are scanned over, with their axes in front."""
        return [_moved(leaves[i], self.axes[i] or 0, 0) for i in self.scanned]

    def fixed(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return the leaves that are neither."""
        return {i: leaves[i] for i in self._fixed}

    def named(self, step: F, counter: int | None = None) -> F:
        """Let JAX's messages tell where leaves in parameters of a step come from.

        Arguments:
            step: has some of the parameters `carried`; `slices`; `state`, which starts with what
                counts the steps, and what is carried.
            counter: the leaf that counts the steps.
        """
        carried, scanned = self.carried, self.scanned

        def number(indices: Sequence[int]) -> int:
            if indices[0] == 0 and counter is not None:
                return counter
            return carried[indices[1]]  # else an IndexError: the bound of a loop, for one

        numbers: dict[str, Callable[[Sequence[int]], int]] = {
            "carried": lambda at: carried[at[0]],
            "slices": lambda at: scanned[at[0]],
            "state": number,
        }
        own = signature_of(step).parameters
        own = {name: one for name, one in numbers.items() if name in own}
        return number_leaves(step, self._outer, own)

    def step(
        self,
        call: Callable[[Any], Any],
        carried: Sequence[Any],
        slices: Sequence[Any] = (),
        fixed: dict[int, Any] | None = None,
        *,
        pick: Callable[[Any], Any] | None = None,
        result: Any = None,
        steps: bool = True,
        first: FirstStep | None = None,
    ) -> Stepped:
        """Run one step.

        Arguments:
            call: see `run_inside`.
            carried: the carried leaves.
            slices: those that are scanned over.
            fixed: the others.
            pick: see `run_inside`.
            result: the axes of the result, if not those of the loop.
            steps: False if there are none: then what is reported is that nothing was done.
            first: takes what the step adds to its objects; then the rest means nothing.
        """
        leaves: list[Any] = [None] * self.graphdef.num_leaves
        for numbers, values in ((self.carried, carried), (self.scanned, slices)):
            for number, value in zip(numbers, values, strict=True):
                leaves[number] = value
        for number, value in (fixed or {}).items():
            leaves[number] = value
        result = self.result if result is None else result
        groups = StepGroups(self, result, steps=steps, first=first)
        inside = run_inside(self.graphdef, leaves, groups, pick, call)
        count = len(self.carried)
        written, stacked = inside.groups[:count], inside.groups[count : count + RANKS]
        new = [as_array(w[0]) if w else c for w, c in zip(written, carried, strict=True)]
        marks = [() if w else None for w in written]
        return Stepped(new, inside.report, marks, [*stacked], inside.groups[-1], inside.picked)

    def outputs(
        self, carried: Sequence[Any], marks: Sequence[Any], stacked: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Return what comes out of the loop, as `finish` wants it."""
        written = [[c] if m is not None else [] for c, m in zip(carried, marks, strict=True)]
        moved = [[_moved(y, 0, axis) for y in ys] for axis, ys in enumerate(stacked)]
        return [*written, *moved]

    def places(self, carries: Sequence[Part]) -> list[Place]:
        """Return what takes part in every step, given what is returned in the place of `Carry`."""
        returned = iter(carries)
        found: list[Place] = []
        for part in self._parts:
            if part.spec is Carry and carries:
                found.append(Place(part.edge, next(returned).edge, True, part.name, part.step))
            else:
                found.append(Place(part.edge, part.edge, False, part.name, part.step))
        return found

    def outside(self, found: Diff, axes: Sequence[int | None]) -> Any:
        """Return the delta as it is for the caller's objects."""
        return outer_delta(self._outer, self.graphdef, found.delta, axes.__getitem__, None)


def _taking_part(graphdef: GraphDef, args: Any, kwargs: Any) -> list[Part]:
    """Return what is not sliced: each step gets it as the step before has left it."""
    root: Any = graphdef.root
    at = graphdef.entries.__getitem__
    function_edge, args_edge, kwargs_edge = at(root).edges
    args = tuple(args) if isinstance(args, list) else args
    found = [
        *parts(at, args_edge, args, "args"),
        *parts(at, kwargs_edge, kwargs, "kwargs"),
        Part(function_edge, None, "the function", None, root, 0),
    ]
    return [part for part in found if not isinstance(part.spec, int)]


def _moved(array: Any, source: int, target: int) -> Any:
    """Return `jnp.moveaxis`, whose trace costs something though nothing is moved."""
    return array if source == target else jnp.moveaxis(array, source, target)


def _input_axis(axis: Any, leaf: Any) -> int | None:
    return None if axis is Carry else input_axis(axis, leaf)


def calling(refs: Sequence[Any], number: int) -> Callable[[Any], Any]:
    """Return how `run_inside` calls one of several functions."""

    def call(made: Any) -> Any:
        return Targets.resolve(made.function[number], refs)(*made.args, **made.kwargs)

    return call


def slice_perturbations(loop: Loop, flat: Flat, length: int) -> None:
    """Give each step its own of the perturbations that a capture has stacked over the steps."""
    for leaf in given_perturbations(flat.graphdef):
        if np.shape(flat.leaves[leaf])[:1] == (length,):
            loop.slice(leaf)


def refuse_records(loop: Loop, done: Stepped) -> None:
    """Raise if something was recorded in a loop whose steps nobody has counted."""
    entries = loop.graphdef.entries
    changed = done.report.delta.changed
    found = [i for i, e in changed if issubclass(e.cls, Records) and e.keys != entries[i].keys]
    if found:
        name_of = namer(loop.graphdef)
        names = [name_of(index).rsplit(".", 1)[0] for index in found]
        raise StructureError(
            bounded(
                f"{loop.name}: values were recorded (`sow`, `perturb`) on these, but cannot be "
                f"stacked, as the number of steps is not known:\n{first_few(names)}\n"
                "use `scan`, or `fori_loop` with Python integers"
            )
        )


def refuse_writes(name: str, graphdef: GraphDef, delta: Delta, *, may_record: bool = False) -> None:
    """Raise if a function whose calls have no order wrote an object."""
    written = [i for i, e in delta.changed if not (may_record and issubclass(e.cls, Records))]
    if written:
        name_of = namer(graphdef)
        raise StructureError(
            bounded(
                f"{name}: these were written, but the order of the calls is undefined:\n"
                f"{first_few([name_of(index) for index in written])}\n"
                "return the new values, or use `scan`"
            )
        )
