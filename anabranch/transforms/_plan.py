"""Call plans: what a call found out about its arguments, kept for the next one.

A call that has been walked leaves a plan: where each leaf is read from, the compiled function, and
where what was written goes. The next call with the same roots looks the plan up (see `_spine`),
asks the segments whether anything has changed (see `_segment`), reads the leaves, calls, and writes
(see `_writer`). Whenever anything is not as the plan expects, the call is walked as if there were
no plan: that is always right, and a plan never changes what a call does.

A plan belongs to the compiled function, and refers to objects of the caller weakly. It is never
changed but for the stamps up to which its structure is known to be the same, so threads share it.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from anabranch.graph._build import picker
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._tokens import STRUCTURE
from anabranch.transforms._box import Report
from anabranch.transforms._make_segment import make_segment
from anabranch.transforms._places import loosen
from anabranch.transforms._segment import Segment, drop_others
from anabranch.transforms._sharing import Sharing, find_sharing
from anabranch.transforms._spine import Spine
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._writer import Writer, key_of, places_of_containers

AGAIN = object()
"""Returned where a call has to be walked; nothing has been written then."""


class TraceNeededError(Exception):
    """JAX traces a function in a call that follows a plan, which has not walked the arguments.

    The call is made once more, walked. A user never sees this.
    """


class Stamps(NamedTuple):
    """The stamps of the last writes, read before the objects are."""

    structure: object
    variables: object
    unwatched: object


def read_stamps() -> Stamps:
    """Return the stamps of the last structural writes; see `STRUCTURE`."""
    structure = STRUCTURE.stamp  # first: the others are renewed before it
    return Stamps(structure, STRUCTURE.variables, STRUCTURE.unwatched)


class _Part(NamedTuple):
    """A segment, with its place among the leaves."""

    segment: weakref.ref[Segment]
    root: int  # the number of its root in the spine
    start: int  # how many leaves of the spine come before it


class _Known(NamedTuple):
    """A report that was seen, and how it is written; None if only `finish` can."""

    report: Report
    writer: Writer | None
    runs: Sequence[tuple[int, Callable[[Any], Sequence[Any]]]]
    """The segment that written Variables belong to, -1 for the spine, and which they are."""


class Plan:
    """What is known of the calls with one key."""

    __slots__ = (
        "__weakref__",
        "_known",
        "_variables",
        "calls",
        "constants",
        "function",
        "graphdef",
        "latest",
        "loose",
        "nodes",
        "order",
        "parts",
        "reports",
        "roots",
        "sharing",
        "unwatched",
    )

    def __init__(
        self,
        compiled: Any,
        graphdef: GraphDef,
        stamps: Stamps,
        parts: Sequence[_Part],
        roots: Mapping[int, int],
        nodes: Mapping[int, int],
        loose: Collection[tuple[int, int]],
        sharing: Sharing | None,
        order: Sequence[int] | None,
        constants: Collection[int],
    ) -> None:
        self.function, self.reports, self.graphdef = compiled.function, compiled.reports, graphdef
        _, self._variables, self.unwatched = stamps
        self.calls = 0  # that followed it in the general way
        self.latest: _Known | None = None  # what the last of them did
        self.parts = parts
        self.roots = roots  # from the index of a root to its number in the spine
        # the same for the nodes of the spine, without shared ones, and with those in loose places
        self.nodes = nodes
        self.loose = loose  # those places: the index of an object, and the position in it
        self.sharing = sharing
        self.order = order  # the leaves by their places among those that were read, if they differ
        self.constants = frozenset(constants)  # the ids of lists and dicts that must be no nodes
        self._known: dict[int, _Known] = {}

    def watch(self, segments: Sequence[Segment], forget: Callable[[Any], None]) -> None:
        """Call a function when a segment has died."""
        self.parts = [
            part._replace(segment=weakref.ref(segment, forget))
            for part, segment in zip(self.parts, segments, strict=True)
        ]

    def read(self, spine: Spine) -> tuple[Sequence[Any], list[Segment]] | None:
        """Return the leaves and the segments, or None if the structure has changed."""
        variables = STRUCTURE.variables
        same_variables = variables is self._variables
        segments: list[Segment] = []
        read: list[Sequence[Any]] = []
        nodes: list[Any] = []
        for ref, root, _ in self.parts:
            segment = ref()
            if segment is None:
                return None
            found = segment.read(spine.roots[root], same_variables, nodes)
            if found is None:
                return None
            segments.append(segment)
            read.append(found)
        if self.sharing is not None and not self.sharing.read(spine, segments):
            return None
        given = spine.leaves
        leaves: Sequence[Any] = []
        at = 0
        for (_, _, start), found in zip(self.parts, read, strict=True):
            if start > at:
                leaves = [*leaves, *given[at:start]]
                at = start
            leaves = [*leaves, *found] if leaves else found
        if len(given) > at:
            leaves = [*leaves, *given[at:]]
        if self.order is not None:
            leaves = [leaves[i] for i in self.order]
        if nodes:
            spine.nodes = nodes = [*spine.nodes, *nodes]
            if len({*map(id, nodes)}) < len(nodes):
                return None
        if spine.nodes and not all(
            ids.isdisjoint(map(id, spine.nodes))
            for ids in (self.constants, *[s.ids for s in segments])
        ):
            return None
        if not same_variables:
            self._variables = variables
        return leaves, segments

    def is_fresh(self) -> bool:
        """Tell whether all Modules of it are there, and as it knows them."""
        segments = [part.segment() for part in self.parts]
        return all(segment is not None and segment.fresh for segment in segments)

    def may_be_fresh(self) -> bool:
        """Tell whether they may be so later, or are now."""
        segments = [part.segment() for part in self.parts]
        return all(segment is not None and not segment.ended for segment in segments)

    def rearm(self, segments: Sequence[Segment], unwatched: object) -> bool:
        """Tell whether no write to a Variable concerns this plan, and remember it.

        Arguments:
            segments: of the plan.
            unwatched: the stamp of `STRUCTURE` up to which nothing else concerns it.
        """
        variables = STRUCTURE.variables
        if variables is not self._variables:
            if not all(segment.has_metadata() for segment in segments):
                return False
            self._variables = variables
        self.unwatched = unwatched
        return True

    def finish(
        self,
        spine: Spine,
        segments: Sequence[Segment],
        leaves: Sequence[Any],
        report: Report,
        outputs: Sequence[Any],
    ) -> Any:
        """Write what the function wrote, and return the result, or `AGAIN`."""
        known = self._known.get(id(report)) or self.learn(spine, segments, report)
        self.latest = known
        writer = known.writer
        if writer is None:
            return AGAIN
        resolve = functools.partial(self.resolve, spine, segments)
        if writer.writes:
            variables: Sequence[Any] = ()
            for number, pick in known.runs:
                objects: Any = spine.nodes if number < 0 else segments[number].objects
                found = pick(objects)
                variables = (*variables, *found) if variables else found
            placed = writer.placed.make(leaves, outputs, resolve)
            objects = [*map(resolve, writer.holders)]
            if not writer.write(variables, objects, leaves, outputs, placed):
                return AGAIN
        return writer.make_result(leaves, outputs, resolve)

    def learn(self, spine: Spine, segments: Sequence[Segment], report: Report) -> _Known:
        """Work out how a report is written."""
        resolve = functools.partial(self.resolve, spine, segments)
        try:
            writer = Writer(self.graphdef, report, resolve, self._may_hold_new)
            runs = self._runs(writer.indices, segments)
            known = _Known(report, writer, runs)
        except Unplannable:
            known = _Known(report, None, ())
        if len(self._known) >= _REPORTS:
            self._known = {}
        self._known = {**self._known, id(report): known}
        return known

    def _may_hold_new(self, index: int, position: int) -> bool:
        """Tell whether a call reads a place as if it were an argument."""
        return index in self.nodes or (index, position) in self.loose

    def _runs(
        self, indices: Sequence[int], segments: Sequence[Segment]
    ) -> list[tuple[int, Callable[[Any], Sequence[Any]]]]:
        runs: list[tuple[int, list[int]]] = []
        for index in indices:
            number, key = -1, self.nodes.get(index)
            if key is None:
                number = next(i for i, s in enumerate(segments) if index in s.objects)
                key = index
            if runs and runs[-1][0] == number:
                runs[-1][1].append(key)
            else:
                runs.append((number, [key]))
        return [(number, picker(keys)) for number, keys in runs]

    def resolve(self, spine: Spine, segments: Sequence[Segment], index: int) -> Any:
        """Return the object of this call that has an index.

        Raises:
            Unplannable: it is none that is known.
        """
        if index in self.nodes:
            return spine.nodes[self.nodes[index]]
        if index in self.roots:
            return spine.roots[self.roots[index]]
        for segment in segments:
            if index in segment.objects:
                return segment.objects[index]
        raise Unplannable


_REPORTS = 64  # of one plan: one for each combination of shapes


def make_plan(
    spine: Spine,
    flat: Flat,
    stamps: Stamps,
    compiled: Any,
    report: Report,
    constants: Collection[int],
) -> tuple[Plan, list[Segment]]:
    """Make a plan of a call that was walked; `give` lets it live.

    Arguments:
        spine: of the call.
        flat: what the walk found.
        stamps: read before the walk.
        compiled: the compiled function.
        report: what the function did.
        constants: the ids of the containers that are constants to it.

    Raises:
        Unplannable: the call holds what a plan cannot follow, or the report says more than what
            a plan can write.
    """
    _loosen(spine, flat, report)
    entries = flat.graphdef.entries
    index_of = {id(x): i for i, x in enumerate(flat.objects) if entries[i].kind.identity}
    in_places: list[Any] = []
    loose: list[tuple[int, int]] = []
    roots: dict[int, int] = {}
    segments: list[Segment] = []
    starts: list[int] = []
    seen: set[int] = set()
    for i, (root, start) in enumerate(zip(spine.roots, spine.starts, strict=True)):
        index = index_of.get(id(root), -1)
        if index < 0 or index in seen:
            continue
        segment, found = make_segment(flat, index, seen)
        loose += [each.place.at for each in segment.places.loose]
        in_places += found
        roots[index] = i
        segments.append(segment)
        starts.append(start)
    sharing = find_sharing(spine, segments)
    if sharing is not None:
        starts = [bisect_left(sharing.kept, start) for start in starts]
        sharing.read(spine, segments)
    spine.nodes = nodes = [*spine.nodes, *in_places]
    of_nodes = {*map(id, nodes)}
    if len(of_nodes) < len(nodes) or not all(s.ids.isdisjoint(of_nodes) for s in segments):
        raise Unplannable
    order = _order(spine, flat, starts, segments)
    at_nodes = {index_of.get(id(node), -1): i for i, node in enumerate(nodes)}
    if -1 in at_nodes:
        raise Unplannable
    parts = [
        _Part(weakref.ref(segment), root, start)
        for root, start, segment in zip(roots.values(), starts, segments, strict=True)
    ]
    plan = Plan(
        compiled,
        flat.graphdef,
        stamps,
        parts,
        roots,
        at_nodes,
        frozenset(loose),
        sharing,
        order,
        constants,
    )
    if plan.learn(spine, segments, report).writer is None:
        raise Unplannable
    if STRUCTURE.stamp is not stamps.structure:
        raise Unplannable  # somebody wrote while we were looking
    return plan, segments


def _loosen(spine: Spine, flat: Flat, report: Report) -> None:
    """Make the places loose where the function puts new containers; see `_places`."""
    entries = flat.graphdef.entries
    places: set[tuple[int, Any]] = set()
    for index, position in places_of_containers(flat.graphdef, report):
        loosen(flat.objects[index], key_of(entries[index], position))
        places.add((id(flat.objects[index]), entries[index].keys[position]))
    if places:
        for root in spine.roots:
            drop_others(root, places)


def _order(
    spine: Spine, flat: Flat, starts: Sequence[int], segments: Sequence[Segment]
) -> Sequence[int] | None:
    """Return where each leaf is among those that are read, None if they are read in order.

    Raises:
        Unplannable: other leaves are read, or one of them in two places.
    """
    of_segments = {*chain.from_iterable([segment.leaves for segment in segments])}
    others = [i for i in range(len(flat.leaves)) if i not in of_segments]
    if [id(flat.leaves[i]) for i in others] != [*map(id, spine.leaves)]:
        raise Unplannable
    numbers: list[int] = []
    at = 0
    for start, segment in zip(starts, segments, strict=True):
        numbers += [*others[at:start], *segment.leaves]
        at = start
    numbers += others[at:]
    in_order = [*range(len(flat.leaves))]
    if len(numbers) != len(in_order):
        raise Unplannable
    return None if numbers == in_order else sorted(in_order, key=numbers.__getitem__)
