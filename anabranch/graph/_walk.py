"""The walk: from objects to entries and leaves, with an explicit stack.

A `Walk` numbers every node once, in the order of discovery, and every value once for each place. It
can be asked for several edges; what they share is found. Seeded with known objects it encodes what
is new only, which is how the inside of a transform says what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from anabranch.errors import NodeTypeError, StaticValueError, bounded
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._classify import LEAF, NUMBER, OPAQUE, REF, RULES, STATIC, UNKNOWN
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kinds import Kind
from anabranch.graph._scope import OPEN, here, object_here

Contents: TypeAlias = "tuple[Any, Sequence[Any], Sequence[Any]]"

VARIABLE = _kinds.VARIABLE
_LEAF_DTYPES = frozenset("biufcV")


class Opaque:
    """An opaque static object in an edge: equal only to itself."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __hash__(self) -> int:
        return id(self.obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.obj is self.obj


class _Frame(NamedTuple):
    """An entry whose children are being encoded. Made as a plain tuple: there are many."""

    number: int  # its index
    kind: Kind
    cls: Any
    extra: Any
    keys: Sequence[Any]
    rest: Iterator[Any]
    edges: list[Edge]
    numbers: bool  # whether Python numbers are leaves here
    variable: str | None  # the class of the Variable around, for error messages


class Walk:
    """Encode objects into entries.

    Arguments:
        variable_numbers: whether Python numbers inside Variables are leaves.
        known: objects that already have indices `0, 1, ...`; they are not walked again.
        located: where the caller's objects hold static values, by identity. If given, the walk
            is inside a transform, and static values found there are referred to by their place:
            a cached trace must not bring back equal ones of another call.
    """

    def __init__(
        self,
        *,
        variable_numbers: bool = True,
        known: Sequence[Any] = (),
        located: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._located = located
        self.ids: dict[int, int] = {id(obj): i for i, obj in enumerate(known) if obj is not None}
        self.base = len(known)
        self.objects: list[Any] = []  # by index; keeps what `ids` refers to alive
        self.contents: list[Contents] = []
        self.rows: list[Any] = []  # the fields of each entry, None as long as it is open
        self.leaves: list[Any] = []
        self._variable_numbers = variable_numbers
        self._refs: dict[int, int] = {}
        self._stack: list[Any] = []  # the frames above the current one

    def table(self, start: int = 0) -> tuple[Entry, ...]:
        """Return the entries, all or those after some."""
        return tuple(map(Entry._make, self.rows[start:]))

    def edge(self, obj: Any, name: str = "", *, numbers: bool = False) -> Edge:
        """Return the edge to an object, encoding what it reaches and what is new.

        Arguments:
            obj: any object.
            name: how error messages call it.
            numbers: whether Python numbers in containers are leaves here.

        Raises:
            NodeTypeError: for an object that can be neither walked nor compared.
        """
        contents = (None, range(1), (obj,))
        return self._run(_kinds.LIST, None, contents, numbers, None, name)[0]

    def entry(
        self,
        obj: Any,
        contents: Contents,
        variable: str | None = None,
        name: Callable[[], str] = str,
    ) -> Entry:
        """Encode a known object whose contents have changed, and what it reaches that is new.

        Arguments:
            obj: the object.
            contents: what it holds now.
            variable: the class of the Variable whose value it belongs to.
            name: returns how error messages call it.

        Raises:
            NodeTypeError: for an object in it that can be neither walked nor compared.
        """
        kind = _classify.rule_of(obj)
        assert isinstance(kind, Kind)
        if kind.is_variable:
            variable = type(obj).__name__
        numbers = variable is not None and self._variable_numbers
        if kind.numbers is not None:
            numbers = kind.numbers
        edges = self._run(kind, type(obj), contents, numbers, variable, name)
        return Entry(kind, type(obj), contents[0], contents[1], tuple(edges))

    def _run(
        self,
        kind: Kind,
        cls: Any,
        contents: Contents,
        numbers: bool,
        variable: str | None,
        name: str | Callable[[], str],
    ) -> list[Edge]:
        """Encode the contents of an object; return an edge for each."""
        ids, rules, rows, stack = self.ids, RULES, self.rows, self._stack
        extra, keys, values = contents
        rest, edges, index = iter(values), list[Edge](), -1
        try:
            while True:
                for x in rest:
                    of: Any = type(x)
                    rule: Any = rules.get(of)
                    if rule is None:
                        rule = _classify.rule_of(x)
                    if rule is LEAF:
                        edges.append(self._leaf(x))
                        continue
                    if OPEN and isinstance(rule, Kind) and rule.identity and id(x) not in ids:
                        x = here(x, rule.token(x)) if rule.is_variable else object_here(x)
                    if rule is VARIABLE and variable is None and rules.get(type(x._value)) is LEAF:
                        edge = ids.get(id(x))
                        edges.append(self._variable(x, of) if edge is None else edge)
                        continue
                    edge = self._edge(x, rule, numbers, variable)
                    if edge is None:
                        break
                    edges.append(edge)
                else:
                    if not stack:
                        return edges
                    rows[index - self.base] = (kind, cls, extra, keys, tuple(edges))
                    index, kind, cls, extra, keys, rest, edges, numbers, variable = stack.pop()
                    continue
                contents = rule.open(x)
                opened = self.base + len(rows)
                edges.append(opened)
                stack.append((index, kind, cls, extra, keys, rest, edges, numbers, variable))
                index, kind, cls, (extra, keys, values) = opened, rule, of, contents
                rest, edges = iter(values), []
                if kind.identity:
                    ids[id(x)] = index
                self.objects.append(x)
                self.contents.append(contents)
                rows.append(None)
                if kind.is_variable:
                    variable, numbers = cls.__name__, self._variable_numbers
                if kind.numbers is not None:
                    numbers = kind.numbers
        except (NodeTypeError, StaticValueError) as error:
            stack.append((index, kind, cls, extra, keys, rest, edges, numbers, variable))
            called = name if isinstance(name, str) else name()
            where = self._path(called)
            raise type(error)(bounded(f"{where}: {error}" if where else str(error))) from None
        finally:
            stack.clear()

    def _edge(self, x: Any, rule: Any, numbers: bool, variable: str | None) -> Edge | None:
        """Return the edge to what is known or has no contents, None if it has to be opened."""
        if isinstance(rule, Kind):
            if rule.identity or self.base:
                known = self.ids.get(id(x))
                if known is not None:
                    if variable is not None:
                        self._check_holds_arrays(known, variable)
                    return known
            if variable is not None:
                self._check_no_object(rule, type(x), variable)
            plain = type(x) is tuple and not numbers and _is_plain(x)
            return _static.encode(x) if plain else None
        if rule is REF:
            return self._ref(x)
        if rule is NUMBER and numbers:
            return self._leaf(x)
        return self._static(x, rule, variable)

    def _check_holds_arrays(self, index: int, variable: str) -> None:
        """Raise if a container that is part of the value of a Variable holds an object."""
        pending, seen = [index], set[int]()
        while pending:
            i = pending.pop() - self.base
            row = self.rows[i] if i >= 0 else None  # else: checked where it was split
            if row is not None and i not in seen:
                seen.add(i)
                kind, cls, _, _, edges = row
                self._check_no_object(kind, cls, variable)
                pending += [e for e in edges if type(e) is int and e >= 0]

    def _check_no_object(self, kind: Kind, cls: Any, variable: str) -> None:
        if kind.is_object:
            raise NodeTypeError(
                f"this is a {cls.__name__} inside the value of a {variable}; a Variable holds "
                "arrays and containers of arrays: hold the object as an attribute"
            )

    def _variable(self, x: Any, cls: Any) -> int:
        """Encode a Variable that holds one array: the common case, closed at once."""
        extra, keys, (value,) = contents = VARIABLE.open(x)
        leaves, rows = self.leaves, self.rows
        if type(value) is np.ndarray:
            _check_dtype(value)
        self.ids[id(x)] = index = self.base + len(rows)
        self.objects.append(x)
        self.contents.append(contents)
        rows.append((VARIABLE, cls, extra, keys, (~len(leaves),)))
        leaves.append(value)
        return index

    def _leaf(self, x: Any) -> int:
        leaves = self.leaves
        if type(x) is np.ndarray:
            _check_dtype(x)
        leaves.append(x)
        return ~(len(leaves) - 1)

    def _ref(self, x: Any) -> int:
        """Return the leaf of a mutable array, which is passed once."""
        known = self._refs.setdefault(id(x), len(self.leaves))
        if known == len(self.leaves):
            self.leaves.append(x)
        return ~known

    def _static(self, x: Any, rule: Any, variable: str | None) -> Edge:
        if self._located is not None and type(x) not in _static.EXACT_BY_TYPE:
            place = self._located.get(id(x))
            if place is not None:
                return (_static.LOCATED, *place)
            if rule is not NUMBER:
                _classify.check_shareable(x)
        if rule is UNKNOWN:
            _classify.check_static(x)
        elif rule is OPAQUE:
            return self._opaque(x)
        if variable is not None and rule is not NUMBER and x is not None:
            raise NodeTypeError(
                f"this is a {type(x).__name__} inside the value of a {variable}; a Variable "
                "holds arrays and containers of arrays: hold a static value as a plain attribute "
                "or as metadata"
            )
        assert rule is STATIC or rule is NUMBER or rule is UNKNOWN
        return _static.encode(x)

    def _opaque(self, x: Any) -> Edge:
        _, keys, values = _kinds.OBJECT.open(x)
        encoded = tuple([_static.encode(value) for value in values])
        return (_static.OPAQUE, type(x), Opaque(x), keys, encoded)

    def _path(self, text: str) -> str:
        """Return how the place that is being encoded is written, after what it starts with."""
        frames = [*map(_Frame._make, self._stack)]
        done = [len(frame.edges) - 1 for frame in frames[:-1]] + [len(frames[-1].edges)]
        for frame, position in zip(frames, done, strict=True):
            if frame.cls is not None:
                text = frame.kind.show_below(text, frame.keys[position])
        return text.lstrip(".")


def _check_dtype(x: Any) -> None:
    if x.dtype.kind not in _LEAF_DTYPES or x.dtype.type is np.void:  # not bfloat16 and such
        raise NodeTypeError(
            f"a numpy array of dtype {x.dtype} cannot be traced; hold numbers, or a tuple "
            "of static values"
        )


def _is_plain(x: tuple[Any, ...]) -> bool:
    exact = _static.EXACT_BY_TYPE
    return all([type(element) in exact for element in x])  # noqa: C419 - see `_DictKind.open`
