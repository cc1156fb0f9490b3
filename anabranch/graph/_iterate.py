"""Look around in a graph of objects."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from anabranch._boundary import boundary
from anabranch.graph import _classify
from anabranch.graph._classify import LEAF, REF
from anabranch.graph._flatten import flatten
from anabranch.graph._graphdef import Path, Paths, Visit


def iter_nodes(node: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every node once, with the first path to it: depth first, a node before its children.

    Nodes are Variables, Modules, lists, dicts and the other mutable objects; tuples and other
    immutable values are walked through.

    >>> import anabranch as ab
    >>> [path for path, _ in ab.iter_nodes({"a": [ab.Param(1.0)]})]
    [(), ('a',), ('a', 0)]
    """
    flat = flatten(node)
    paths = Paths()
    for visit in flat.graphdef.visit():
        edge = visit.edge
        if type(edge) is not int or edge < 0 or not visit.first:
            continue
        if flat.graphdef.entries[edge].kind.identity:
            yield paths.of(visit.link), flat.objects[edge]


def iter_children(node: Any) -> Iterator[tuple[Hashable, Any]]:
    """Yield key and node for every node that an object holds directly.

    >>> import anabranch as ab
    >>> [key for key, _ in ab.iter_children({"a": [ab.Param(1.0)], "n": 1})]
    ['a']
    """
    flat = flatten(node)
    root = flat.graphdef.root
    if type(root) is not int or root < 0:
        return
    for visit in flat.graphdef.children(root, None, -1):
        edge = visit.edge
        if type(edge) is int and edge >= 0 and flat.graphdef.entries[edge].kind.identity:
            yield visit.path[-1] if visit.path else (), flat.objects[edge]


@boundary("find_aliases")
def find_aliases(node: Any) -> list[list[Path]]:
    """Return the paths to every node that is reached in more than one way.

    Each node that several places hold contributes one list: a path for each of these places. What
    lies below a shared node is not listed again, so that the result is finite with cycles.

    A `jax.Ref` is listed like a node, and so is an array, unless it is the value of a Variable. An
    array has no identity for a transform: if one place is written, the other keeps the old one.

    >>> import anabranch as ab
    >>> v = ab.Param(1.0)
    >>> ab.find_aliases({"a": v, "b": [v]})
    [[('a',), ('b', 0)]]
    """
    flat = flatten(node)
    leaves, entries = flat.leaves, flat.graphdef.entries
    visits: dict[int, list[Visit]] = {}
    for visit in flat.graphdef.visit():
        edge = visit.edge
        if type(edge) is not int:
            continue
        if edge >= 0 and entries[edge].kind.identity:
            visits.setdefault(edge, []).append(visit)
        elif edge < 0:
            rule = _classify.rule_of(leaves[~edge])
            if rule is REF or (rule is LEAF and visit.variable < 0):
                visits.setdefault(~id(leaves[~edge]), []).append(visit)
    return [[visit.path for visit in found] for found in visits.values() if len(found) > 1]
