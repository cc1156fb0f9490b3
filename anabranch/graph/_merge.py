"""Merge a graphdef and states into new objects."""

from __future__ import annotations

from typing import Any, TypeVar

from anabranch._boundary import boundary
from anabranch.errors import ArgumentError, UpdateError, bounded, first_few
from anabranch.graph._build import build
from anabranch.graph._flatten import flatten
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaf_info import path_text
from anabranch.graph._split import as_state, snapshots
from anabranch.graph._state import State

T = TypeVar("T")


@boundary("merge")
def merge(graphdef: GraphDef, state: Any, *more: Any) -> Any:
    """Make objects of a graphdef and states: new identities, same structure, values and aliases.

    Arguments:
        graphdef: from `split`.
        state: a State, of flax too, or a nested dict of arrays.
        more: further States; together they must have exactly the leaves of the graphdef.

    Returns:
        The object that was split, made anew. Two merges share only immutable arrays.

    Raises:
        TypeError: the graphdef is none.
        UpdateError: a leaf is missing, given twice, or unknown to the graphdef.

    >>> import anabranch as ab
    >>> shared = ab.Param(1.0)
    >>> twin = ab.merge(*ab.split([shared, shared]))
    >>> twin[0] is twin[1], twin[0] is shared
    (True, False)
    """
    if not isinstance(graphdef, GraphDef):
        cls: type[Any] = type(graphdef)
        raise ArgumentError(
            "merge takes a graphdef and then states, as `split` returns them, not a "
            f"{cls.__qualname__} of {cls.__module__} first"
        )
    if graphdef.base or graphdef.origin is not None:
        raise UpdateError(
            "this graphdef was made in a split context and refers to its objects: merge it "
            "with the `merge` of a `merge_context`"
        )
    leaves = snapshots(leaves_of(graphdef, (state, *more)))
    built = build(graphdef, leaves)
    return built.resolve(graphdef.root)


@boundary("clone")
def clone(node: T) -> T:
    """Return a copy of an object and all that it reaches: `merge(*split(node))`.

    Arrays are shared (they are immutable), numpy arrays are copied.

    >>> import anabranch as ab
    >>> v = ab.Param(1.0)
    >>> w = ab.clone(v)
    >>> w.value = 2.0
    >>> v.value
    1.0
    """
    flat = flatten(node)
    built = build(flat.graphdef, snapshots(flat.leaves))
    return built.resolve(flat.graphdef.root)


def leaves_of(graphdef: GraphDef, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the leaves of states in the order of a graphdef."""
    known = _by_number(graphdef, states)
    if known is not None:
        return known
    infos = graphdef.infos
    given: dict[Any, Any] = {}
    twice: list[str] = []
    for state in states:
        for path, leaf in as_state(state).flat().items():
            if path in given:
                twice.append(f"{path_text(path)} is given twice")
            given[path] = leaf
    paths = [info.path for info in infos]
    missing = [f"{path_text(path)} is missing" for path in paths if path not in given]
    if len(given) > len(paths) - len(missing):
        known = set(paths)
        twice += [f"{path_text(p)} is unknown to the graphdef" for p in given if p not in known]
    if twice or missing:
        raise UpdateError(
            bounded(f"the states do not fit the graphdef:\n{first_few(twice + missing)}")
        )
    return tuple([given[path] for path in paths])


def _by_number(graphdef: GraphDef, states: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Do the same without paths, if all of the states are of this very graphdef."""
    found: list[Any] = [_MISSING] * graphdef.num_leaves
    for state in states:
        numbers = state.numbers_in(graphdef) if isinstance(state, State) else None
        if numbers is None:
            return None
        if isinstance(numbers, range) and len(states) == 1:
            return state.leaves
        for number, leaf in zip(numbers, state.leaves, strict=True):
            if found[number] is not _MISSING:
                return None
            found[number] = leaf
    return None if any([x is _MISSING for x in found]) else tuple(found)  # noqa: C419


_MISSING = object()
