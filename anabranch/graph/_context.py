"""The four steps by hand: split and merge around a plain JAX transform.

`update_context(tag)` records the trace in which it was opened. A split or merge whose current trace
is that one is an **outer** step: it reads, or writes, the caller's own objects. In any other trace
it is an **inner** step, whose record (from twin to outer index) is kept for that trace and tag, and
dies with the trace. Graphdefs carry the tag and outer indices, never a trace, so that entering a
context again does not make anything trace again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Hashable
from typing import Any

from anabranch import _jax
from anabranch.contextvars_ext import JitAwareContextVar
from anabranch.errors import ArgumentError, ContextTagError
from anabranch.graph._build import build
from anabranch.graph._delta import Write, check_made_here, commit
from anabranch.graph._filters import Filter
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._merge import leaves_of
from anabranch.graph._split import snapshot, states
from anabranch.graph._tokens import current_token
from anabranch.graph._walk import Contents, Walk, contents_of


class RefMap:
    """Objects by index, and back, by identity.

    >>> import anabranch as ab
    >>> refs, v = ab.RefMap(), ab.Param(0.0)
    >>> refs.add(3, v)
    >>> refs.index_of(v), refs.index_of(ab.Param(0.0))
    (3, None)
    """

    __slots__ = ("_by_id", "_objects")

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._by_id: dict[int, int] = {}

    def add(self, index: int, obj: Any) -> None:
        """Let an index stand for an object."""
        self._objects[index] = obj
        self._by_id[id(obj)] = index

    def index_of(self, obj: Any) -> int | None:
        """Return the index of an object, found by identity, or None."""
        return self._by_id.get(id(obj))

    def inverse(self) -> IndexMap:
        """Return the same map read from index to object."""
        return IndexMap(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


class IndexMap(dict[int, Any]):
    """From index to object.

    >>> import anabranch as ab
    >>> refs = ab.RefMap()
    >>> refs.add(0, [1])
    >>> refs.inverse()[0]
    [1]
    """

    __slots__ = ()


class _UpdateContext:
    """What is open under a tag: the outer trace and the caller's objects."""

    def __init__(self, tag: Hashable) -> None:
        self.tag = tag
        self.token = current_token()
        self.start()

    def start(self) -> None:
        """Begin a round of the four steps: forget the objects of the last one."""
        self.refs = RefMap()
        self.walk = Walk()
        self.ended = False


_OPEN: JitAwareContextVar[dict[Hashable, _UpdateContext]] = JitAwareContextVar("update_context")
_INNER: weakref.WeakKeyDictionary[Any, dict[Hashable, RefMap]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def update_context(tag: Hashable) -> Generator[None]:
    """Open a context in which splits and merges with the same tag belong together.

    Arguments:
        tag: any hashable; contexts with different tags do not see each other.

    >>> import anabranch as ab, jax
    >>> m = {"a": ab.Param(1.0), "b": ab.Param(2.0)}
    >>> def swap(graphdef, state):
    ...     with ab.merge_context("swap") as ctx:
    ...         twin = ctx.merge(graphdef, state)
    ...     twin["a"], twin["b"] = twin["b"], twin["a"]
    ...     with ab.split_context("swap") as ctx:
    ...         return ctx.split(twin)
    >>> a = m["a"]
    >>> with ab.update_context("swap"):
    ...     with ab.split_context("swap") as ctx:
    ...         graphdef, state = ctx.split(m)
    ...     graphdef, state = jax.jit(swap)(graphdef, state)
    ...     with ab.merge_context("swap") as ctx:
    ...         same = ctx.merge(graphdef, state)
    >>> same is m, m["b"] is a
    (True, True)
    """
    if not isinstance(tag, Hashable):
        raise ArgumentError(
            f"a tag is anything that can be hashed, a string for one, not a {type(tag).__name__}"
        )
    opened = {**_OPEN.get({}), tag: _UpdateContext(tag)}
    with _OPEN.set_on_enter(opened):
        yield


def _outer(tag: Hashable) -> _UpdateContext | None:
    """Return the context if this is an outer step; None for an inner one."""
    context = _OPEN.get({}).get(tag)
    if context is not None and context.token is current_token():
        return context
    if context is None and _jax.is_root(_jax.current_trace()):
        raise ContextTagError(
            f"no update context is open for tag {tag!r}: wrap the four steps in "
            f"`with anabranch.update_context({tag!r}):`"
        )
    return None


def _inner_refs(tag: Hashable) -> RefMap:
    records = _INNER.setdefault(_jax.current_trace(), {})
    return records.setdefault(tag, RefMap())


class SplitContext:
    """Splits that share their references: an object split before is only referred to.

    Made by `split_context`.

    >>> import anabranch as ab
    >>> v = ab.Param(1.0)
    >>> with ab.update_context("t"), ab.split_context("t") as ctx:
    ...     _, first = ctx.split(v)
    ...     _, second = ctx.split(v)
    >>> len(first.leaves), len(second.leaves)
    (1, 0)
    """

    def __init__(self, tag: Hashable) -> None:
        self._tag = tag
        self._outer = _outer(tag)
        if self._outer is not None and self._outer.ended:
            self._outer.start()
        self._refs = None if self._outer else _inner_refs(tag)
        self._walk = self._outer.walk if self._outer else Walk()
        self._open = True

    def close(self) -> None:
        """Refuse further splits; called when the `with` block is left.

        >>> import anabranch as ab
        >>> with ab.update_context("t"), ab.split_context("t") as ctx:
        ...     ctx.close()
        """
        self._open = False

    def split(self, node: Any, *filters: Filter) -> tuple[Any, ...]:
        """Split an object into `(graphdef, state, *more)`, as `anabranch.split` does.

        >>> import anabranch as ab
        >>> with ab.update_context("t"), ab.split_context("t") as ctx:
        ...     graphdef, params, rest = ctx.split([ab.Param(1.0)], ab.Param, ...)
        >>> len(params.leaves), len(rest.leaves)
        (1, 0)
        """
        if not self._open:
            raise ContextTagError(
                f"this split context of tag {self._tag!r} was left: split inside its `with` block"
            )
        walk = self._walk
        start, base, first_leaf = walk.begin()
        walk.add(node)
        objects, leaves = walk.objects[base:], walk.leaves[first_leaf:]
        origins = None
        if self._outer is not None:
            for index, obj in enumerate(objects, base):
                self._outer.refs.add(index, obj)
        else:
            assert self._refs is not None
            origins = tuple([self._refs.index_of(obj) for obj in objects])
            check_made_here([x for x, o in zip(objects, origins, strict=True) if o is None])
        graphdef = GraphDef.of(tuple(walk.tokens[start:]), len(leaves), (self._tag, base, origins))
        flat = Flat(graphdef, leaves, walk.objects, {})
        return (graphdef, *states(flat, filters or (...,), exhaustive=True))


class MergeContext:
    """Merges that share their references, in the order of the splits.

    Made by `merge_context`.

    >>> import anabranch as ab
    >>> v = ab.Param(1.0)
    >>> with ab.update_context("t"):
    ...     with ab.split_context("t") as ctx:
    ...         graphdef, state = ctx.split(v)
    ...     with ab.merge_context("t") as ctx:
    ...         ctx.merge(graphdef, ab.State.from_flat({(): 2.0})) is v
    True
    """

    def __init__(self, tag: Hashable) -> None:
        self._tag = tag
        self._outer = _outer(tag)
        self._objects: list[Any] = []  # by the index that the merged graphdefs use

    def merge(self, graphdef: GraphDef, state: Any, *more: Any) -> Any:
        """Merge what was split in the other half of the box.

        Outside, known objects are written in place and returned; inside, twins are made.

        Raises:
            ContextTagError: the graphdef belongs to another tag, or an earlier split that it
                refers to was not merged before.

        >>> import anabranch as ab
        >>> with ab.update_context("t"):
        ...     with ab.split_context("t") as ctx:
        ...         parts = ctx.split([ab.Param(1.0)])
        ...     with ab.merge_context("t") as ctx:
        ...         ctx.merge(*parts)
        [Param(1.0)]
        """
        if graphdef.origin is None or graphdef.origin[0] != self._tag:
            own = "none" if graphdef.origin is None else repr(graphdef.origin[0])
            raise ContextTagError(
                f"this merge context has tag {self._tag!r}, the graphdef has {own}: split and "
                "merge with one tag"
            )
        _, base, origins = graphdef.origin
        if base != len(self._objects):
            raise ContextTagError(
                "graphdefs must be merged in the order in which they were split, each once: "
                f"this one refers to {base} objects, {len(self._objects)} are merged"
            )
        leaves = [snapshot(leaf) for leaf in leaves_of(graphdef, (state, *more))]
        if self._outer is not None:
            return self._merge_outside(graphdef, leaves, origins)
        built = build(graphdef, leaves, known=self._objects)
        refs = _inner_refs(self._tag)
        for index in range(base, len(built.objects)):
            refs.add(index, built.objects[index])
        self._objects = built.objects
        return built.resolve(graphdef.root)

    def _merge_outside(self, graphdef: GraphDef, leaves: list[Any], origins: Any) -> Any:
        assert self._outer is not None
        base = graphdef.base
        # straight back, without an inner split: the indices are those of the outer objects
        if origins is None:
            origins = range(base, base + len(graphdef.entries))
        outer = self._outer.refs.inverse()
        walk = self._outer.walk
        held = contents_of(walk.table()[0], walk.held, walk.leaves)
        existing: dict[int, Any] = {}
        expected: list[Contents] = []
        for i, (o, entry) in enumerate(zip(origins, graphdef.entries, strict=True)):
            if o is not None and entry.kind.identity:
                if o not in outer:
                    raise ContextTagError(
                        "this graphdef was split in another update context, whose objects are "
                        "not known here: merge it where it was split"
                    )
                existing[i] = outer[o]
                expected.append(held[o])
        built = build(graphdef, leaves, known=self._objects, existing=existing)
        contents = contents_of(graphdef.entries, built.held, leaves)
        writes = [Write(x, graphdef.entries[i].cls, contents[i]) for i, x in existing.items()]
        commit(writes, expected)
        self._outer.ended = True
        self._objects = built.objects
        return built.resolve(graphdef.root)


@contextlib.contextmanager
def split_context(tag: Hashable) -> Generator[SplitContext]:
    """Open a context for splits that share references; see `update_context`.

    Raises:
        ContextTagError: no update context is open for the tag.

    >>> import anabranch as ab
    >>> with ab.update_context("t"), ab.split_context("t") as ctx:
    ...     graphdef, state = ctx.split(ab.Param(1.0))
    >>> graphdef.num_leaves
    1
    """
    context = SplitContext(tag)
    try:
        yield context
    finally:
        context.close()


@contextlib.contextmanager
def merge_context(tag: Hashable) -> Generator[MergeContext]:
    """Open a context for merges that share references; see `update_context`.

    Raises:
        ContextTagError: no update context is open for the tag.

    >>> import anabranch as ab
    >>> with ab.update_context("t"):
    ...     with ab.split_context("t") as ctx:
    ...         parts = ctx.split(ab.Param(1.0))
    ...     with ab.merge_context("t") as ctx:
    ...         ctx.merge(*parts)
    Param(1.0)
    """
    yield MergeContext(tag)
