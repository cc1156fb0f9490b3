"""The follower of a plan: one function that makes calls of one form, written for that form.

A plan that has been followed a few times is written out as the source of a function, in which
nothing is left to ask: which arguments are Modules, which Variables are read, where the output
goes. It is what somebody would write by hand for this one call:

    def follow(args, kwargs):
        (a0, a1) = args
        if id(a0) != 140351 or (s0 := segment0()) is None: return AGAIN
        ...
        x0 = [v._value for v in s0.variables]
        out = function(*x0, a1)
        if len(out) != 1: return finish(...)
        if s0.objects[3]._value is not x0[2]: raise ...
        set_value(s0.objects[3], out[0])
        return None

Every check of a plan is in it, and where one fails it returns `AGAIN`, so that the call is made in
the general way; it follows the simple plans only, which are most.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch import _jax
from anabranch._source import Source
from anabranch.graph import _classify, _scope, _tokens
from anabranch.graph._kinds import Kind
from anabranch.graph._tokens import STRUCTURE
from anabranch.graph._turn import COMMITS
from anabranch.transforms._call import Selection
from anabranch.transforms._ending import FEW, Ending
from anabranch.transforms._lifting import has_found
from anabranch.transforms._plan import AGAIN, Plan
from anabranch.transforms._reading import Reading
from anabranch.transforms._segment import Segment
from anabranch.transforms._spine import Head
from anabranch.transforms._taken import Arguments
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._writer import Writer

FILE = f"<{__name__}>"
"""The file that the frame of a follower says it is in."""


def make_follower(
    plan: Plan,
    segments: Sequence[Segment],
    head: Head | None,
    static: Selection,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    general: Mapping[str, Any],
) -> Any:
    """Return the follower of a plan, or None if it is none of the simple ones.

    Arguments:
        plan: was followed with these arguments.
        segments: of its roots.
        head: what was read of the function; None if that is read in full by every call.
        static: which arguments are static.
        args: of the call.
        kwargs: of the call.
        general: what the general way offers: `failed`, called when the compiled function has
            raised; `finish`, for another report; `splitter`, see `followed_call`.
    """
    known = plan.latest
    if head is None or known is None or known.writer is None:
        return None
    try:
        return _Follower(plan, segments, known.report, known.writer, general).make(
            head, static, args, kwargs
        )
    except Unplannable:
        return None


class _Follower:
    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Segment],
        report: Any,
        writer: Writer,
        general: Mapping[str, Any],
    ) -> None:
        self.plan, self.segments, self.report, self.writer = plan, segments, report, writer
        self.source = source = Source("follow(args, kwargs)", "AGAIN", FILE)
        source.names.update(
            {
                **general,
                "AGAIN": AGAIN,
                "COMMITS": COMMITS,
                "ROOT": _jax.root_trace(),
                "STRUCTURE": STRUCTURE,
                "all": all,
                "current_trace": _jax.current_trace,
                "function": plan.function,
                "is_": operator.is_,
                "map": map,
                "plan": plan,
                "rearm": functools.partial(_rearm, plan, general["splitter"].function),
                "report_then": report,
                "writer": writer,
            }
        )
        self.places: list[str] = []  # where each leaf is
        self.inputs: list[str] = []  # how they are given to the compiled function
        self.outputs: list[str] = []  # what it returns
        self.trees: dict[tuple[int, int], str] = {}  # see `Reading`

    def make(
        self, head: Head, static: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        source = self.source
        cell, attribute = _jax.trace_cell() or (None, "")
        source.names["cell"] = cell
        trace = "current_trace()" if cell is None else f"cell.{attribute}"
        source.unless(f"{trace} is ROOT")
        source.add("ended = COMMITS.ended")
        arguments = Arguments(source, self._shared())
        start = len(source.lines)
        self._take_function(arguments, head)
        self._take_arguments(arguments, static, args, kwargs)
        self._guard(arguments)
        self._read(arguments)
        source.guard(start)
        self._call()
        Ending(self, arguments).add()
        return source.compile()

    def _shared(self) -> dict[int, str]:
        """Return expressions for the arguments that hang on a Module, by id."""
        sharing = self.plan.sharing
        return {
            id(self.segments[number].objects[index]): f"s{number}.objects[{index}]"
            for _, number, index in (() if sharing is None else sharing.attached)
        }

    def _take_function(self, arguments: Arguments, head: Head) -> None:
        """Compare what the function captures; objects are found by weak references."""
        places = arguments.compare_captures(head.watch) if head.watch else {}
        now = head.watch.read() if head.watch else ()
        if now is None:
            raise Unplannable
        names: list[str] = []
        end = 0  # the nodes before are below one that is shared
        for k, node in enumerate(head.nodes):
            if not isinstance(node, int):
                name, obj = self._find(node), node()
            elif node in places:
                name, obj = places[node], now[node]
            else:
                raise Unplannable
            names.append(name)
            if k < end:
                continue
            if arguments.is_shared(name, obj):
                end = head.spans[k][2]
                if any(k <= i < end for i, _, _ in head.variables):
                    raise Unplannable
            else:
                arguments.add_node(name)
        variables = iter(head.variables)
        for root, start in zip(head.roots, head.starts, strict=True):
            while len(arguments.leaves) < start:
                node, *known = next(variables)
                arguments.take_captured(names[node], *known)
            arguments.add_root(self._find(root))
        for node, *known in variables:
            arguments.take_captured(names[node], *known)

    def _find(self, reference: weakref.ref[Any]) -> str:
        name = self.source.fresh()
        self.source.add(f"{name} = {self.source.constant(reference)}()")
        self.source.unless(f"{name} is not None")
        return name

    def _take_arguments(
        self,
        arguments: Arguments,
        static: Selection,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        source = self.source
        chosen = static.of_args(args) if static.nums else ()
        source.unless(f"[*kwargs] == {source.constant([*kwargs])}" if kwargs else "not kwargs")
        names = [source.fresh() for _ in args]
        source.add(f"[{', '.join(names)}] = args")  # fails if there are more or less
        for i, (name, x) in enumerate(zip(names, args, strict=True)):
            if i == 0 and i not in chosen and quick_key(args):
                arguments.add_root(name)  # the follower was found by it
            else:
                (arguments.take_static if i in chosen else arguments.take)(name, x)
        if kwargs:
            names = [source.fresh() for _ in kwargs]
            source.add(f"{', '.join(names)}, = kwargs.values()")
            for name, (key, x) in zip(names, kwargs.items(), strict=True):
                (arguments.take_static if key in static.names else arguments.take)(name, x)

    def _guard(self, arguments: Arguments) -> None:
        source = self.source
        names: list[str] = []
        for i, part in enumerate(self.plan.parts):
            source.names[f"segment{i}"] = part.segment
            source.add(f"s{i} = segment{i}()")
            source.unless(f"s{i} is not None and s{i}.fresh")
            names.append(f"s{i}")
        arguments.check_shared(self.plan.sharing)
        comma = "," if names else ""
        source.unless(
            f"STRUCTURE.unwatched is plan.unwatched or rearm(({', '.join(names)}{comma}))"
        )

    def _read(self, arguments: Arguments) -> None:
        """Read the leaves, in the order of the walk."""
        source, at = self.source, 0
        for i, (part, segment) in enumerate(zip(self.plan.parts, self.segments, strict=True)):
            self._take_leaves(arguments, arguments.leaves[at : part.start])
            at = part.start
            reading = Reading(source, i, segment, arguments.roots[part.root], arguments)
            self._take_leaves(arguments, reading.add())
            self.trees.update(reading.trees)
        self._take_leaves(arguments, arguments.leaves[at:])
        if self.plan.order is not None:
            self.places = [self.places[i] for i in self.plan.order]
            self.inputs = arguments.inputs(self.places)
        arguments.check_all()
        others = [f"s{i}.ids" for i in range(len(self.segments))]
        constants = self.plan.constants
        arguments.check_nodes([*others, source.constant(constants)] if constants else others)
        source.unless("COMMITS.begun is ended")  # else it may be half of what another thread writes

    def _take_leaves(self, arguments: Arguments, names: Sequence[str]) -> None:
        self.places += names
        self.inputs += arguments.inputs(names)

    def _call(self) -> None:
        source, inputs, reports = self.source, ", ".join(self.inputs), self.plan.reports
        found = f"function({inputs})"
        if reports.groups > 1:
            source.names["outputs_of"] = reports.outputs
            found = f"outputs_of({found})"
        length, count = reports.lengths(self.report)
        for line, depth in (
            ("try:", 1),
            (f"out = {found}", 2),
            ("except (TraceNeededError, Found):", 1),
            ("return AGAIN", 2),
            ("except Exception:", 1),
            (f"if failed(plan, [{inputs}], args, kwargs) is None: return AGAIN", 2),
            ("raise", 2),
        ):
            source.add(line, depth)
        other = f"return finish(plan, [{inputs}], args, kwargs, out)"  # another report
        if length <= FEW:
            self.outputs = [f"o{i}" for i in range(length)]
            source.add(f"try: [{', '.join(self.outputs)}] = out")
            source.add(f"except ValueError: {other}")
        else:
            self.outputs = [f"out[{i}]" for i in range(length)]
            source.add(f"if len(out) != {length}: {other}")
        if count < length:
            source.add(f"del out[{count}:]")


def _rearm(plan: Plan, function: Any, segments: Sequence[Segment]) -> bool:
    """Tell whether what nobody watches concerns the calls of a plan."""
    unwatched = STRUCTURE.unwatched  # before all else: what comes later is noticed again
    if _tokens.OPEN_LEVELS or _scope.OPEN or has_found(function):
        return False
    return plan.rearm(segments, unwatched)


def followed_call() -> tuple[Any, Any, Any] | None:
    """Return the splitter and the arguments of the call that a follower is making, if one is.

    It is read off the stack when JAX traces, which is rare, so that calls need not note it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == FILE:
            return frame.f_globals["splitter"], frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return None


def quick_key(args: Sequence[Any]) -> int:
    """Return what followers are looked up by: Modules tell calls apart, if they come first."""
    rule = _classify.RULES.get(type(args[0])) if args else None
    return id(args[0]) if isinstance(rule, Kind) and rule.is_root else 0
