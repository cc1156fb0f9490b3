"""What vmap and pmap share: axes per leaf, sizes, random streams, groups of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph._build import Built
from anabranch.graph._counterparts import is_kind
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import Entry, GraphDef
from anabranch.graph._recording import Records
from anabranch.graph._variable import Perturbation
from anabranch.transforms._box import Assignment, array_leaves
from anabranch.transforms._rank import inner_graphdef, outer_delta
from anabranch.transforms._specs import Found, Resolved, show, values_of
from anabranch.transforms._streams import Policy, SharedStreams
from anabranch.transforms._worlds import input_values, resolve_inputs, resolve_outputs

Check = Callable[[list[Any], list[Found]], list[Any]]


class Lanes:
    """How a call runs in lanes. It keeps no array and no object, so compiled functions may keep it.

    Arguments:
        flat: the call.
        args: the axes of the positional arguments.
        kwargs: the axes of the keyword arguments.
        axis_size: the number of lanes, if it was given.
        rngs: what a draw from a broadcast stream means.

    Attributes:
        graphdef: of the call as the lanes see it.
        axes: the axis of each leaf that goes in (see `feed`), None if it is broadcast.
        size: the number of lanes.

    Raises:
        StructureError: an axis does not exist, sizes differ, or nothing is mapped.
        AliasError: one object is given two axes.
    """

    def __init__(
        self, flat: Flat, args: Any, kwargs: Any, axis_size: int | None, rngs: Policy
    ) -> None:
        self.inputs = resolve_inputs(flat, args, kwargs, None, input_axis, broadcast_records)
        own = input_values(flat, self.inputs)
        self.size = common_size(flat, self.inputs, own, axis_size)
        for leaf in given_perturbations(flat.graphdef):
            if np.shape(flat.leaves[leaf])[:1] == (self.size,):
                own[leaf] = 0
        self.streams = SharedStreams(
            flat.graphdef, flat.leaves, [axis is None for axis in own], rngs
        )
        self._outer = flat.graphdef
        self.graphdef = inner_graphdef(flat.graphdef, own)
        self.axes = [*own, *[None] * len(self.streams.split)]
        self._forward: list[Any] = list(self.axes)
        for stream in self.streams.split:
            self.axes[stream.key_leaf] = 0
            self._forward[stream.key_leaf] = self._forward[stream.count_leaf] = _NEVER
        self._asked = {axis for axis in (*values_of(args), *values_of(kwargs)) if _is_axis(axis)}

    def feed(self, flat: Flat) -> list[Any]:
        """Return the leaves that go in."""
        return self.streams.feed(array_leaves(flat.leaves), self.size)

    def forwarded(self, flat: Flat, fed: Sequence[Any]) -> list[Any]:
        """Return what leaves stand for that come out as they went in."""
        return [*flat.leaves, *fed[len(flat.leaves) :]]

    def groups(self, result: Any, check: Check | None, name: str | None = None) -> LaneGroups:
        """Return the groups of what comes out; see `LaneGroups`."""
        return LaneGroups(self, result, check, name)

    def settle(self, graphdef: GraphDef, found: Diff, leaves: Sequence[Any]) -> None:
        """Settle what lanes drew from broadcast streams."""
        self.streams.settle(graphdef, found, leaves)

    def may_forward(self, leaf: int, axis: int | None) -> bool:
        """A leaf can stand for an output along its own axis."""
        return self._forward[leaf] == axis

    def outside(self, found: Diff, axes: Sequence[int | None], name: str | None) -> Any:
        """Return the delta as it is for the caller's objects."""
        return outer_delta(self._outer, self.graphdef, found.delta, axes.__getitem__, name)

    @property
    def asked(self) -> set[int | None]:
        """The axes in the specifications of the arguments."""
        return self._asked


class LaneGroups:
    """Group what comes out of a lane by the axis along which the lanes are stacked.

    Arguments:
        lanes: the call.
        result: the specification of the result.
        check: what is done with outputs that are not mapped: it raises if lanes may differ.
        name: what the new axis is called in the metadata `sharding`.
    """

    lanes = True

    def __init__(self, lanes: Lanes, result: Any, check: Check | None, name: str | None) -> None:
        self._call, self._result, self._check, self._name = lanes, result, check, name
        # a negative axis counts from the rank of each output, which nobody knows before the trace
        asked = {*lanes.asked, *[axis for axis in values_of(result) if _is_axis(axis)], 0}
        known = {axis for axis in asked if axis is not None}
        positive = set(range(_MAX_RANK)) if min(known) < 0 else known
        self.axes: list[int | None] = [None, *sorted(positive)]
        self.count = len(self.axes)

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of the axis of each slot."""
        self._call.settle(graphdef, found, leaves)
        inputs = self._call.inputs
        specs = resolve_outputs(
            graphdef, twins, found, inputs, self._result, 0, output_axis, stack_records
        )
        # a number that is not stacked is itself
        single = {i for i in found.numbers if specs[i].value is None}
        specs = [spec for i, spec in enumerate(specs) if i not in single]
        found = found.without(single)

        def check(values: list[Any], slots: list[int]) -> list[Any]:
            assert self._check is not None
            return self._check(values, [specs[slot] for slot in slots])

        groups = [self.axes.index(spec.value) for spec in specs]
        delta = self._call.outside(found, [spec.value for spec in specs], self._name)
        return Assignment(groups, None if self._check is None else check, delta, found.slots)

    def may_forward(self, leaf: int, group: int) -> bool:
        """A leaf can stand for an output along its own axis."""
        return self._call.may_forward(leaf, self.axes[group])


_MAX_RANK = 32
_NEVER = object()


def broadcast_records(entry: Entry, spec: Any) -> Any:
    """What was recorded before is no business of the lanes, whatever they do with its owner."""
    return None if issubclass(entry.cls, Records) else spec


def stack_records(entry: Entry, spec: Any) -> Any:
    """What the lanes record is stacked, also if its owner is broadcast."""
    return 0 if issubclass(entry.cls, Records) else spec


def given_perturbations(graphdef: GraphDef) -> list[int]:
    """Return the leaves of perturbations that were given to a capture.

    They are stacked as they were when they were made, so lanes map them where the size fits: one
    that is meant for another level is not used by these.
    """
    entries = graphdef.entries
    found: list[int] = []
    for entry in entries:
        if issubclass(entry.cls, Records):
            below = [entries[e] for e in entry.edges if type(e) is int and e >= 0]
            pending = [e for v in below if is_kind(v.cls, Perturbation) for e in v.edges]
            while pending:
                edge = pending.pop()
                if type(edge) is int and edge < 0:
                    found.append(~edge)
                elif type(edge) is int:
                    pending += entries[edge].edges
    return found


def _is_axis(axis: Any) -> bool:
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return True
    raise StructureError(
        f"an axis is an int or None, not {axis!r}; in_axes and out_axes are one axis, containers "
        "of axes, or StateAxes"
    )


def input_axis(axis: Any, leaf: Any) -> int | None:
    """Return the axis of an argument, counted from the front."""
    if _is_axis(axis) and axis is None:
        return None
    rank = np.ndim(leaf)
    if not -rank <= axis < rank:
        raise _out_of_range(axis, "an array", rank)
    return axis % rank


def output_axis(axis: Any, leaf: Any) -> int | None:
    """Return the axis along which an output is stacked, counted from the front."""
    if _is_axis(axis) and axis is None:
        return None
    rank = np.ndim(leaf) + 1  # stacked
    if not -rank <= axis < rank:
        raise _out_of_range(axis, "an output", rank)
    return axis % rank


def _out_of_range(axis: int, what: str, rank: int) -> StructureError:
    axes = f"an axis from {-rank} to {rank - 1}" if rank else "no axis"
    return StructureError(
        f"axis {axis} is out of range for {what} of rank {rank}, which has {axes}; None is for "
        "what all lanes share, and `StateAxes` chooses by kind"
    )


def common_size(
    flat: Flat,
    inputs: Resolved,
    axes: Sequence[int | None],
    given: int | None,
    option: str = "axis_size",
) -> int:
    """Return the size that all mapped axes have, and that was given as an option if one was.

    Raises:
        StructureError: sizes differ, nothing is mapped, or the option is no number of lanes.
    """
    if given is not None and not (isinstance(given, (int, np.integer)) and given >= 0):
        raise StructureError(f"{option} is a number that is not negative, not {given!r}")
    sizes: dict[int, list[str]] = {}
    for i, axis in enumerate(axes):
        if axis is not None:
            found = inputs.leaves[i, False]
            sizes.setdefault(np.shape(flat.leaves[i])[axis], []).append(
                f"{show(found.name, found.step)} (axis {axis})"
            )
    if given is not None:
        sizes.setdefault(given, []).insert(0, option)
    if len(sizes) > 1:
        rows = [f"{size}: {first_few(names).strip()}" for size, names in sizes.items()]
        raise StructureError(bounded(f"the mapped axes have different sizes:\n{first_few(rows)}"))
    if not sizes:
        raise StructureError(
            f"nothing is mapped: give an argument an axis in `in_axes`, or give `{option}`"
        )
    return next(iter(sizes))
