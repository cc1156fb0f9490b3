"""What a lifted function did, as one node that goes through a transform nothing is known about.

The transform may return it once, scaled, stacked or otherwise changed, or several times. What it
makes of arrays that were written to the caller's objects is checked, as far as one can tell, before
they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anabranch.errors import StructureError, bounded
from anabranch.graph._build import Built
from anabranch.graph._delta import Diff, apply
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import Edge, GraphDef
from anabranch.graph._leaf_info import call_text
from anabranch.transforms._box import Assignment, Report, array_outputs, finish, run_inside


class Outcome:
    """What the function did and left behind: one pytree node, whatever the transform makes of it.

    `outputs` are the arrays of the slots. `entered` are arrays as they went in, of those that are
    written and have another shape inside: they must come out as they are.
    """

    __slots__ = ("entered", "outputs", "static")

    def __init__(
        self, static: tuple[Report, tuple[_Check, ...]], outputs: Any, entered: Any
    ) -> None:
        self.static, self.outputs, self.entered = static, outputs, entered


jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((outcome.outputs, outcome.entered), outcome.static),
    lambda static, children: Outcome(static, *children),
)

_Check = tuple[int, int, tuple[int, ...] | None]
"""An output, the leaf that it is written over, and its shape inside; None if that leaf has another
shape inside than outside."""


class _WrittenOrKept:
    """All leaves go out, but for those that are where they were, in an object that has changed."""

    lanes = False
    count = 2

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []  # a slot, and the leaf that it is written over

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return 0 for what is kept, 1 for the rest."""
        groups = [1] * found.delta.num_slots
        known = len(graphdef.entries)
        pending: list[tuple[Edge, Edge]] = []
        for index, entry in found.delta.changed:
            before = graphdef.entries[index]
            old = dict(zip(before.keys, before.edges, strict=True))
            pending += [(old.get(k, ()), e) for k, e in zip(entry.keys, entry.edges, strict=True)]
        while pending:
            before, now = pending.pop()
            if not isinstance(before, int) or not isinstance(now, int):
                continue
            if before < 0 and now < 0:
                if found.slots[~now] is leaves[~before]:
                    groups[~now] = 0
                else:
                    self.pairs.append((~now, ~before))
            elif before >= 0 and now >= known:  # a value that was made anew
                a, b = graphdef.entries[before], found.delta.new[now - known]
                if not b.kind.identity and len(a.edges) == len(b.edges):
                    pending += zip(a.edges, b.edges, strict=True)
        return Assignment(groups)

    def may_forward(self, leaf: int, group: int) -> bool:
        """Only what is kept needs no output."""
        return group == 0


def run_to_outcome(
    graphdef: GraphDef, leaves: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> Outcome:
    """Run a function on twins.

    Arguments:
        graphdef: of the call.
        leaves: its leaves, inside.
        shapes: their shapes outside.
    """
    groups = _WrittenOrKept()
    inside = run_inside(graphdef, leaves, groups)
    _, outputs = inside.groups
    checks: list[_Check] = []
    entered: list[Any] = []
    for slot, number in groups.pairs:
        output = ~inside.report.sources[slot]
        if np.shape(leaves[number]) == shapes[number]:
            checks.append((output, number, np.shape(outputs[output])))
        else:
            checks.append((output, number, None))
            entered.append(leaves[number])
    return Outcome((inside.report, tuple(checks)), outputs, entered)


def finish_outcomes(flat: Flat, leaves: Sequence[Any], output: Any) -> Any:
    """Step 4: put results in the places of outcomes, and do what the first of them did.

    Arguments:
        flat: the call.
        leaves: its leaves, as the transform was given them.
        output: what the transform returned.

    Raises:
        StructureError: there is no outcome, or it cannot be told what is to be written.
    """
    found, tree = jax.tree.flatten(output, is_leaf=lambda x: isinstance(x, Outcome))
    first = next((x for x in found if isinstance(x, Outcome)), None)
    if first is None:
        raise StructureError(
            "the lifted transform returned nothing of what its function returned, so it cannot be "
            "told what the function did to its arguments"
        )
    _check_written(flat, leaves, first)
    others = [x for x in found if isinstance(x, Outcome) and x is not first]
    results = {id(x): _plain_result(flat, x) for x in others}
    results[id(first)] = finish(flat, first.static[0], array_outputs(([], first.outputs)))
    return tree.unflatten([results.get(id(x), x) for x in found])


def _check_written(flat: Flat, leaves: Sequence[Any], outcome: Outcome) -> None:
    """Raise unless what is written comes out as the transform took it."""
    entered = iter(outcome.entered)
    for output, number, shape in outcome.static[1]:
        now = np.shape(outcome.outputs[output])
        if shape is None:
            wrong = next(entered) is not leaves[number]
            how = "along another axis than it went in along"
        else:
            wrong = now != shape
            how = f"with shape {now}, but had shape {shape} inside"
        if wrong:
            where = call_text(flat.graphdef.infos[number].path)
            raise StructureError(
                bounded(
                    f"{where} was written, but the lifted transform "
                    f"brings it out {how}; a transform of anabranch, like `anabranch.vmap`, "
                    "takes a specification for each leaf"
                )
            )


def _plain_result(flat: Flat, outcome: Outcome) -> Any:
    """Return another result of the transform: a derivative, say, of what was returned."""
    report = outcome.static[0]
    delta, known = report.delta, len(flat.graphdef.entries)
    pending: list[Edge] = [delta.root]
    while pending:
        edge = pending.pop()
        if isinstance(edge, int) and edge >= 0:
            entry = None if edge < known else delta.new[edge - known]
            if entry is None or entry.kind.is_object:
                raise StructureError(
                    "the lifted transform returns the result several times, so that it must be "
                    "made of arrays in plain containers that are none of the arguments"
                )
            pending += entry.edges
    slots = report.slots(flat.leaves, outcome.outputs)
    return apply(delta._replace(changed=()), flat, slots)
