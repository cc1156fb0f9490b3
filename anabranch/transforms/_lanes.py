"""What vmap and pmap share: axes per leaf, sizes, and the groups of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anabranch.errors import SharedStreamError, StructureError, bounded, first_few
from anabranch.graph._build import Built
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import Flat, namer
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._variable import RngCount
from anabranch.transforms._box import Assignment
from anabranch.transforms._specs import Found, Resolved, show, values_of
from anabranch.transforms._worlds import input_values, resolve_inputs, resolve_outputs

Check = Callable[[list[Any], list[Found]], list[Any]]


class LaneGroups:
    """Group what comes out of a lane by the axis along which the lanes are stacked.

    Arguments:
        inputs: the resolved axes of the arguments.
        axes: the axis of each leaf.
        in_axes: the specification of the arguments, as it was given.
        out_axes: the specification of the result.
        check: what is done with outputs that are not mapped: it raises if lanes may differ.
    """

    lanes = True

    def __init__(
        self,
        inputs: Resolved,
        axes: Sequence[int | None],
        in_axes: Any,
        out_axes: Any,
        check: Check | None,
    ) -> None:
        self._inputs, self._axes, self._result, self._check = inputs, axes, out_axes, check
        # a negative axis counts from the rank of each output, which nobody knows before the trace
        asked = (*values_of(in_axes), *values_of(out_axes), 0)
        known = {axis for axis in asked if _is_axis(axis) and axis is not None}
        positive = set(range(_MAX_RANK)) if min(known) < 0 else known
        self.axes: list[int | None] = [None, *sorted(positive)]
        self.count = len(self.axes)

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of the axis of each slot."""
        self._refuse_shared_streams(graphdef, found)
        specs = resolve_outputs(graphdef, twins, found, self._inputs, self._result, 0, _output_axis)

        def check(values: list[Any], slots: list[int]) -> list[Any]:
            assert self._check is not None
            return self._check(values, [specs[slot] for slot in slots])

        groups = [self.axes.index(spec.value) for spec in specs]
        return Assignment(groups, None if self._check is None else check)

    def may_forward(self, leaf: int, group: int) -> bool:
        """A leaf can stand for an output along its own axis."""
        return self._axes[leaf] == self.axes[group]

    def _refuse_shared_streams(self, graphdef: GraphDef, found: Diff) -> None:
        for index, entry in found.delta.changed:
            if issubclass(entry.cls, RngCount) and self._inputs.nodes[index][0] is None:
                raise SharedStreamError(
                    f"{namer(graphdef)(index)}: a key was drawn from a random stream that is "
                    "broadcast, so all lanes would get the same numbers without anybody having "
                    "asked for it. Map the stream (split its key and give it axis 0), or draw "
                    "outside"
                )


_MAX_RANK = 32


def _is_axis(axis: Any) -> bool:
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return True
    raise StructureError(
        f"an axis is an int or None, not {axis!r}; in_axes and out_axes are one axis, containers "
        "of axes, or StateAxes"
    )


def _input_axis(axis: Any, leaf: Any) -> int | None:
    if _is_axis(axis) and axis is None:
        return None
    rank = np.ndim(leaf)
    if not -rank <= axis < rank:
        raise StructureError(f"axis {axis} is out of range for an array of rank {rank}")
    return axis % rank


def _output_axis(axis: Any, leaf: Any) -> int | None:
    if _is_axis(axis) and axis is None:
        return None
    rank = np.ndim(leaf) + 1  # stacked
    if not -rank <= axis < rank:
        raise StructureError(f"axis {axis} is out of range for an output of rank {rank}")
    return axis % rank


def lane_axes(
    flat: Flat, in_axes: Any, axis_size: int | None
) -> tuple[Resolved, list[int | None], int]:
    """Return the resolved axes, the axis of each leaf, and the number of lanes.

    Raises:
        StructureError: an axis does not exist, sizes differ, or nothing is mapped.
        AliasError: one object is given two axes.
    """
    inputs = resolve_inputs(flat, in_axes, 0, None, _input_axis)
    axes = input_values(flat, inputs)
    sizes: dict[int, list[str]] = {}
    for i, axis in enumerate(axes):
        if axis is not None:
            found = inputs.leaves[i, False]
            sizes.setdefault(np.shape(flat.leaves[i])[axis], []).append(
                f"{found.name}{show(found.step)} (axis {axis})"
            )
    if axis_size is not None:
        sizes.setdefault(axis_size, []).insert(0, "axis_size")
    if len(sizes) > 1:
        rows = [f"{size}: {first_few(names).strip()}" for size, names in sizes.items()]
        raise StructureError(bounded(f"the mapped axes have different sizes:\n{first_few(rows)}"))
    if not sizes:
        raise StructureError(
            "nothing is mapped: give an argument an axis in `in_axes`, or give `axis_size`"
        )
    return inputs, axes, next(iter(sizes))
