"""Make new graphs of objects from old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from anabranch._boundary import boundary
from anabranch.errors import ArgumentError
from anabranch.graph._build import build
from anabranch.graph._flatten import flatten
from anabranch.graph._graphdef import Path, Paths
from anabranch.graph._split import snapshot

T = TypeVar("T")


def _check(name: str, function: Any) -> None:
    if not callable(function):
        raise ArgumentError(
            f"{name} takes a function, then an object; found a {type(function).__name__} first"
        )


@boundary("map_leaves")
def map_leaves(function: Callable[[Any], Any], node: T) -> T:
    """Return a copy of an object with a function applied to each of its arrays.

    Arguments:
        function: from an array to an array; called once for each leaf.
        node: a node, or any container of nodes and arrays; it is not changed.

    >>> import anabranch as ab
    >>> ab.map_leaves(lambda x: x * 2, ab.Param(1.5)).value
    3.0
    """
    _check("map_leaves", function)
    flat = flatten(node)
    leaves = [function(snapshot(leaf)) for leaf in flat.leaves]
    return build(flat.graphdef, leaves).resolve(flat.graphdef.root)


@boundary("recursive_map")
def recursive_map(function: Callable[[Path, Any], Any], node: Any) -> Any:
    """Return a copy of an object with a function applied to each of its nodes, children first.

    Arguments:
        function: called as `function(path, node)` once for each node, with a copy of it whose
            children have been replaced already; it returns the node or a replacement. Where
            nodes refer to each other in a cycle, the one that closes it is not yet replaced.
        node: a node, or any container of nodes; it is not changed.

    >>> import anabranch as ab
    >>> def freeze(path, x):
    ...     return ab.BatchStat(x.value) if isinstance(x, ab.Param) else x
    >>> ab.recursive_map(freeze, [ab.Param(1.0)])
    [BatchStat(1.0)]
    """
    _check("recursive_map", function)
    flat = flatten(node)
    graphdef = flat.graphdef
    built = build(graphdef, [*map(snapshot, flat.leaves)])
    replaced: list[Any] = list(built.objects)

    def resolve(edge: Any) -> Any:
        return replaced[edge] if type(edge) is int and edge >= 0 else built.resolve(edge)

    paths = Paths()
    for visit in graphdef.postorder():
        index: Any = visit.edge
        kind, cls, extra, keys, edges = graphdef.entries[index]
        values = [resolve(edge) for edge in edges]
        if not kind.identity:
            replaced[index] = kind.build(cls, extra, keys, values)
            continue
        kind.fill(built.objects[index], extra, keys, values)
        replaced[index] = function(paths.of(visit.link), built.objects[index])
    return resolve(graphdef.root)
