"""The four-step box: split, merge, call, split, merge. It exists once, here.

    (1) `flatten_call`   outside: the caller's objects become a graphdef and leaves
    (2) `run_inside`     inside: twins are built around the tracers, the function is called,
    (3)                  and what it did becomes a static report and lists of written leaves
    (4) `finish`         outside: the report is played on the caller's objects

A transform is an adapter: it says which **group** each leaf that comes out belongs to, and maps the
groups onto the arguments of its JAX namesake. The report is the auxiliary data of a pytree node
without leaves, so that JAX brings it back from a cached compiled call for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from anabranch._jax import current_trace
from anabranch.graph._build import Built, build
from anabranch.graph._delta import Delta, Diff, apply, diff
from anabranch.graph._flatten import Flat, check_opaques
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaks import Places, refuse_leaks
from anabranch.graph._scope import HOOKS, OPEN, Scope, open_scopes
from anabranch.graph._spend import spend
from anabranch.graph._tokens import OPEN_LEVELS, Level, levels
from anabranch.transforms._captured import tell_watcher
from anabranch.transforms._lifting import Attempt, attempt_for, lifting_into, with_captured
from anabranch.transforms._room import with_room


class Report:
    """What the function did, as static data.

    `sources` tells for each slot of the delta where its value is: `i >= 0` is leaf `i` of the
    arguments, which needs no output; `~i` is output `i`, counted over all groups.
    """

    __slots__ = ("_key", "delta", "sources")

    def __init__(self, delta: Delta, sources: tuple[int, ...]) -> None:
        self.delta, self.sources = delta, sources
        self._key = (delta, sources)

    def slots(self, leaves: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the values of the slots, of leaves and the outputs of all groups."""
        return [leaves[source] if source >= 0 else outputs[~source] for source in self.sources]

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Report) and other._key == self._key)

    def __repr__(self) -> str:
        return f"<report: {len(self.delta.changed)} objects changed>"


jax.tree_util.register_static(Report)


class Assignment(NamedTuple):
    """Which group each slot belongs to, and what is to be done with the outputs at the end."""

    groups: Sequence[int]
    check: Callable[[list[Any], list[int]], list[Any]] | None = None
    """From the outputs, and the slot that each one comes from, to the outputs."""

    delta: Delta | None = None
    """The delta as it is outside, if that is another one."""
    slots: Sequence[Any] | None = None
    """The slots of that delta, if they are others; the groups are theirs."""


class Grouping(Protocol):
    """How the leaves that come out are grouped."""

    @property
    def lanes(self) -> bool:
        """Whether the function runs once a lane: then numbers that it leaves may be stacked."""
        ...

    @property
    def count(self) -> int:
        """The number of groups."""
        ...

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of each slot."""
        ...

    def may_forward(self, leaf: int, group: int) -> bool:
        """Tell whether a leaf of the arguments can stand for an output of a group."""
        ...


class OneGroup:
    """All leaves in one group: for transforms that treat all leaves alike."""

    lanes = False
    count = 1

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return zeros."""
        return Assignment([0] * found.delta.num_slots)

    def may_forward(self, leaf: int, group: int) -> bool:
        """Every leaf can be forwarded."""
        return True


ONE_GROUP = OneGroup()


class Inside(NamedTuple):
    """What comes out of steps 2 and 3."""

    report: Report
    groups: tuple[list[Any], ...]
    picked: Any


@with_room
def run_inside(
    graphdef: GraphDef,
    leaves: Sequence[Any],
    grouping: Grouping,
    pick: Callable[[Any], Any] | None = None,
    call: Callable[[Any], Any] | None = None,
    prepare: Callable[[Sequence[Any]], None] | None = None,
) -> Inside:
    """Steps 2 and 3: call the function on twins, and report what it did.

    Arguments:
        graphdef: of a `Call`.
        leaves: its leaves, tracers among them.
        grouping: which group each leaf that comes out belongs to.
        pick: from what the function returned, twins among it, to what an adapter needs of it
            inside; afterwards the twins are spent.
        call: from the twin of the `Call` to its result, if that is not to call its function.
        prepare: does something to the twins, given by index, before the call.
    """
    attempt, left = attempt_for(graphdef), list[str]()
    level, outer_levels = Level(), levels()
    height = len(outer_levels)
    try:
        if attempt is not None and attempt.opener is current_trace():
            level.open()  # in the trace of its caller, it would own all objects of the caller
        built = build(graphdef, leaves)
        twins = [built.objects[i] for i in built.recipe.identities]
        scope = _scope_of(attempt, built, twins)
        functions = () if attempt is None else attempt.functions
        scopes = open_scopes()
        around = scopes[-1].places if scopes else None
        scope.places = places = Places(functions, built.recipe.classes, around)
        depth = len(scopes)
        try:
            scope.open()
            with lifting_into(attempt, scope):
                if prepare is not None:
                    prepare(built.objects)
                twin = with_captured(built.resolve(graphdef.root))
                if call is None:  # with no frame between: JAX records the stack of each operation
                    function, args, kwargs = twin.parts()
                    result = function(*args, **kwargs)
                else:
                    result = call(twin)
                tell_watcher()
                found = diff(graphdef, built, result, lanes=grouping.lanes)
                if attempt is not None:
                    attempt.refuse_copies(found.new, scope)
                picked = None if pick is None else pick(result)
                inside = Inside(*_report(graphdef, leaves, grouping, built, found), picked)
        finally:
            # in place, and this first: an interrupt may come whenever a function is entered or left
            del scopes[depth:]
            if scope in OPEN:
                OPEN.remove(scope)
            HOOKS.let_go()
            spend(twins + scope.stand_ins)
            left = places.take_back(scope)
            check_opaques(graphdef)
    finally:
        del outer_levels[height:]
        level.trace = None
        if level in OPEN_LEVELS:
            OPEN_LEVELS.remove(level)
    refuse_leaks(left)
    return inside


def _scope_of(attempt: Attempt | None, built: Built, twins: Sequence[Any]) -> Scope:
    if attempt is None:
        return Scope(None, twins, None)
    outer = [attempt.flat.objects[i] for i in built.recipe.identities]
    return Scope(outer, twins, attempt.opener, attempt.captured, attempt.hooked)


def _report(
    graphdef: GraphDef, leaves: Sequence[Any], grouping: Grouping, built: Built, found: Diff
) -> tuple[Report, tuple[list[Any], ...]]:
    groups, check, delta, slots = grouping.assign(graphdef, built, found, leaves)
    outputs = _Outputs(found.slots if slots is None else slots, groups, grouping, leaves)
    values = outputs.values
    if check is not None:
        values = check(values, outputs.slots)
    order = sorted(range(len(values)), key=outputs.groups.__getitem__)  # stable: as in the lists
    rank = {at: i for i, at in enumerate(order)}
    lists: tuple[list[Any], ...] = tuple([[] for _ in range(grouping.count)])
    for at in order:
        lists[outputs.groups[at]].append(values[at])
    sources = tuple([s if s >= 0 else ~rank[~s] for s in outputs.sources])
    return Report(found.delta if delta is None else delta, sources), lists


class _Outputs:
    """The arrays that have to come out: each once a group, and none that went in unchanged."""

    def __init__(
        self,
        slots: Sequence[Any],
        groups: Sequence[int],
        grouping: Grouping,
        leaves: Sequence[Any],
    ) -> None:
        self.values: list[Any] = []
        self.groups: list[int] = []
        self.slots: list[int] = []  # of each value, the first slot that it is for
        self.sources: list[int] = []
        position: dict[tuple[int, int], int] = {}
        leaf_of = {id(leaf): i for i, leaf in enumerate(leaves)}
        for i, (slot, group) in enumerate(zip(slots, groups, strict=True)):
            leaf = leaf_of.get(id(slot))
            if leaf is not None and grouping.may_forward(leaf, group):
                self.sources.append(leaf)
                continue
            at = position.setdefault((id(slot), group), len(self.values))
            if at == len(self.values):
                self.values.append(slot)
                self.groups.append(group)
                self.slots.append(i)
            self.sources.append(~at)


def finish(
    flat: Flat,
    report: Report,
    groups: Sequence[Sequence[Any]],
    leaves: Sequence[Any] | None = None,
) -> Any:
    """Step 4: write to the caller's objects, all or nothing, and return the result.

    Arguments:
        flat: the call.
        report: what the function did.
        groups: the outputs.
        leaves: what leaves stand for that are forwarded, if not for those of the call.
    """
    outputs = [value for group in groups for value in group]
    leaves = flat.leaves if leaves is None else leaves
    return apply(report.delta, flat, report.slots(leaves, outputs))


def array_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves with numpy arrays made immutable: a transform may pass them on as they are."""
    return [jnp.asarray(x) if type(x) is np.ndarray else x for x in leaves]


def array_outputs(groups: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return what comes out as arrays; an interpreter of jaxprs may pass on its own constants."""
    return [[*map(as_array, group)] for group in groups]


def as_array(x: Any) -> Any:
    """Return `jnp.asarray`, whose trace takes some time for arrays, too."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
