"""Compare two graphs of objects."""

from __future__ import annotations

from typing import Any, NamedTuple

from anabranch._boundary import boundary
from anabranch.graph import _static
from anabranch.graph._flatten import Flat, flatten
from anabranch.graph._graphdef import Path, Visit
from anabranch.graph._leaf import are_same, leaf_text


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
    found: list[Difference] = []
    pairs: set[tuple[int, int]] = set()
    seen: tuple[set[int], set[int]] = (set(), set())
    pending: list[tuple[Visit, Any]] = [
        (Visit(None, -1, 0, x.graphdef.root, True, -1), y.graphdef.root)
    ]
    while pending:
        visit, other = pending.pop()
        edge: Any = visit.edge
        both_entries = _is_entry(edge) and _is_entry(other)
        if not both_entries:
            if not _same_end(x, edge, y, other):
                found.append(Difference(visit.path, _show(x, edge), _show(y, other)))
            continue
        if (edge, other) in pairs:
            continue
        first_visit = edge not in seen[0] and other not in seen[1]
        pairs.add((edge, other))
        seen[0].add(edge)
        seen[1].add(other)
        p, q = x.graphdef.entries[edge], y.graphdef.entries[other]
        if not first_visit and p.kind.identity:
            found.append(Difference(visit.path, f"alias #{edge}", f"alias #{other}"))
        elif p[:4] != q[:4]:
            found.append(Difference(visit.path, _show_entry(p), _show_entry(q)))
        else:
            children = x.graphdef.children(edge, visit.link, -1)
            pending += reversed([*zip(children, q.edges, strict=True)])
    return found


def _is_entry(edge: Any) -> bool:
    return type(edge) is int and edge >= 0


def _same_end(x: Flat, edge: Any, y: Flat, other: Any) -> bool:
    if type(edge) is int and type(other) is int:
        return edge < 0 and other < 0 and are_same(x.leaves[~edge], y.leaves[~other])
    return edge == other


def _show(flat: Flat, edge: Any) -> str:
    if type(edge) is not int:
        return repr(_static.decode(edge))[:200]
    if edge < 0:
        leaf = flat.leaves[~edge]
        small = not hasattr(leaf, "size") or leaf.size <= 4
        return repr(leaf)[:200] if small else leaf_text(leaf)
    return _show_entry(flat.graphdef.entries[edge])


def _show_entry(entry: Any) -> str:
    keys = [entry.kind.path_key(key) for key in entry.keys]
    shown = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
    return f"{entry.cls.__name__}({shown})"[:300]
