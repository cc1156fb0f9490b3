"""Split objects into a graphdef and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from anabranch import _jax
from anabranch._boundary import boundary
from anabranch.errors import DeletedArrayError, FilterError, bounded, first_few
from anabranch.graph._classify import is_object
from anabranch.graph._filters import (
    Filter,
    Predicate,
    depends_on_path,
    first_match,
    to_predicates,
)
from anabranch.graph._flatten import Flat, flatten
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaf_info import DeferredInfos, path_text
from anabranch.graph._state import State, state_of


@boundary("split")
def split(node: Any, *filters: Filter) -> tuple[Any, ...]:
    """Split an object into its static structure and its arrays.

    Arguments:
        node: a node, or any container of nodes and arrays.
        filters: one State is returned for each; the first that matches takes a leaf. Together
            they must match every leaf (`...` takes the rest). Without filters: one State.

    Returns:
        `(graphdef, state, *more_states)`. States are snapshots.

    Raises:
        NodeTypeError: something is neither an array, a node, a value nor a static.
        FilterError: a filter is invalid, or no filter matches a leaf.

    >>> import anabranch as ab
    >>> graphdef, params, rest = ab.split([ab.Param(1.0), ab.BatchStat(0.0)], ab.Param, ...)
    >>> params.paths, rest.paths
    (((0,),), ((1,),))
    """
    flat = flatten(node)
    return (flat.graphdef, *states(flat, filters or (...,), exhaustive=True))


@overload
def state(node: Any, only: Filter = ..., /) -> State: ...
@overload
def state(node: Any, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
@boundary("state")
def state(node: Any, *filters: Filter) -> State | tuple[State, ...]:
    """Return the arrays of an object, all or those that filters match.

    Arguments:
        node: a node, or any container of nodes and arrays.
        filters: one State is returned for each; leaves that none matches are left out.

    Returns:
        One State, or a tuple of them if there are several filters.

    Raises:
        FilterError: a filter is invalid.

    >>> import anabranch as ab
    >>> ab.state([ab.Param(1.0), ab.BatchStat(0.0)], ab.BatchStat).flat()
    {(1,): 0.0}
    """
    found = states(flatten(node), filters or (...,), exhaustive=False)
    return found[0] if len(found) == 1 else found


@boundary("graphdef")
def graphdef(node: Any) -> GraphDef:
    """Return the static structure of an object.

    >>> import anabranch as ab
    >>> ab.graphdef(ab.Param(1.0)) == ab.graphdef(ab.Param(2.0))
    True
    """
    return flatten(node).graphdef


def as_state(given: Any) -> State:
    """Return what is given for a State: one, that of another library, or nested dicts of arrays."""
    if isinstance(given, State):
        return given
    if isinstance(given, Mapping) and is_object(given):
        return states(flatten(given), (...,), exhaustive=False)[0]
    return State.from_dict(given)


def states(flat: Flat, filters: tuple[Filter, ...], *, exhaustive: bool) -> tuple[State, ...]:
    """Distribute the leaves of a flattened object over filters."""
    leaves = snapshots(flat.leaves)
    if filters == (...,):
        return (state_of(DeferredInfos(flat.graphdef), leaves),)
    predicates = to_predicates(filters)
    groups: list[list[int]] = [[] for _ in filters]
    unmatched: list[int] = []
    groups.append(unmatched)
    for i, match in enumerate(_matches(flat, predicates)):
        groups[match].append(i)
    if exhaustive and unmatched:
        infos = flat.graphdef.infos
        rows = [f"{path_text(infos[i].path)} of kind {infos[i].kind_text}" for i in unmatched]
        raise FilterError(
            bounded(
                f"no filter matches these leaves:\n{first_few(rows)}\n"
                "add `...` as the last filter to take the rest"
            )
        )
    return tuple([_part(flat.graphdef, tuple(g), leaves) for g in groups[:-1]])


def _part(graphdef: GraphDef, numbers: tuple[int, ...], leaves: tuple[Any, ...]) -> State:
    return state_of(DeferredInfos(graphdef, numbers), tuple([leaves[i] for i in numbers]))


def _matches(flat: Flat, predicates: tuple[Predicate, ...]) -> Iterator[int]:
    """Yield for each leaf which predicate matches first, -1 if none does."""
    if any(map(depends_on_path, predicates)):
        for i, info in enumerate(flat.graphdef.infos):
            match = first_match(predicates, info.path, flat.owner(i))
            yield -1 if match is None else match
        return
    known: dict[Any, int] = {}  # what is alike is asked once
    for leaf, (variable, alike) in zip(flat.leaves, flat.graphdef.variables, strict=True):
        key = type(leaf) if alike is None else alike
        match = known.get(key)
        if match is None:
            found = first_match(predicates, (), leaf if alike is None else flat.objects[variable])
            match = known[key] = -1 if found is None else found
        yield match


_CONCRETE: set[type] = set()
"""The classes of jax arrays: `isinstance` with `jax.Array` is slow."""


def snapshots(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return leaves that later writes cannot change; see `snapshot`."""
    every = set(map(type, leaves))
    types = every - _CONCRETE
    for x in leaves if types else ():
        if type(x) in types and isinstance(x, jax.Array) and not _jax.is_tracer(x):
            _CONCRETE.add(type(x))
            types.discard(type(x))
    if types:
        changeable = True
    elif len(every) == 1:
        changeable = any(map(every.pop().is_deleted, leaves))  # in C
    else:
        changeable = any([leaf.is_deleted() for leaf in leaves])  # noqa: C419 - this is faster
    return tuple([snapshot(leaf) for leaf in leaves] if changeable else leaves)


def snapshot(leaf: Any) -> Any:
    """Return a leaf that later writes cannot change: numpy arrays are copied.

    Raises:
        DeletedArrayError: the array was donated to a compiled call.
    """
    if isinstance(leaf, jax.Array) and not _jax.is_tracer(leaf) and leaf.is_deleted():
        raise DeletedArrayError(
            f"an array ({leaf.dtype}, shape {leaf.shape}) was deleted: its buffer was donated to "
            "a compiled call after the State was taken; take the State afterwards, or copy it "
            "first with `jax.tree.map(jnp.copy, state)`"
        )
    return leaf.copy() if type(leaf) is np.ndarray else leaf
