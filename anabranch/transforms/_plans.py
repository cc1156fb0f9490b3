"""The plans of one function: found by what is read of a call, followed, left by a walk."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from anabranch import _jax
from anabranch.graph import _tokens
from anabranch.graph._containers import captured_constants
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._scope import OPEN as _SCOPES
from anabranch.graph._scope import Found
from anabranch.graph._static import EXACT_BY_TYPE
from anabranch.graph._turn import COMMITS
from anabranch.transforms._box import Report, finish
from anabranch.transforms._call import Selection, explain_failure, flatten_call, with_static
from anabranch.transforms._follower import followed_call, make_follower, quick_key
from anabranch.transforms._lifting import attempt_for, call_in_attempt
from anabranch.transforms._plan import AGAIN, Plan, Stamps, TraceNeededError, make_plan
from anabranch.transforms._segment import Segment, give
from anabranch.transforms._spine import Spine, SpineReader, Table
from anabranch.transforms._watch import Unplannable

R = TypeVar("R")

_current_trace, _ROOT, _LEVELS = _jax.current_trace, _tokens.ROOT, _tokens.OPEN_LEVELS


class _Splitter(NamedTuple):
    """Splits calls of a function."""

    function: Any
    static: Selection

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flat:
        return flatten_call(self.function, *with_static(self.static, args, kwargs))


class Plans:
    """The plans of one compiled function.

    Arguments:
        function: of the user.
        static: which arguments are static.
    """

    __slots__ = (
        "__weakref__",
        "_forms",
        "_in_vain",
        "_pause",
        "_reader",
        "_splitter",
        "_static",
        "followers",
    )

    def __init__(self, function: Any, static: Selection) -> None:
        self._splitter, self._static = _Splitter(function, static), static
        self._reader = SpineReader(function, static)
        self._forms: dict[int, _Forms] = {}
        self._in_vain = 0  # plans in a row that no call has followed
        self._pause = 0  # so many calls leave no plan
        self.followers: dict[int, Any] = {}
        """For each first argument, if that is a Module, what follows its plans; see `quick_key`."""

    def __iter__(self) -> Iterator[Plan]:
        return iter([*chain.from_iterable(self._every())])

    def _every(self) -> Iterator[Sequence[Plan]]:
        return chain.from_iterable([table.values() for table in self._reader.tables.values()])

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call by its plan, or return `AGAIN` with nothing done."""
        if _current_trace() is not _ROOT or _LEVELS or _SCOPES:
            return AGAIN
        ended = COMMITS.ended
        spine = self._reader.read(args, kwargs)
        plans = () if spine is None else spine.table.get(spine.key, ())
        plan = next((plan for plan in plans if plan.is_fresh()), None)
        if spine is None or plan is None:
            return AGAIN
        found = plan.read(spine)
        if found is None or COMMITS.begun is not ended:  # what was read may be half of a commit
            return AGAIN
        leaves, segments = found
        _FOLLOWED.call = (self._splitter, args, kwargs)
        try:
            outputs = plan.reports.outputs(plan.function(*leaves))
        except (TraceNeededError, Found):
            return AGAIN
        except Exception as error:
            flat = self._walk(plan, leaves, args, kwargs)
            if flat is None:
                return AGAIN
            explain_failure(flat, error)
            raise
        finally:
            _FOLLOWED.call = None
        report = plan.reports.read(outputs)
        result = plan.finish(spine, segments, leaves, report, outputs)
        plan.calls += 1
        self._in_vain = 0
        if not plan.calls & (plan.calls - 1):  # a power of two: what it does may not be settled yet
            self._write_out(plan, segments, args, kwargs)
        if result is not AGAIN:
            return result
        flat = self._walk(plan, leaves, args, kwargs)
        return AGAIN if flat is None else finish(flat, report, [outputs])

    def _write_out(
        self,
        plan: Plan,
        segments: Sequence[Segment],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Make a follower, if the plan is a simple one."""
        key, name = quick_key(args), _name_of_form(self._static, args, kwargs)
        forms = [
            form
            for form in self._forms.get(key, {}).get(name, ())
            if form[0] is not plan and form[0].may_be_fresh()
        ][1 - _ALIKE :]  # the oldest may fit no more
        if sum(map(len, self._forms.values())) >= _FOLLOWERS:
            self.followers.clear()
            self._forms.clear()
        head = self._reader.head()
        follower = make_follower(plan, segments, head, self._static, args, kwargs, self._general())
        if follower is not None:
            forms.append((plan, follower))
        self._set_forms(key, {**self._forms.get(key, {}), name: forms})

    def _set_forms(self, key: int, every: _Forms) -> None:
        every = {name: forms for name, forms in every.items() if forms}
        if every:
            self._forms[key] = every
            followers = {name: _one_of([f for _, f in forms]) for name, forms in every.items()}
            (first,) = followers.values() if len(followers) == 1 else (None,)
            self.followers[key] = first or _by_name(self._static, followers)
        else:
            self._forms.pop(key, None)
            self.followers.pop(key, None)

    def _add(self, spine: Spine, plan: Plan) -> None:
        """Add a plan to those with its key that wait for switches; see `_watchers`."""
        before = spine.table.get(spine.key, ())
        waiting = [old for old in before if old.may_be_fresh() and not old.is_fresh()][: _MODES - 1]
        spine.table[spine.key] = (plan, *waiting)
        for old in before:
            if old not in waiting:
                self.note_end(old)

    def note_end(self, plan: Plan) -> None:
        """Plan less as long as plans are out of date before a call has followed them."""
        if not plan.calls:
            self._in_vain += 1
            self._pause = (1 << min(self._in_vain, _PATIENCE)) - 2  # none after the first

    def drop_followers(self, plan: Plan) -> None:
        """Drop what follows a plan."""
        for key, every in [*self._forms.items()]:
            if any(known is plan for forms in every.values() for known, _ in forms):
                kept = {
                    name: [form for form in forms if form[0] is not plan]
                    for name, forms in every.items()
                }
                self._set_forms(key, kept)

    def _general(self) -> dict[str, Any]:
        me = weakref.ref(self)

        def failed(*call: Any) -> Any:
            plans = me()
            flat = None if plans is None else plans._walk(*call)
            if flat is not None:
                explain_failure(flat, sys.exception())
            return flat

        def other(
            plan: Plan,
            leaves: Any,
            args: Any,
            kwargs: Any,
            outputs: list[Any],
            known: Report | None = None,
        ) -> Any:
            """Finish a call that did something else than those before."""
            report = plan.reports.read(outputs) if known is None else known
            plans = me()
            if plans is not None:  # it knows one report: the general way is shorter than this one
                plans.drop_followers(plan)
            spine = None if plans is None else plans._reader.read(args, kwargs)
            flat = None if plans is None else plans._walk(plan, leaves, args, kwargs)
            if spine is None or flat is None:
                return AGAIN
            found = plan.read(spine)
            if found is None:
                return AGAIN
            result = plan.finish(spine, found[1], leaves, report, outputs)
            return finish(flat, report, [outputs]) if result is AGAIN else result

        return {
            "Found": Found,
            "TraceNeededError": TraceNeededError,
            "failed": failed,
            "finish": other,
            "splitter": self._splitter,
        }

    def _walk(
        self, plan: Plan, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Flat | None:
        """Walk the arguments; return None if that finds something else than the plan did."""
        try:
            flat = self._splitter.split(args, kwargs)
        except Exception:  # whatever it is, the call that is made again says it
            return None
        same = len(leaves) == len(flat.leaves) and all(map(operator.is_, leaves, flat.leaves))
        return flat if same and flat.graphdef is plan.graphdef else None

    def finish(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        flat: Flat,
        stamps: Stamps,
        compiled: Any,
        report: Report,
        outputs: Sequence[Any],
    ) -> Any:
        """Finish a call that was walked, and leave a plan; or return `AGAIN` with nothing done.

        Arguments:
            args: of the call.
            kwargs: of the call.
            flat: what the walk found.
            stamps: read before the walk.
            compiled: the compiled function.
            report: what it did.
            outputs: what it returned.
        """
        if _current_trace() is not _ROOT or _LEVELS or _SCOPES:
            return AGAIN
        if self._pause:
            self._pause -= 1
            return AGAIN
        spine = self._reader.read_in_full(args, kwargs)
        if spine is None:
            return AGAIN
        try:
            constants = captured_constants([self._splitter.function]).keys()
            plan, segments = make_plan(spine, flat, stamps, compiled, report, constants)
        except Unplannable:
            return AGAIN
        owners = weakref.ref(spine.table), weakref.ref(self)
        forget = functools.partial(_forget, *owners, spine.key)
        plan.watch(segments, forget)
        objects = {*map(id, flat.objects)}
        for part, segment in zip(plan.parts, segments, strict=True):
            give(spine.roots[part.root], plan, segment, objects)
        self._add(spine, plan)
        return plan.finish(spine, segments, flat.leaves, report, outputs)

    def clear(self) -> None:
        """Drop all plans."""
        self.followers.clear()
        self._forms.clear()
        for table in self._reader.tables.values():
            table.clear()


_MODES = 4  # plans with one key
_PATIENCE = 6  # the binary logarithm of the calls that leave no plan at most
_FOLLOWERS = 1024
_ALIKE = 8  # forms with one name that have a follower
_SIMPLE = EXACT_BY_TYPE | {float, complex}
_STRINGS = frozenset({str})
_Forms = dict[Any, list[tuple[Plan, Any]]]
"""By name, plans and what follows them."""


def _name_of_form(static: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what tells many ways to call apart quickly: simple static arguments, and strings.

    Followers with one name are asked in turn.
    """
    chosen = static.of_args(args) if static.nums else ()
    return (
        *[_part(x, _SIMPLE if i in chosen else _STRINGS) for i, x in enumerate(args)],
        *[(k, _part(x, _SIMPLE if k in static.names else _STRINGS)) for k, x in kwargs.items()],
    )


def _part(x: Any, types: frozenset[type]) -> Any:
    return x if type(x) in types else None


def _by_name(static: Selection, followers: Mapping[Any, Any], again: object = AGAIN) -> Any:
    """Return what lets the followers with the name of a call make it."""

    def follow(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        follower = followers.get(_name_of_form(static, args, kwargs))
        return again if follower is None else follower(args, kwargs)

    return follow


def _one_of(followers: Sequence[Any], again: object = AGAIN) -> Any:
    """Return what lets the first follower make a call that can, the last one that could at first.

    What changes for good, or from call to call, has followers that fit no more: flax does not say.
    """
    if len(followers) == 1:
        return followers[0]
    order = [*followers]

    def follow(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for follower in order:
            result = follower(args, kwargs)
            if result is not again:
                if follower is not order[0]:
                    order[:] = [follower, *[other for other in order if other is not follower]]
                return result
        return again

    return follow


class _Followed(threading.local):
    call: tuple[_Splitter, Sequence[Any], Mapping[str, Any]] | None = None


_FOLLOWED = _Followed()


def call_traced(graphdef: GraphDef, function: Callable[..., R], *args: Any) -> R:
    """Call a function that JAX traces; if that is in a call which follows a plan, walk it now.

    To raise instead would be simpler, but then JAX takes its slow path for such arguments from
    there on.

    Arguments:
        graphdef: what the function is traced for.
        function: of ours, which runs that of the user.
        args: of it.

    Raises:
        TraceNeededError: the call has another structure than the plan says.
    """
    if attempt_for(graphdef) is not None:
        return function(*args)
    call = _FOLLOWED.call or followed_call()
    if call is None:
        raise TraceNeededError
    splitter, given, named = call

    def walked() -> R:
        if splitter.split(given, named).graphdef is not graphdef:
            raise TraceNeededError
        return function(*args)

    return call_in_attempt(_ROOT, walked)


def _forget(
    table: weakref.ref[Table],
    owner: weakref.ref[Plans],
    key: Any,
    dead: weakref.ref[Segment],
) -> None:
    """Drop the plans of a segment.

    This may run while Python exits, when there are no globals any more.
    """
    plans, every = table(), owner()
    found = () if plans is None else plans.get(key, ())
    of_dead = [plan for plan in found if any(part.segment is dead for part in plan.parts)]
    if plans is None or not of_dead:
        return
    plans[key] = tuple([plan for plan in found if plan not in of_dead])
    if not plans[key]:
        del plans[key]
    if every is not None:
        for plan in of_dead:
            every.note_end(plan)
            every.drop_followers(plan)
