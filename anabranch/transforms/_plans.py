"""The plans of one function: found by what is read of a call, followed, left by a walk."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch import _jax
from anabranch.graph import _tokens
from anabranch.graph._flatten import Flat
from anabranch.graph._scope import OPEN as _SCOPES
from anabranch.transforms._box import Report
from anabranch.transforms._call import Selection, flatten_call, with_static
from anabranch.transforms._plan import AGAIN, Plan, Stamps, TraceNeededError, make_plan
from anabranch.transforms._segment import Segment, give
from anabranch.transforms._spine import SpineReader, Unplannable

_current_trace, _ROOT, _LEVELS = _jax.current_trace, _jax.root_trace(), _tokens._OPEN


class Plans:
    """The plans of one compiled function.

    Arguments:
        function: of the user.
        static: which arguments are static.
    """

    __slots__ = ("__weakref__", "_function", "_reader", "_static", "_table")

    def __init__(self, function: Any, static: Selection) -> None:
        self._function, self._static = function, static
        self._reader = SpineReader(function, static)
        self._table: dict[Any, Plan] = {}

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call by its plan, or return `AGAIN` with nothing done."""
        if _current_trace() is not _ROOT or _LEVELS or _SCOPES:
            return AGAIN
        spine = self._reader.read(args, kwargs)
        plan = None if spine is None else self._table.get(spine.key)
        if spine is None or plan is None:
            return AGAIN
        found = plan.read(spine)
        if found is None:
            return AGAIN
        leaves, segments = found
        try:
            report, groups = plan.function(*leaves)
        except TraceNeededError:
            return AGAIN
        except Exception:
            if self._is_out_of_date(plan, leaves, args, kwargs):
                return AGAIN
            raise
        return plan.finish(spine, segments, leaves, report, groups)

    def _is_out_of_date(
        self, plan: Plan, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Tell whether a walk finds something else than what a plan expected."""
        try:
            flat = flatten_call(self._function, *with_static(self._static, args, kwargs))
        except Exception:  # whatever it is, the walk says it
            return True
        same = len(leaves) == len(flat.leaves) and all(map(_is, leaves, flat.leaves))
        return not same or flat.graphdef is not plan.graphdef

    def finish(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        flat: Flat,
        stamps: Stamps,
        function: Any,
        report: Report,
        groups: Sequence[Sequence[Any]],
    ) -> Any:
        """Finish a call that was walked, and leave a plan; or return `AGAIN` with nothing done.

        Arguments:
            args: of the call.
            kwargs: of the call.
            flat: what the walk found.
            stamps: read before the walk.
            function: the compiled function.
            report: what it did.
            groups: what it returned.
        """
        if _current_trace() is not _ROOT or _LEVELS or _SCOPES:
            return AGAIN
        spine = self._reader.read(args, kwargs)
        if spine is None:
            return AGAIN
        try:
            plan, segments = make_plan(spine, flat, stamps, function, report)
        except Unplannable:
            return AGAIN
        forget = functools.partial(_forget, weakref.ref(self), spine.key)
        plan.watch(segments, forget)
        for part, segment in zip(plan.parts, segments, strict=True):
            give(spine.roots[part.root], plan, segment)
        self._table[spine.key] = plan
        return plan.finish(spine, segments, flat.leaves, report, groups)

    def clear(self) -> None:
        """Drop all plans."""
        self._table.clear()


def _is(a: Any, b: Any) -> bool:
    return a is b


def _forget(plans: weakref.ref[Plans], key: Any, dead: weakref.ref[Segment]) -> None:
    table: dict[Any, Plan] = getattr(plans(), "_table", {})
    plan = table.get(key)
    if plan is not None and any(part.segment is dead for part in plan.parts):
        table.pop(key, None)
