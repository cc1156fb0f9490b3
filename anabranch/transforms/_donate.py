"""Donation: only what is written is donated, whatever was asked.

Which arrays a function writes is known after its trace only, so the function is staged: traced
once, then the same trace is compiled with its leaves divided into donated and kept ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.errors import FilterError
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
        self._options = dict(compiled.options)
        self._staged = jax.jit(compiled.run, inline=True)
        self._asked = asked
        self._is_cell = _held_by_objects(flat)
        self._compiled: dict[Any, tuple[frozenset[int], Any]] = {}

    def __call__(self, *leaves: Any) -> Any:
        donated, function = self._divide(leaves)
        return function(*_split(_unshared(leaves, donated), donated))

    def trace(self, *leaves: Any) -> Any:
        """Trace for these leaves; the stages that follow are called with all leaves, too."""
        donated, function = self._divide(leaves)
        return _DonatedStage(function.trace(*_split(leaves, donated)), donated)

    def eval_shape(self, *leaves: Any) -> Any:
        """Return the shapes of what comes out."""
        return self._staged.eval_shape(*leaves)

    def _divide(self, leaves: Sequence[Any]) -> tuple[frozenset[int], Any]:
        """Return the positions to donate and the function compiled for them."""
        key = tuple([jax.typeof(leaf) for leaf in leaves])
        found = self._compiled.get(key)
        if found is None:
            report, _ = self._staged.eval_shape(*leaves)
            donated = self._asked & self._written(report)
            found = self._compiled[key] = (donated, self._compile(donated, len(leaves)))
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
            options["in_shardings"] = _split(options["in_shardings"], donated)
        return jax.jit(run, donate_argnums=0, **options)


class _DonatedStage:
    """A stage of compilation that divides the leaves when it is called."""

    def __init__(self, stage: Any, donated: frozenset[int]) -> None:
        self._stage, self._donated = stage, donated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, **options: Any) -> _DonatedStage:
        return _DonatedStage(self._stage.lower(**options), self._donated)

    def compile(self, **options: Any) -> _DonatedStage:
        return _DonatedStage(self._stage.compile(**options), self._donated)

    def __call__(self, *leaves: Any) -> Any:
        return self._stage(*_split(_unshared(leaves, self._donated), self._donated))


def _split(leaves: Sequence[Any], donated: frozenset[int]) -> tuple[tuple[Any, ...], ...]:
    given = tuple([x for i, x in enumerate(leaves) if i in donated])
    return given, tuple([x for i, x in enumerate(leaves) if i not in donated])


def _unshared(leaves: Sequence[Any], donated: frozenset[int]) -> Sequence[Any]:
    """Copy an array that is donated and passed elsewhere too: JAX takes a buffer only once."""
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
