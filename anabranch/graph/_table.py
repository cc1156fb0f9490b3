"""The table of entries, and the flat sequence of tokens that it is written as.

A walk that made two tuples for each entry would give the garbage collector hundred thousands of
containers to visit, again and again, and most tables are only ever hashed and compared. So a walk
writes tokens, one for each edge, in the order in which it takes them:

- a `Spec`: the edge leads to a new entry, whose edges follow, as many as it has keys;
- `LEAF`: it leads to a new leaf;
- an integer: it leads to an entry `i`, or a leaf `~i`, that has been there before;
- a tuple: a static value.

Indices of what is new are those of the order, so they are not written. Specs are interned:
sequences are hashed and compared in C, mostly by identity.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from anabranch.graph._kind import Kind

Edge: TypeAlias = "int | tuple[Any, ...]"


class Entry(NamedTuple):
    """One node or value."""

    kind: Kind
    cls: type
    extra: Any  # static content that has no edges: metadata, a maxlen, a treedef
    keys: Any  # a tuple of names or keys, or a range
    edges: tuple[Edge, ...]


_entry: Callable[[tuple[Any, ...]], Entry] = functools.partial(tuple.__new__, Entry)
"""Make an entry, in C."""


class Spec:
    """All of an entry but its edges. Equal ones are the same object: see `spec_of`."""

    __slots__ = ("__weakref__", "cls", "extra", "hash", "keys", "kind")

    def __init__(self, kind: Kind, cls: Any, extra: Any, keys: Any) -> None:
        self.kind, self.cls, self.extra, self.keys = kind, cls, extra, keys
        self.hash = hash((kind, cls, extra, keys))
        """Of the fields, so that it is the same for the next one that is equal to this one."""


class _NewLeaf:
    """The only token of its kind."""


LEAF: Final = _NewLeaf()
_SPECS: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()


def spec_of(kind: Kind, cls: Any, extra: Any, keys: Any) -> Spec:
    """Return the spec with these fields."""
    key = (kind, cls, extra, keys)
    known = _SPECS.get(key)
    return _SPECS.setdefault(key, Spec(kind, cls, extra, keys)) if known is None else known


def read(tokens: Sequence[Any], base: int = 0) -> tuple[list[Entry], list[Edge]]:
    """Return the entries that tokens stand for, and the edges that leave none of them.

    Arguments:
        tokens: the last entries may be incomplete: they have the edges that are there.
        base: the index of the first entry.
    """
    entries: list[Any] = []
    edges: list[Edge] = []
    top, leaf, spec, at, missing, known = edges, -1, None, 0, -1, False
    around: list[Any] = []  # what surrounds the entry whose edges are read
    for token, following in zip(tokens, [*tokens[1:], None], strict=False):
        if known:  # with its entry
            known = False
            continue
        missing -= 1
        if token is LEAF:
            edges.append(leaf)
            leaf -= 1
        elif type(token) is Spec:
            edges.append(base + len(entries))
            kind, cls, extra, keys = token.kind, token.cls, token.extra, token.keys
            if following is LEAF and len(keys) == 1:  # most entries are such Variables
                entries.append(_entry((kind, cls, extra, keys, (leaf,))))
                leaf -= 1
                known = True
            else:
                around.append((spec, at, edges, missing))
                spec, at, edges, missing = token, len(entries), [], len(keys)
                entries.append(None)
        else:
            edges.append(token)
        while missing == 0:
            assert spec is not None
            entries[at] = _entry((spec.kind, spec.cls, spec.extra, spec.keys, tuple(edges)))
            spec, at, edges, missing = around.pop()
    while spec is not None:
        entries[at] = _entry((spec.kind, spec.cls, spec.extra, spec.keys, tuple(edges)))
        spec, at, edges, missing = around.pop()
    return entries, top


def owners(tokens: Iterable[Any], base: int) -> list[tuple[int, Spec | None]]:
    """Return the Variable around each leaf: its index and its spec, -1 and None if there is none.

    Arguments:
        tokens: a whole table.
        base: the index of its first entry.
    """
    found: list[tuple[int, Spec | None]] = []
    index, missing = base - 1, 0
    nobody: tuple[int, Spec | None] = (-1, None)
    owner = nobody
    for token in tokens:
        if token is LEAF:
            found.append(owner)
        elif type(token) is Spec:
            index += 1
            if missing:
                missing += len(token.keys)
            elif token.kind.is_variable:
                owner, missing = (index, token), len(token.keys) + 1
        if missing:
            missing -= 1
            if missing == 0:
                owner = nobody
    return found


def write(entries: Sequence[Entry], root: Edge, num_leaves: int, base: int) -> Any:
    """Return the tokens of a table, None if they would stand for other indices than these."""
    tokens: list[Any] = []
    entry, leaf = base, 0
    stack: list[Iterator[Edge]] = [iter((root,))]
    while stack:
        for edge in stack[-1]:
            if type(edge) is not int or ~leaf < edge < entry:
                tokens.append(edge)
            elif edge == ~leaf:
                tokens.append(LEAF)
                leaf += 1
            elif edge == entry < base + len(entries):
                kind, cls, extra, keys, edges = entries[edge - base]
                tokens.append(spec_of(kind, cls, extra, keys))
                entry += 1
                stack.append(iter(edges))
                break
            else:
                return None
        else:
            stack.pop()
    complete = entry == base + len(entries) and leaf == num_leaves
    return tuple(tokens) if complete else None


def unfinished(tokens: Iterable[Any]) -> list[tuple[Spec | None, int]]:
    """Return the specs of incomplete entries, outermost first, and how many edges each has.

    The first stands for no entry: its edges are those that leave none.
    """
    found: list[tuple[Spec | None, int]] = [(None, 0)]
    for token in tokens:
        spec, done = found[-1]
        found[-1] = spec, done + 1
        if type(token) is Spec:
            found.append((token, 0))
        while True:
            spec, done = found[-1]
            if spec is None or done < len(spec.keys):
                break
            found.pop()
    return found
