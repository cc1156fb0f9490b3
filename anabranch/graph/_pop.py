"""Take Variables out of an object."""

from __future__ import annotations

from typing import Any

from anabranch._boundary import boundary
from anabranch.errors import FilterError, UpdateError
from anabranch.graph._delta import Write, commit
from anabranch.graph._filters import Filter, first_match, to_predicates
from anabranch.graph._flatten import Flat, flatten, namer
from anabranch.graph._leaf_info import LeafInfos
from anabranch.graph._state import State


@boundary("pop")
def pop(node: Any, *filters: Filter) -> State | tuple[State, ...]:
    """Remove the Variables that filters match, at every path that leads to them.

    Arguments:
        node: a node.
        filters: at least one; the first that matches takes a Variable (or plain array).

    Returns:
        One State for each filter: a State, or a tuple of them.

    Raises:
        FilterError: no filter is given, or one is invalid.
        UpdateError: something to be removed is held by an immutable value; nothing is removed.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(1.0), "seen": ab.Intermediate(2.0)}
    >>> ab.pop(model, ab.Intermediate).flat(), list(model)
    ({('seen',): 2.0}, ['w'])
    """
    if not filters:
        raise FilterError("pop needs at least one filter, for example `pop(model, Intermediate)`")
    predicates = to_predicates(filters)
    flat = flatten(node)
    groups: list[list[int]] = [[] for _ in filters]
    doomed: set[int] = set()  # edges: Variables by index, plain arrays by ~leaf
    for i, (info, owner) in enumerate(zip(flat.graphdef.infos, flat.graphdef.owners, strict=True)):
        match = first_match(predicates, info.path, flat.owner(i))
        if match is not None:
            groups[match].append(i)
            doomed.add(owner if owner >= 0 else ~i)
    commit([*_removals(flat, doomed)])
    infos = flat.graphdef.infos
    found = [
        State(LeafInfos([infos[i] for i in g]), tuple([flat.leaves[i] for i in g])) for g in groups
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _removals(flat: Flat, doomed: set[int]) -> list[Write]:
    writes: list[Write] = []
    if flat.graphdef.root in doomed:
        raise UpdateError("the object itself is to be removed; pop takes things out of a node")
    for index, (kind, cls, extra, keys, edges) in enumerate(flat.graphdef.entries):
        if kind.is_variable or doomed.isdisjoint(edges):
            continue
        if not kind.identity:
            raise UpdateError(
                f"{namer(flat.graphdef)(index)}: this {cls.__name__} is immutable, so nothing "
                "can be removed from it: hold the Variable in a list, a dict or a Module"
            )
        kept = [i for i, edge in enumerate(edges) if edge not in doomed]
        new_keys = range(len(kept)) if isinstance(keys, range) else tuple([keys[i] for i in kept])
        values = [flat.contents[index][2][i] for i in kept]
        removed = [key for key, edge in zip(keys, edges, strict=True) if edge in doomed]
        new_extra = kind.extra_without(extra, removed)
        writes.append(Write(flat.objects[index], cls, (new_extra, new_keys, values)))
    return writes
