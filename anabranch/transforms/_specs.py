"""From filters to one value per leaf: axes, shardings, and whether to differentiate.

A specification is a value for everything (an axis, a sharding), a mapping from filters to values
(`StateAxes`, `StateSharding`), or a container of specifications that matches a container of the
arguments. If two ways to one object give it different values, that is an `AliasError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from anabranch.errors import AliasError, FilterError, StructureError, bounded
from anabranch.graph import _classify, _kinds
from anabranch.graph._filters import (
    Filter,
    check_ellipsis_last,
    depends_on_path,
    first_match,
    to_predicate,
)
from anabranch.graph._graphdef import Edge, Entry, Link, link_to, path_of


class FilterMap:
    """A mapping from filters to values; the first filter that matches a leaf decides."""

    __slots__ = ("_hash", "_predicates", "by_path", "filters", "values")

    def __init__(self, mapping: Mapping[Filter, Any]) -> None:
        self.filters = tuple(mapping)
        check_ellipsis_last(self.filters)
        self._predicates = tuple([to_predicate(f) for f in self.filters])
        self.values = tuple(mapping.values())
        self.by_path = any(depends_on_path(f) for f in self.filters)

    def resolve(self, path: tuple[Hashable, ...], variable: Any) -> Any:
        """Return the value for a leaf; raise `FilterError` if no filter matches it."""
        match = first_match(self._predicates, path, variable)
        if match is None:
            raise FilterError(f"no filter of {self!r} matches it; add `...` for the rest")
        return self.values[match]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, FilterMap):
            return NotImplemented
        return self._predicates == other._predicates and self.values == other.values

    def __hash__(self) -> int:
        return hash((type(self), self._predicates, self.values))

    def __repr__(self) -> str:
        def name(f: Any) -> str:
            return "..." if f is ... else getattr(f, "__name__", repr(f))

        pairs = [f"{name(f)}: {v!r}" for f, v in zip(self.filters, self.values, strict=True)]
        return f"{type(self).__name__}({{{', '.join(pairs)}}})"


class StateAxes(FilterMap):
    """Say by filter along which axis the arrays of an object are mapped.

    Arguments:
        mapping: from filters to an axis (int) or None (not mapped).

    >>> import anabranch as ab, jax.numpy as jnp
    >>> model = {"w": ab.Param(jnp.arange(3.0)), "n": ab.Variable(2.0)}
    >>> axes = ab.StateAxes({ab.Param: 0, ...: None})
    >>> ab.vmap(lambda m: m["w"] * m["n"], in_axes=(axes,))(model).tolist()
    [0.0, 2.0, 4.0]
    """

    __slots__ = ()


class StateSharding(FilterMap):
    """Say by filter how the arrays of an object are sharded.

    Arguments:
        mapping: from filters to a `jax.sharding.Sharding`, or None (as it comes); for `shard_map`
            to a `jax.sharding.PartitionSpec`, or None (the same on all devices).

    >>> import anabranch as ab, jax
    >>> here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> double = ab.jit(lambda v: v * 2, in_shardings=(ab.StateSharding({...: here}),))
    >>> float(double(ab.Param(1.0)))
    2.0
    """

    __slots__ = ()


class DiffState(NamedTuple):
    """Say which part of an argument is differentiated.

    Arguments:
        argnum: the position or the name of the argument.
        filter: which of its leaves.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(3.0), "b": ab.BatchStat(1.0)}
    >>> loss = lambda m: m["w"] ** 2 + m["b"]
    >>> ab.grad(loss, argnums=ab.DiffState(0, ab.BatchStat))(model)["b"].flat()
    {(): Array(1., dtype=float32, weak_type=True)}
    """

    argnum: int | str
    filter: Filter


_TRANSLATIONS: list[Callable[[Any], Any]] = []


def add_translation(translate: Callable[[Any], Any]) -> None:
    """Let specifications of another library be used: what is none comes back as it is."""
    _TRANSLATIONS.append(translate)


def as_ours(spec: Any) -> Any:
    """Return a specification with those of other libraries in it replaced by ours."""
    if is_container(spec) or type(spec) in (tuple, list, dict):
        parts = list(spec.values() if isinstance(spec, dict) else spec)
        ours = [as_ours(part) for part in parts]
        if all(map(operator.is_, parts, ours)):
            return spec
        if isinstance(spec, dict):
            return dict(zip(cast("dict[Any, Any]", spec), ours, strict=True))
        return type(spec)(*ours) if hasattr(spec, "_fields") else type(spec)(ours)
    for translate in _TRANSLATIONS:
        spec = translate(spec)
    return spec


class _Absent:
    def __repr__(self) -> str:
        return "<not given>"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


class Step(NamedTuple):
    """One step of a path: a position of an entry."""

    above: Step | None
    entry: Entry
    position: int


class World(NamedTuple):
    """A table of entries to resolve specifications on."""

    entry: Callable[[int], tuple[Entry, bool]]
    """The entry of an index, and whether its leaves are slots of a delta."""

    variable: Callable[[int], Any]
    """The Variable of an index."""

    leaf: Callable[[int, bool], Any]
    """A leaf by number, and whether it is a slot."""


class Found(NamedTuple):
    """The value that was found for a leaf, and where."""

    value: Any
    step: Step | None
    name: str


class Resolved(NamedTuple):
    """What was found; it refers to no object of the caller, so that compiled functions keep it."""

    leaves: dict[tuple[int, bool], Found]
    """By the number of a leaf, and whether it is a slot."""

    nodes: dict[int, tuple[Any, Step | None, str, Link | None]]
    """By index: the specification, the way, the name of its start, and the path for filters."""

    again: dict[int, list[tuple[Any, Step | None, str, Link | None]]]
    """By index, the same for other specifications under which an object was reached again."""


class Resolver:
    """Resolve specifications to one value per leaf, and check that aliases agree.

    Arguments:
        world: the entries.
        normalise: from a value and a leaf to a comparable value; raises what is wrong with it.
        override: from an entry and the specification that it was given to its own.
    """

    def __init__(
        self,
        world: World,
        normalise: Callable[[Any, Any], Any],
        override: Callable[[Entry, Any], Any] | None = None,
    ) -> None:
        self._world = world
        self._normalise = normalise
        self._override = override
        self.found = Resolved({}, {}, {})
        self._seen: set[tuple[int, int]] = set()
        self._keep: list[Any] = []  # specifications, so that their ids stay theirs

    def resolve(
        self,
        edge: Edge,
        spec: Any,
        name: str,
        *,
        slot: bool = False,
        step: Step | None = None,
        path: Link | None = None,
        variable: int = -1,
        skip_known: bool = False,
        forced: bool = False,
    ) -> None:
        """Resolve a specification for everything below an edge.

        Arguments:
            edge: where to start.
            spec: the specification.
            name: how the start is called in messages.
            slot: whether a leaf edge is a slot of a delta.
            step: the way to the start.
            path: the same, as filters see it.
            variable: the Variable around the start.
            skip_known: leave out objects that have been resolved before.
            forced: do not leave out the object that the edge leads to.
        """
        self._keep.append(spec)
        pending: list[_Pending] = [(edge, spec, step, path, variable, slot, ())]
        while pending:
            edge, spec, step, path, variable, slot, above = pending.pop()
            if type(edge) is not int:
                continue
            if edge < 0:
                self._leaf(~edge, slot, spec, step, path, variable, name)
                continue
            entry, slot = self._world.entry(edge)
            if self._override is not None:
                spec = self._override(entry, spec)
            if forced:
                forced = False
            elif entry.kind.identity:
                if skip_known and edge in self.found.nodes:
                    continue
                if not self._enter(edge, spec, step, name, path, above):
                    continue
            if entry.kind.is_variable:
                variable = edge
            if not isinstance(spec, FilterMap) and not is_container(spec):  # one for all below
                for position in range(len(entry.edges) - 1, -1, -1):
                    if type(edge := entry.edges[position]) is int:
                        way = Step(step, entry, position)
                        pending.append((edge, spec, way, None, variable, slot, ()))
                continue
            below = specs_below(entry, spec, step, name)
            inside = (*above, edge) if isinstance(spec, FilterMap) and spec.by_path else ()
            for position in range(len(entry.edges) - 1, -1, -1):
                own = path
                if not isinstance(spec, FilterMap):
                    own = None  # filters see paths from where they were given
                elif not entry.kind.is_variable:
                    own = link_to(path, entry.kind.path_key(entry.keys[position]))
                pending.append(
                    (
                        entry.edges[position],
                        below[position],
                        Step(step, entry, position),
                        own,
                        variable,
                        slot,
                        inside,
                    )
                )

    def _enter(
        self,
        index: int,
        spec: Any,
        step: Step | None,
        name: str,
        path: Link | None,
        above: tuple[int, ...],
    ) -> bool:
        """Tell whether a node has to be walked under a specification."""
        found = (spec, step, name, path)
        if self.found.nodes.setdefault(index, found)[0] is not spec:
            self.found.again.setdefault(index, []).append(found)
        key = (index, id(spec))
        if key not in self._seen:
            self._seen.add(key)
            self._keep.append(spec)
            return True
        # reached again: what filters say by path may differ on this way
        return isinstance(spec, FilterMap) and spec.by_path and index not in above

    def _leaf(
        self,
        number: int,
        slot: bool,
        spec: Any,
        step: Step | None,
        path: Link | None,
        variable: int,
        name: str,
    ) -> None:
        leaf = self._world.leaf(number, slot)
        value = spec
        try:
            if isinstance(spec, FilterMap):
                owner = self._world.variable(variable) if variable >= 0 else leaf
                value = spec.resolve(path_of(path), owner)
            elif is_container(spec):
                raise StructureError(
                    f"the specification is a {type(spec).__name__} for an array; give one value"
                )
            value = self._normalise(value, leaf)
        except (FilterError, StructureError, TypeError, ValueError) as error:
            ours = (
                type(error) if isinstance(error, (FilterError, StructureError)) else StructureError
            )
            raise ours(bounded(f"{show(name, step)}: {error}")) from None
        before = self.found.leaves.setdefault((number, slot), Found(value, step, name))
        if before.value != value:
            raise AliasError(
                bounded(
                    f"{show(before.name, before.step)} and {show(name, step)} are one object, but "
                    f"the first is given {before.value!r} and the second {value!r}: give both "
                    "the same value"
                )
            )


# the arguments of `Resolver.resolve`, and the nodes on the way whose filters look at paths
_Pending: TypeAlias = "tuple[Edge, Any, Step | None, Link | None, int, bool, tuple[int, ...]]"
_CONTAINERS = frozenset({_kinds.TUPLE, _kinds.LIST, _kinds.DICT, _kinds.DEQUE, _kinds.PYTREE})


def specs_below(entry: Entry, spec: Any, step: Step | None, name: str) -> list[Any]:
    """Return the specifications of the children of an entry."""
    count = len(entry.edges)
    if not is_container(spec) or entry.kind not in _CONTAINERS:
        if is_container(spec):
            raise StructureError(
                f"{show(name, step)}: the specification is a {type(spec).__name__}, which "
                f"cannot be matched with a {entry.cls.__name__}; give one value, or filters"
            )
        return [spec] * count
    kind: Any = _classify.rule_of(spec)
    _, keys, values = kind.open(spec)
    if len(values) != count or (entry.kind is _kinds.DICT and set(keys) != set(entry.keys)):
        raise StructureError(
            bounded(
                f"{show(name, step)}: the specification has {len(values)} entries "
                f"({list(keys)[:8]}), but the {entry.cls.__name__} has {count} "
                f"({list(entry.keys)[:8]}); give one for each of them, or one value for all"
            )
        )
    if entry.kind is _kinds.DICT:
        by_key = dict(zip(keys, values, strict=True))
        return [by_key[key] for key in entry.keys]
    return list(values)


def is_container(spec: Any) -> bool:
    """Tell whether a specification is a container of specifications."""
    if isinstance(spec, (tuple, list, dict)):
        return _classify.rule_of(spec) is not _classify.STATIC  # PartitionSpec can be a tuple
    return False


def values_of(spec: Any) -> Iterable[Any]:
    """Yield every value in a specification."""
    if spec is ABSENT:
        return
    if isinstance(spec, FilterMap):
        yield from spec.values
    elif is_container(spec):
        for part in spec.values() if isinstance(spec, dict) else spec:
            yield from values_of(part)
    else:
        yield spec


def show(name: str, step: Step | None) -> str:
    """Return how a place is written.

    Arguments:
        name: of where the path starts.
        step: the last one of the path.
    """
    for above in reversed([*_steps(step)]):
        name = above.entry.kind.show_below(name, above.entry.keys[above.position])
    return name


def _steps(step: Step | None) -> Iterator[Step]:
    while step is not None:
        yield step
        step = step.above
