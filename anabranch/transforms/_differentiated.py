"""Which leaves are differentiated, and in what form derivatives come back.

Of objects, the `Param`s are differentiated by default, of plain containers every inexact array;
`DiffState` chooses by filter. The derivative of an object is a `State` with its paths. A leaf that
several arguments reach belongs to the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import FilterError, StructureError, bounded
from anabranch.graph import _kinds
from anabranch.graph._filters import to_predicate
from anabranch.graph._flatten import Flat
from anabranch.graph._function import FUNCTION
from anabranch.graph._graphdef import Edge, GraphDef, Visit
from anabranch.graph._kinds import Kind
from anabranch.graph._leaf_info import LeafInfo, LeafInfos, path_text
from anabranch.graph._state import State
from anabranch.graph._variable import Param
from anabranch.transforms._specs import DiffState
from anabranch.transforms._wrap import TRANSFORMED

Argument: TypeAlias = int | str | DiffState
"""An argument: its position, its name, or a part of it."""

_FUNCTIONS = frozenset({_kinds.METHOD, _kinds.PARTIAL, FUNCTION, TRANSFORMED})


def is_state_for(kind: Kind) -> bool:
    """Tell whether the derivative is a State: of objects, and of functions that hold arrays.

    All others keep their form.
    """
    return kind.is_object or kind in _FUNCTIONS


class GradientForm(NamedTuple):
    """The form of the derivatives of one argument. Static: it refers to no object or array."""

    graphdef: GraphDef
    edge: Edge  # to the argument
    name: str  # how the argument is called
    infos: tuple[tuple[int, LeafInfo], ...]  # of each leaf that is differentiated

    def fill(self, grads: Mapping[int, Any]) -> Any:
        """Return derivatives in the form of the argument: a State for each object.

        Leaves that belong to an earlier argument are None here, and absent from States.

        Arguments:
            grads: the derivative for each number of a leaf.
        """
        own = {number: grads[number] for number, _ in self.infos}
        entries = self.graphdef.entries
        made: dict[int, Any] = {}  # containers that several places share are made once

        def resolve(edge: Any) -> Any:
            if type(edge) is not int:
                return None
            return made[edge] if edge >= 0 else own.get(~edge)

        order, paths = self._containers()
        for index in order:  # nodes first, empty: they can be part of a cycle
            kind, cls, extra, _, _ = entries[index]
            if is_state_for(kind):
                made[index] = self._state_below(paths[index], own)
            elif kind.identity:
                made[index] = kind.create(cls, extra)
        for index in order:
            kind, cls, extra, keys, edges = entries[index]
            if not kind.identity and not is_state_for(kind):
                made[index] = kind.build(cls, extra, keys, [resolve(edge) for edge in edges])
        for index in order:
            kind, _, extra, keys, edges = entries[index]
            if kind.identity and not is_state_for(kind):
                kind.complete(made[index], extra, keys, [resolve(edge) for edge in edges])
        return resolve(self.edge)

    def _containers(self) -> tuple[list[int], dict[int, tuple[Any, ...]]]:
        """Return the entries of the result, children of values first, and a path to each."""
        paths: dict[int, tuple[Any, ...]] = {}
        pending = [Visit(None, -1, 0, self.edge, True, -1)]
        while pending:
            visit = pending.pop()
            edge = visit.edge
            if type(edge) is int and edge >= 0 and edge not in paths:
                paths[edge] = visit.path
                if not is_state_for(self.graphdef.entries[edge].kind):
                    pending += reversed([*self.graphdef.children(edge, visit.link, -1)])
        return sorted(paths, reverse=True), paths  # the children of a value have higher indices

    def _state_below(self, path: tuple[Any, ...], grads: dict[int, Any]) -> State:
        depth = len(path)
        below = [(n, info) for n, info in self.infos if info.path[:depth] == path]
        infos = [info._replace(path=info.path[depth:]) for _, info in below]
        return State(LeafInfos(infos), tuple([grads[n] for n, _ in below]))


class _Selection:
    """The leaves of one argument that are differentiated.

    Arguments:
        flat: the call.
        edge: to the argument.
        name: how it is called.
        wanted: a filter, or None: `Param` on objects, inexact arrays elsewhere.
        taken: leaves that belong to earlier arguments; its own are added.
        allow_int: whether integer arrays are accepted where a filter selects them.
    """

    def __init__(
        self, flat: Flat, edge: Edge, name: str, wanted: Any, taken: set[int], *, allow_int: bool
    ) -> None:
        self._flat, self._name = flat, name
        self._matches = to_predicate(Param if wanted is None else wanted)
        self._default = wanted is None
        self._allow_int = allow_int
        objects = _below_objects(flat, edge)
        infos: list[tuple[int, LeafInfo]] = []
        seen: list[LeafInfo] = []
        for visit in leaves_below(flat.graphdef, edge):
            number = ~cast("int", visit.edge)
            info = _info(flat.graphdef, visit)
            seen.append(info)
            if number not in taken and self._wants(number, info, visit.parent in objects):
                taken.add(number)
                infos.append((number, info))
        self._seen = seen
        self.form = GradientForm(flat.graphdef, edge, name, tuple(infos))

    def _wants(self, number: int, info: LeafInfo, on_object: bool) -> bool:
        leaf = self._flat.leaves[number]
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if self._default and not on_object:
            return _is_inexact(dtype)
        if not self._matches(info.path, self._flat.owner(number)):
            return False
        if not self._allow_int and not _is_inexact(dtype):
            raise FilterError(
                f"{self._name}{path_text(info.path)}: cannot differentiate {dtype}"
                f" (kind {info.kind_text}); only floating point and complex arrays have "
                "gradients: use a filter that leaves it out"
            )
        return True

    def refuse_empty(self) -> None:
        """Raise `FilterError`: nothing is differentiated."""
        kinds = sorted({info.kind_text for info in self._seen}) or ["none"]
        what = "no leaf of kind Param and no inexact array" if self._default else "nothing"
        raise FilterError(
            bounded(
                f"{self._name}: {what} is selected to be differentiated. "
                f"The kinds that are there: {', '.join(kinds)}. "
                "Choose with `argnums=DiffState(argnum, filter)`"
            )
        )


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def leaves_below(graphdef: GraphDef, edge: Edge) -> Iterator[Visit]:
    """Yield the edges to leaves below an edge, each entry at its first path, in their order."""
    yield from sorted(_leaves_below(graphdef, edge), key=lambda visit: ~cast("int", visit.edge))


def _leaves_below(graphdef: GraphDef, edge: Edge) -> Iterator[Visit]:
    seen: set[int] = set()
    stack = [Visit(None, -1, 0, edge, True, -1)]
    while stack:
        visit = stack.pop()
        edge = visit.edge
        if type(edge) is not int:
            continue
        if edge < 0:
            yield visit
        elif edge not in seen:
            seen.add(edge)
            stack += reversed([*graphdef.children(edge, visit.link, visit.variable)])


def _info(graphdef: GraphDef, visit: Visit) -> LeafInfo:
    if visit.variable < 0:
        return LeafInfo(visit.path, jax.Array, ())
    entry = graphdef.entries[visit.variable]
    return LeafInfo(visit.path, entry.cls, entry.extra or ())


def _below_objects(flat: Flat, edge: Edge) -> set[int]:
    """Return the entries that are objects, or belong to one."""
    entries = flat.graphdef.entries
    below: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    pending: list[tuple[Edge, bool]] = [(edge, False)]
    while pending:
        found, inside = pending.pop()
        if type(found) is not int or found < 0:
            continue
        inside = inside or entries[found].kind.is_object
        if (found, inside) not in seen:
            seen.add((found, inside))
            if inside:
                below.add(found)
            pending += [(e, inside) for e in entries[found].edges]
    return below


class Differentiated:
    """What of a call is differentiated.

    Arguments:
        flat: the call.
        chosen: positions or names of arguments, or `DiffState`.
        count: how many positional arguments there are.
        names: returns those of the positional parameters of the function.
        allow_int: whether integer arrays are accepted where a filter selects them.
        each: whether each argument must have something of its own to be differentiated, rather
            than any of them.

    Raises:
        FilterError: nothing is selected, or something that has no gradient.
        StructureError: there is no such argument.
    """

    __slots__ = ("forms", "numbers")

    def __init__(
        self,
        flat: Flat,
        chosen: Sequence[Argument],
        count: int,
        names: Callable[[], Iterable[str]] = tuple,
        *,
        allow_int: bool = False,
        each: bool = True,
    ) -> None:
        find = _Arguments(flat.graphdef, count, names).find
        taken: set[int] = set()
        parts: list[_Selection] = []
        for one in chosen:
            argnum, wanted = one if isinstance(one, DiffState) else (one, None)
            part = _Selection(flat, *find(argnum), wanted, taken, allow_int=allow_int)
            if each and not taken:
                part.refuse_empty()
            parts.append(part)
        if parts and not taken:
            parts[0].refuse_empty()
        self.forms = tuple([part.form for part in parts])
        self.numbers = [number for form in self.forms for number, _ in form.infos]
        """The leaves, in the order in which their derivatives are taken."""

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what is differentiated; Python floats become arrays."""
        return [as_inexact(leaves[number]) for number in self.numbers]

    def insert(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Return leaves with what is differentiated in its places."""
        full = list(leaves)
        for number, leaf in zip(self.numbers, inputs, strict=True):
            full[number] = leaf
        return full

    def derivatives(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return derivatives, given for each leaf, in the form of each argument."""
        by_number = dict(zip(self.numbers, values, strict=True))
        return tuple([form.fill(by_number) for form in self.forms])


class _Arguments:
    """Find an argument by the position or the name of its parameter, however it was passed."""

    def __init__(self, graphdef: GraphDef, count: int, names: Callable[[], Iterable[str]]) -> None:
        self._edges, self._count, self._names = argument_edges(graphdef), count, names
        root: Any = graphdef.root
        kwargs: Any = graphdef.entries[graphdef.entries[root].edges[2]]  # type: ignore[index]
        self._kwargs: dict[Any, Edge] = dict(zip(kwargs.keys, kwargs.edges, strict=True))

    def find(self, argument: Any) -> tuple[Edge, str]:
        """Return the edge to an argument, and how it is called."""
        if isinstance(argument, bool) or not isinstance(argument, (int, str)):
            raise StructureError(f"argnums holds positions, names or DiffState, not {argument!r}")
        count = self._count
        if isinstance(argument, int) and -count <= argument < count:  # most often
            return self._edges[argument % count], f"args[{argument % count}]"
        names = list(self._names())
        name, at = argument, argument
        if isinstance(argument, str):
            at = names.index(argument) if argument in names else count
        elif 0 <= argument < len(names):
            name = names[argument]
        if isinstance(at, int) and -count <= at < count:
            return self._edges[at % count], f"args[{at % count}]"
        if name in self._kwargs:
            return self._kwargs[name], f"kwargs[{name!r}]"
        raise StructureError(
            bounded(
                f"argnums has {argument!r}, but the function was called with {count} positional "
                f"arguments and the keyword arguments {list(self._kwargs)}; what is "
                "differentiated has to be passed, defaults do not count"
            )
        )


def argument_edges(graphdef: GraphDef) -> tuple[Edge, ...]:
    """Return the edges to the positional arguments of a call."""
    call: Any = graphdef.root
    args: Any = graphdef.entries[call].edges[1]
    return graphdef.entries[args].edges if type(args) is int else ()


def as_inexact(leaf: Any) -> Any:
    """Make a Python float an array, so that it is differentiated as one."""
    return jnp.asarray(leaf) if isinstance(leaf, (float, complex, np.generic)) else leaf


def listed(argnums: Any) -> tuple[bool, tuple[Argument, ...]]:
    """Return whether `argnums` is one argument, and all of them."""
    if isinstance(argnums, DiffState) or not isinstance(argnums, (tuple, list)):
        return True, (argnums,)
    return False, tuple(cast("Sequence[Any]", argnums))
