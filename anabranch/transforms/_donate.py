"""Donation: only what is written is donated, whatever was asked.

Which arrays a function writes is known after its trace only, so the function is staged: traced
once, then the same trace is compiled with its leaves divided into donated and kept ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch import _jax
from anabranch.errors import FilterError
from anabranch.graph._build import picker
from anabranch.graph._filters import to_predicate
from anabranch.graph._flatten import Flat
from anabranch.transforms._box import Report
from anabranch.transforms._call import Selection


class Asked:
    """What the user wants to be donated.

    Arguments:
        function: of the user.
        options: of `jit`; those about donation are taken out.
    """

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        numbers, names = options.pop("donate_argnums", None), options.pop("donate_argnames", None)
        self._selected = Selection(function, numbers, names)
        donate = options.pop("donate", None)
        self._written = isinstance(donate, str) and donate == "written"
        self._matches = None if donate is None or self._written else to_predicate(donate)

    def __bool__(self) -> bool:
        return bool(self._selected or self._written or self._matches is not None)

    def leaves(self, flat: Flat, args: Sequence[Any]) -> frozenset[int]:
        """Return the leaves that may be donated, if the function writes them.

        Raises:
            FilterError: a filter matches nothing.
        """
        asked = _leaves_of(flat, self._selected, args)
        held = [i for i, holder in enumerate(_held_by_objects(flat)) if holder >= 0]
        if self._written:
            return asked.union(held)
        if self._matches is None:
            return asked
        infos = flat.graphdef.infos
        found = [i for i in held if self._matches(infos[i].path[2:], flat.owner(i))]
        if not found:
            kinds = sorted({infos[i].kind_text for i in held})
            raise FilterError(
                "the filter that was given as `donate` matches no array of an object among the "
                f"arguments. The kinds that are there: {', '.join(kinds) or 'none'}"
            )
        return asked.union(found)


class Donation:
    """A compiled function that donates; called with all leaves, like the one it wraps.

    Arguments:
        compiled: the compiled function.
        flat: a call.
        asked: the leaves that may be donated.
    """

    def __init__(self, compiled: Any, flat: Flat, asked: frozenset[int]) -> None:
        self._options, self._reports = dict(compiled.options), compiled.reports
        self._staged = jax.jit(compiled.run, inline=True)
        self._asked = asked
        self._is_cell = _held_by_objects(flat)
        self._divisions: dict[Any, _Division] = {}
        self._latest: _Division | None = None

    def __call__(self, *leaves: Any) -> Any:
        division = self._divide(leaves)
        return division.function(*division.split(leaves))

    def trace(self, *leaves: Any) -> Any:
        """Trace for these leaves; the stages that follow are called with all leaves, too."""
        division = self._divide(leaves)
        traced = division.function.trace(division.given(leaves), division.kept(leaves))
        return _DonatedStage(traced, division)

    def eval_shape(self, *leaves: Any) -> Any:
        """Return the shapes of what comes out."""
        return self._staged.eval_shape(*leaves)

    def _divide(self, leaves: Sequence[Any]) -> _Division:
        """Return how the leaves are divided, and the function that is compiled for that."""
        types, found = _jax.types_of(leaves), self._latest
        if found is None or found.types != types:  # most often they are those of the last call
            found = self._divisions.get(tuple(types))
            if found is None:
                outputs = self._reports.outputs(self._staged.eval_shape(*leaves))
                donated = self._asked & self._written(self._reports.read(outputs))
                function = self._compile(donated, len(leaves))
                found = self._divisions[tuple(types)] = _Division(types, donated, function)
            self._latest = found
        return found

    def _written(self, report: Report) -> frozenset[int]:
        """Return the leaves that nobody needs after the call.

        Those are the old values of cells that are written, and plain arguments, unless the array
        is passed on as it is.
        """
        forwarded = {source for source in report.sources if source >= 0}
        changed = {index for index, _ in report.delta.changed}
        return frozenset(
            [
                leaf
                for leaf, owner in enumerate(self._is_cell)
                if leaf not in forwarded and (owner < 0 or owner in changed)
            ]
        )

    def _compile(self, donated: frozenset[int], count: int) -> Any:
        staged = self._staged

        def run(given: Any, kept: Any) -> Any:
            given, kept = iter(given), iter(kept)
            return staged(*[next(given if i in donated else kept) for i in range(count)])

        options = dict(self._options)
        if "in_shardings" in options:
            given, kept = _pickers(donated, count)
            shardings = options["in_shardings"]
            options["in_shardings"] = given(shardings), kept(shardings)
        return jax.jit(run, donate_argnums=0, **options)


class _Division:
    """Which leaves are donated in calls with leaves of some types.

    Arguments:
        types: of the leaves.
        donated: their positions.
        function: of those that are donated, and the others.
    """

    def __init__(self, types: list[Any], donated: frozenset[int], function: Any) -> None:
        self.types, self.function = types, function
        self.given, self.kept = _pickers(donated, len(types))
        self._donated = donated

    def split(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Return what is donated, and the others; JAX takes a buffer only once."""
        if len({*map(id, leaves)}) < len(leaves):
            leaves = _unshared(leaves, self._donated)
        return self.given(leaves), self.kept(leaves)


class _DonatedStage:
    """A stage of compilation that divides the leaves when it is called."""

    def __init__(self, stage: Any, division: _Division) -> None:
        self._stage, self._division = stage, division

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **options: Any) -> _DonatedStage:
        return _DonatedStage(self._stage.lower(**options), self._division)

    def compile(self, **options: Any) -> _DonatedStage:
        return _DonatedStage(self._stage.compile(**options), self._division)

    def __call__(self, *leaves: Any) -> Any:
        return self._stage(*self._division.split(leaves))


def _pickers(donated: frozenset[int], count: int) -> tuple[Any, Any]:
    """Return what picks the leaves that are donated, and the others, as tuples."""
    return picker(sorted(donated)), picker([i for i in range(count) if i not in donated])


def _unshared(leaves: Sequence[Any], donated: frozenset[int]) -> Sequence[Any]:
    """Copy arrays that are donated and passed elsewhere, too."""
    seen = {id(x) for i, x in enumerate(leaves) if i not in donated}
    leaves = list(leaves)
    for i in sorted(donated):
        if id(leaves[i]) in seen:
            leaves[i] = jnp.copy(leaves[i])
        seen.add(id(leaves[i]))
    return leaves


def _held_by_objects(flat: Flat) -> list[int]:
    """Return for each leaf the index of the node that holds it.

    It is -1 for an array that is an argument itself, or that containers hold which belong to no
    object: such arrays are donated as the caller asked.
    """
    entries = flat.graphdef.entries
    objects = [i for i, entry in enumerate(entries) if entry.kind.is_object]
    owned = _reach(flat, objects)[0]
    holders = [-1] * len(flat.leaves)
    for index, entry in enumerate(entries):
        if index in owned:
            for edge in entry.edges:
                if type(edge) is int and edge < 0:
                    holders[~edge] = index
    return holders


def _reach(flat: Flat, edges: list[Any]) -> tuple[set[int], set[int]]:
    """Return the entries and the leaves that edges lead to."""
    entries, pending = flat.graphdef.entries, list(edges)
    seen: set[int] = set()
    leaves: set[int] = set()
    while pending:
        edge = pending.pop()
        if type(edge) is int and edge < 0:
            leaves.add(~edge)
        elif type(edge) is int and edge not in seen:
            seen.add(edge)
            pending += entries[edge].edges
    return seen, leaves


def _leaves_of(flat: Flat, selected: Selection, args: Sequence[Any]) -> frozenset[int]:
    """Return the leaves that the chosen arguments reach."""
    entries = flat.graphdef.entries
    call: Any = flat.graphdef.root
    _, args_edge, kwargs_edge = entries[call].edges
    args_entry, kwargs_entry = entries[args_edge], entries[kwargs_edge]
    chosen = [args_entry.edges[i] for i in selected.of_args(args)]
    named = zip(kwargs_entry.keys, kwargs_entry.edges, strict=True)
    return frozenset(_reach(flat, chosen + [e for k, e in named if k in selected.names])[1])
