"""`GraphDef`: the static half of a split, a flat table of entries joined by integer edges.

An edge is an integer or an encoded static value: `i >= 0` leads to entry `i`, `~i < 0` is leaf
`i`, a tuple is a static value (see `_static`). Shared objects and cycles are equal integers. Values
(tuples and their kin) are entries too, one for each place, so that no edge is nested and nothing
here recurses. Children of a value come after it.

The table is kept, hashed and compared as the walk has written it (see `_table`), and read when
somebody asks for its entries.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax

from anabranch.graph import _static, _table
from anabranch.graph._leaf_info import LeafInfo
from anabranch.graph._table import Edge, Entry, Spec

Path: TypeAlias = "tuple[Hashable, ...]"


class Link(NamedTuple):
    """A path as a linked list, last key first: a chain of n nodes has n paths of length n."""

    above: Link | None
    key: Hashable
    depth: int  # the number of keys


def link_to(above: Link | None, key: Hashable) -> Link:
    """Return a path that is longer by one key."""
    return Link(above, key, 1 if above is None else above.depth + 1)


def path_of(link: Link | None) -> Path:
    """Return the keys of a path, first one first."""
    keys: list[Hashable] = []
    while link is not None:
        keys.append(link.key)
        link = link.above
    return tuple(reversed(keys))


class Paths:
    """Give paths as tuples, fast for visits in the order of a walk: only what differs is redone."""

    def __init__(self) -> None:
        self._keys: list[Hashable] = []
        self._links: list[Link] = []

    def of(self, link: Link | None) -> Path:
        """Return the keys of a path, first one first."""
        new: list[Link] = []
        links = self._links
        while link is not None and not (link.depth <= len(links) and links[link.depth - 1] is link):
            new.append(link)
            link = link.above
        depth = 0 if link is None else link.depth
        del links[depth:], self._keys[depth:]
        links.extend(reversed(new))
        self._keys.extend([x.key for x in reversed(new)])
        return tuple(self._keys)


class Visit(NamedTuple):
    """One edge of a table, reached along a path."""

    link: Link | None
    parent: int  # the entry that the edge leaves, -1 for the root
    position: int
    edge: Edge
    first: bool  # the entry that it leads to was not reached before
    variable: int  # the innermost Variable entry around the edge, -1 if there is none

    @property
    def path(self) -> Path:
        """The keys from the root to the edge."""
        return path_of(self.link)


class _Leaves(NamedTuple):
    """What is found by following paths, when somebody asks for it."""

    infos: tuple[LeafInfo, ...]
    owners: tuple[int, ...]
    holders: tuple[tuple[int, int], ...]
    by_path: dict[Path, int]


class GraphDef:
    """The static structure of a graph of objects; hashable, compared by value, interned.

    Made by `split`; `merge` makes objects of it again. It can be an argument of plain JAX
    transforms, where it is a pytree without leaves.

    >>> import anabranch as ab
    >>> a, b = ab.graphdef([ab.Param(1.0)]), ab.graphdef([ab.Param(2.0)])
    >>> a is b, a.num_leaves
    (True, 1)
    """

    __slots__ = (
        "__weakref__",
        "_hash",
        "_key",
        "_leaves",
        "_variables",
        "entries",
        "num_leaves",
        "origin",
        "recipe",
        "root",
    )

    entries: tuple[Entry, ...]
    root: Edge
    num_leaves: int
    origin: tuple[Any, ...] | None
    """What a manual context needs: its tag, and the outer index of each known entry."""

    recipe: Any  # how its objects are made: see `_build`
    _key: tuple[Any, ...]  # tokens and origin; or what else is compared
    _hash: int | None
    _leaves: _Leaves | None
    _variables: Any

    def __new__(
        cls,
        entries: tuple[Entry, ...],
        root: Edge,
        num_leaves: int,
        origin: tuple[Any, ...] | None = None,
    ) -> GraphDef:
        tokens = _table.write(entries, root, num_leaves, _base(origin))
        if tokens is not None:
            return cls.of(tokens, num_leaves, origin)
        return cls._interned((None, entries, root, num_leaves, origin), num_leaves, origin)

    @classmethod
    def of(
        cls, tokens: tuple[Any, ...], num_leaves: int, origin: tuple[Any, ...] | None = None
    ) -> GraphDef:
        """Return the graphdef whose table is written as these tokens; see `_table`."""
        return cls._interned((tokens, origin), num_leaves, origin)

    @classmethod
    def _interned(cls, key: tuple[Any, ...], num_leaves: int, origin: Any) -> GraphDef:
        known = _INTERNED.get(key)
        if known is not None:
            return known
        self = object.__new__(cls)
        self._key, self.num_leaves, self.origin = key, num_leaves, origin
        self._hash = self._leaves = self._variables = self.recipe = None
        return _INTERNED.setdefault(key, self)

    def __hash__(self) -> int:
        if self._hash is None:
            tokens, *rest = self._key
            if tokens is not None:
                tokens = tuple([t.hash if type(t) is Spec else t for t in tokens])
            self._hash = hash((tokens, *rest))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, GraphDef):
            return NotImplemented
        # interned, so that only graphdefs of different lifetimes ever get here
        return hash(self) == hash(other) and self._key == other._key

    def __getattr__(self, name: str) -> Any:
        if name not in ("entries", "root"):
            raise AttributeError(name)
        tokens = self._key[0]  # read when somebody asks for it
        if tokens is None:
            _, self.entries, self.root, *_ = self._key
        else:
            entries, (root,) = _table.read(tokens, self.base)
            self.entries, self.root = tuple(entries), root
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = _static.pack((self.entries, self.root))
        return (_unpacked, (packed, self.num_leaves, self.origin))

    def __repr__(self) -> str:
        lines = [f"GraphDef({len(self.entries)} entries, {self.num_leaves} leaves)"]
        for visit in self.visit():
            if len(lines) > 40:
                lines.append("  ...")
                break
            if type(visit.edge) is int and visit.edge >= 0:
                name = self.entries[visit.edge].cls.__name__
                known = "" if visit.first else " (again)"
                lines.append(f"  {visit.path}: {name} #{visit.edge}{known}")
        return "\n".join(lines)

    @property
    def infos(self) -> tuple[LeafInfo, ...]:
        """Path, kind and metadata of every leaf, in the order of the leaves."""
        return self._find_leaves().infos

    @property
    def owners(self) -> tuple[int, ...]:
        """The index of the Variable that holds each leaf, -1 for plain arrays."""
        return self._find_leaves().owners

    @property
    def holders(self) -> tuple[tuple[int, int], ...]:
        """The index of the entry that each leaf is held by, -1 for none, and the position there."""
        return self._find_leaves().holders

    @property
    def variables(self) -> list[tuple[int, Any]]:
        """Where each leaf is held: the index of the Variable, and what is equal for like Variables.

        Of plain arrays -1 and None.
        """
        if self._variables is None:
            tokens = self._key[0]
            # what two Variables hold belongs to the first on the way of the paths
            if tokens is None or any([type(x) is int and x < 0 for x in tokens]):  # noqa: C419
                around = [(i, self.entry(i) if i >= 0 else None) for i in self.owners]
                self._variables = [(i, e and (e.kind, e.cls, e.extra)) for i, e in around]
            else:
                self._variables = _table.owners(tokens, self.base)
        return self._variables

    @property
    def leaf_at(self) -> dict[Path, int]:
        """The number of the leaf at a path; the first path of each, of several aliases."""
        return self._find_leaves().by_path

    @property
    def base(self) -> int:
        """The index of the first entry; lower ones belong to earlier splits of a context."""
        return _base(self.origin)

    def entry(self, index: int) -> Entry:
        """Return the entry of an index."""
        return self.entries[index - self.base]

    def _find_leaves(self) -> _Leaves:
        if self._leaves is None:
            found = _Finder(self)
            found.run()
            infos = tuple(found.infos)
            # a leaf without a path is no part of the graph that starts at the root
            by_path = {info.path: i for i, info in enumerate(infos) if info is not None}
            self._leaves = _Leaves(infos, tuple(found.owners), tuple(found.holders), by_path)
        return self._leaves

    def visit(self) -> Iterator[Visit]:
        """Yield every edge once, depth first, in the order of the keys."""
        seen: set[int] = set()
        base = self.base
        stack: list[Iterator[Visit]] = [iter([Visit(None, -1, 0, self.root, True, -1)])]
        while stack:
            for found in stack[-1]:
                edge = found.edge
                if type(edge) is not int or edge < base:
                    yield found
                    continue
                first = edge not in seen
                yield found._replace(first=first)
                if first:
                    seen.add(edge)
                    stack.append(self.children(edge, found.link, found.variable))
                    break
            else:
                stack.pop()

    def postorder(self) -> list[Visit]:
        """Return the first visit of every entry, children before parents; cycles end somewhere."""
        done: list[Visit] = []
        stack: list[tuple[Visit, Iterator[Visit]]] = []
        seen: set[int] = set()
        following: Iterator[Visit] = iter([Visit(None, -1, 0, self.root, True, -1)])
        while True:
            for found in following:
                edge = found.edge
                if type(edge) is int and edge >= self.base and edge not in seen:
                    seen.add(edge)
                    stack.append((found, following))
                    following = self.children(edge, found.link, found.variable)
                    break
            else:
                if not stack:
                    return done
                visit, following = stack.pop()
                done.append(visit)

    def children(self, index: int, link: Link | None, variable: int) -> Iterator[Visit]:
        """Yield the edges that leave an entry which was reached along a path."""
        kind, _, _, keys, edges = self.entry(index)
        if kind.is_variable:
            yield Visit(link, index, 0, edges[0], True, index)
            return
        for position in kind.visiting_order(keys):
            path = link_to(link, kind.path_key(keys[position]))
            yield Visit(path, index, position, edges[position], True, variable)


class _Finder:
    """Find the first path of every leaf, in the order of `GraphDef.visit`."""

    def __init__(self, graphdef: GraphDef) -> None:
        self._graphdef = graphdef
        self._keys: list[Hashable] = []  # the path: taken down and up again, as it may be long
        self.infos: list[Any] = [None] * graphdef.num_leaves
        self.owners = [-1] * graphdef.num_leaves
        self.holders = [(-1, 0)] * graphdef.num_leaves

    def run(self) -> None:
        """Follow all edges."""
        keys, base, entries = self._keys, self._graphdef.base, self._graphdef.entries
        seen: set[int] = set()
        # of each entry on the way: its index, its kind if its keys are part of paths, keys, edges,
        # the positions that are left, the Variable around
        stack: list[Any] = [(-1, None, (), (self._graphdef.root,), iter((0,)), -1)]
        while stack:
            index, kind, names, edges, rest, variable = stack[-1]
            for position in rest:
                edge = edges[position]
                if type(edge) is not int or edge in seen or 0 <= edge < base:
                    continue
                if kind is not None:
                    keys.append(kind.path_key(names[position]))
                if edge < 0:
                    self._note(~edge, index, position, variable)
                else:
                    seen.add(edge)
                    inner, _, _, below, ahead = entries[edge - base]
                    if not inner.is_variable:
                        left = iter(inner.visiting_order(below))
                        stack.append((edge, inner, below, ahead, left, variable))
                        break
                    if type(ahead[0]) is not int or ahead[0] >= 0:
                        stack.append((edge, None, below, ahead, iter((0,)), edge))
                        break
                    self._note(~ahead[0], edge, 0, edge)
                if kind is not None:
                    keys.pop()
            else:
                stack.pop()
                if stack and stack[-1][1] is not None:
                    keys.pop()

    def _note(self, leaf: int, index: int, position: int, variable: int) -> None:
        if self.infos[leaf] is None:
            kind, metadata = jax.Array, ()
            if variable >= 0:
                _, kind, metadata, _, _ = self._graphdef.entry(variable)
            self.infos[leaf] = _info((tuple(self._keys), kind, metadata or ()))
            self.owners[leaf] = variable
            self.holders[leaf] = (index, position)


_info: Callable[[tuple[Any, ...]], LeafInfo] = functools.partial(tuple.__new__, LeafInfo)


def _unpacked(packed: Any, num_leaves: int, origin: Any) -> GraphDef:
    entries, root = _static.unpack(packed)
    return GraphDef(entries, root, num_leaves, origin)


def _base(origin: tuple[Any, ...] | None) -> int:
    return 0 if origin is None else origin[1]


_INTERNED: weakref.WeakValueDictionary[Any, GraphDef] = weakref.WeakValueDictionary()

jax.tree_util.register_static(GraphDef)
