"""Compare two graphs of objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from anabranch._boundary import boundary
from anabranch.graph import _static
from anabranch.graph._flatten import flatten
from anabranch.graph._graphdef import Entry, GraphDef, Link, Path, link_to, path_of
from anabranch.graph._leaf import are_same, leaf_text

_ABSENT = "<absent>"


class Difference(NamedTuple):
    """One place at which two objects differ; made by `graph.diff`.

    >>> import anabranch as ab
    >>> [difference] = ab.graph.diff([1, 2], [1, 3])
    >>> difference.path, difference.a, difference.b
    ((1,), '2', '3')
    """

    path: Path
    a: str  # what is there in the first one
    b: str


@boundary("equal")
def equal(a: Any, b: Any) -> bool:
    """Tell whether two objects have equal structure, values and aliases.

    Arrays compare by dtype, shape and bits, static values by type and value. Which objects they
    are does not matter: `equal(x, clone(x))` is true.

    >>> import anabranch as ab
    >>> v, w = ab.Param(1.0), ab.Param(1.0)
    >>> ab.equal(v, w), ab.equal([v, v], [v, w])
    (True, False)
    """
    x, y = flatten(a), flatten(b)
    return x.graphdef == y.graphdef and all(map(are_same, x.leaves, y.leaves))


@boundary("diff")
def diff(a: Any, b: Any) -> list[Difference]:
    """Return the places at which two objects differ, first path first.

    >>> import anabranch as ab
    >>> ab.graph.diff({"n": 1, "m": 2}, {"n": 1, "m": 3})
    [Difference(path=('m',), a='2', b='3')]
    """
    x, y = flatten(a), flatten(b)

    def is_same(leaf: int, other: int) -> bool:
        return are_same(x.leaves[leaf], y.leaves[other])

    shows = [functools.partial(_show_leaf, flat.leaves) for flat in (x, y)]
    return [*differences(x.graphdef, y.graphdef, is_same, *shows)]


def differences(
    a: GraphDef,
    b: GraphDef,
    is_same: Callable[[int, int], bool],
    show_a: Callable[[int], str],
    show_b: Callable[[int], str],
) -> Iterator[Difference]:
    """Yield the places at which two graphdefs differ, first path first.

    Arguments:
        a: one.
        b: the other.
        is_same: whether a leaf of the first can be in the place of one of the second.
        show_a: from a leaf of the first to a text.
        show_b: the same for the second.
    """
    pairs: set[tuple[int, int]] = set()
    seen: tuple[set[int], set[int]] = (set(), set())
    pending: list[tuple[Any, Any, Any]] = [(None, a.root, b.root)]
    while pending:
        link, edge, other = pending.pop()
        if not (_is_entry(edge) and _is_entry(other)):
            if not _same_end(edge, other, is_same):
                yield Difference(path_of(link), _show(a, edge, show_a), _show(b, other, show_b))
            continue
        if (edge, other) in pairs:
            continue
        first_visit = edge not in seen[0] and other not in seen[1]
        pairs.add((edge, other))
        seen[0].add(edge)
        seen[1].add(other)
        p, q = a.entry(edge), b.entry(other)
        if not first_visit and p.kind.identity:
            yield Difference(path_of(link), f"alias #{edge}", f"alias #{other}")
        elif p[:2] != q[:2]:
            yield Difference(path_of(link), _show_entry(p), _show_entry(q))
        elif p.extra != q.extra:
            yield Difference(path_of(link), _show_extra(p), _show_extra(q))
        elif p.kind.is_variable:
            pending.append((link, p.edges[0], q.edges[0]))
        elif tuple(p.keys) != tuple(q.keys):
            yield from _different_keys(link, (a, p, show_a), (b, q, show_b))
        else:
            keys = [link_to(link, p.kind.path_key(key)) for key in p.keys]
            pending += reversed([*zip(keys, p.edges, q.edges, strict=True)])


def _different_keys(link: Link | None, one: Any, other: Any) -> Iterator[Difference]:
    """Yield what only one of two entries has; or else the order is another one."""
    (a, p, show_a), (b, q, show_b) = one, other
    in_p, in_q = set(p.keys), set(q.keys)
    for key, edge in zip(p.keys, p.edges, strict=True):
        if key not in in_q:
            path = path_of(link_to(link, p.kind.path_key(key)))
            yield Difference(path, _show(a, edge, show_a), _ABSENT)
    for key, edge in zip(q.keys, q.edges, strict=True):
        if key not in in_p:
            path = path_of(link_to(link, q.kind.path_key(key)))
            yield Difference(path, _ABSENT, _show(b, edge, show_b))
    if in_p == in_q:
        yield Difference(path_of(link), _show_entry(p), _show_entry(q))


def _is_entry(edge: Any) -> bool:
    return type(edge) is int and edge >= 0


def _same_end(edge: Any, other: Any, is_same: Callable[[int, int], bool]) -> bool:
    if type(edge) is int and type(other) is int:
        return edge < 0 and other < 0 and is_same(~edge, ~other)
    return edge == other


def _show(graphdef: GraphDef, edge: Any, show_leaf: Callable[[int], str]) -> str:
    if type(edge) is not int:
        return repr(_static.decode(edge))[:200]
    return show_leaf(~edge) if edge < 0 else _show_entry(graphdef.entry(edge))


def _show_leaf(leaves: Sequence[Any], number: int) -> str:
    leaf = leaves[number]
    small = not hasattr(leaf, "size") or leaf.size <= 4
    return repr(leaf)[:200] if small else leaf_text(leaf)


def _show_extra(entry: Entry) -> str:
    if entry.kind.is_variable:
        metadata = {key: _static.decode(value) for key, value in entry.extra or ()}
        return f"{entry.cls.__name__} with metadata {metadata}"[:300]
    return f"{_show_entry(entry)} with {entry.extra!r}"[:300]


def _show_entry(entry: Any) -> str:
    keys = [entry.kind.path_key(key) for key in entry.keys]
    shown = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
    return f"{entry.cls.__name__}({shown})"[:300]
