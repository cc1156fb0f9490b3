"""The walk: from objects to entries and leaves, with an explicit stack.

A `Walk` numbers every node once, in the order of discovery, and every value once for each place. It
can be asked for several edges; what they share is found. Seeded with known objects it encodes what
is new only, which is how the inside of a transform says what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

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


class _Frame:
    """An entry whose children are being encoded."""

    __slots__ = ("cls", "edges", "extra", "index", "keys", "kind", "numbers", "rest", "variable")

    def __init__(
        self,
        index: int,
        kind: Kind,
        cls: Any,
        contents: Contents,
        *,
        numbers: bool,
        variable: str | None = None,
    ) -> None:
        self.index, self.kind, self.cls = index, kind, cls
        self.variable = variable  # the class of the Variable around, for error messages
        self.extra, self.keys, values = contents
        self.edges: list[Edge] = []
        self.rest: Iterator[Any] = iter(values)
        self.numbers = numbers if kind.numbers is None else kind.numbers


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
        self.entries: list[Entry | None] = []
        self.leaves: list[Any] = []
        self._variable_numbers = variable_numbers
        self._refs: dict[int, int] = {}
        self._stack: list[_Frame] = []

    def edge(self, obj: Any, name: str = "", *, numbers: bool = False) -> Edge:
        """Return the edge to an object, encoding what it reaches and what is new.

        Arguments:
            obj: any object.
            name: how error messages call it.
            numbers: whether Python numbers in containers are leaves here.

        Raises:
            NodeTypeError: for an object that can be neither walked nor compared.
        """
        frame = _Frame(-1, _kinds.LIST, None, (None, range(1), (obj,)), numbers=numbers)
        return self._run(frame, name)[0]

    def entry(self, obj: Any, contents: Contents, variable: str | None = None) -> Entry:
        """Encode a known object whose contents have changed, and what it reaches that is new.

        Arguments:
            obj: the object.
            contents: what it holds now.
            variable: the class of the Variable whose value it belongs to.
        """
        kind = _classify.rule_of(obj)
        assert isinstance(kind, Kind)
        if kind.is_variable:
            variable = type(obj).__name__
        numbers = variable is not None and self._variable_numbers
        frame = _Frame(-1, kind, type(obj), contents, numbers=numbers, variable=variable)
        edges = self._run(frame, "")
        return Entry(kind, type(obj), contents[0], contents[1], tuple(edges))

    def _run(self, frame: _Frame, name: str) -> list[Edge]:
        root = frame
        stack = self._stack
        stack.append(frame)
        try:
            while True:
                child = self._encode_children(frame)
                if child is not None:
                    frame = child
                    stack.append(frame)
                    continue
                stack.pop()
                if frame is root:
                    return frame.edges
                self.entries[frame.index - self.base] = Entry(
                    frame.kind, frame.cls, frame.extra, frame.keys, tuple(frame.edges)
                )
                frame = stack[-1]
        except (NodeTypeError, StaticValueError) as error:
            where = f"{name}{self._path()}".lstrip(".")
            raise type(error)(bounded(f"{where}: {error}" if where else str(error))) from None
        finally:
            stack.clear()

    def _encode_children(self, frame: _Frame) -> _Frame | None:
        """Encode children until one has to be opened; return its frame, or None at the end."""
        edges, ids, rules = frame.edges, self.ids, RULES
        for x in frame.rest:
            cls: Any = type(x)
            rule = rules.get(cls)
            if rule is None:
                rule = _classify.rule_of(x)
            if rule is LEAF:
                edges.append(self._leaf(x))
                continue
            if OPEN and isinstance(rule, Kind) and rule.identity and id(x) not in ids:
                x = here(x) if rule is VARIABLE else object_here(x)
            if rule is VARIABLE and rules.get(type(x._value)) is LEAF:
                edges.append(ids[id(x)] if id(x) in ids else self._variable(x, cls, frame))
            elif isinstance(rule, Kind):
                if rule.identity or self.base:
                    index = ids.get(id(x))
                    if index is not None:
                        if frame.variable is not None:
                            self._check_holds_arrays(index, frame.variable)
                        edges.append(index)
                        continue
                if cls is tuple and not frame.numbers and _is_plain(x):
                    edges.append(_static.encode(x))
                    continue
                return self._open(frame, x, cls, rule)
            elif rule is REF:
                edges.append(self._ref(x))
            elif rule is NUMBER and frame.numbers:
                edges.append(self._leaf(x))
            else:
                edges.append(self._static(x, rule, frame))
        return None

    def _open(self, parent: _Frame, x: Any, cls: Any, kind: Kind) -> _Frame:
        index = self.base + len(self.entries)
        variable, numbers = parent.variable, parent.numbers
        if variable is not None:
            self._check_no_object(kind, cls, variable)
        contents = kind.open(x)
        if kind.is_variable:
            variable, numbers = cls.__name__, self._variable_numbers
        if kind.identity:
            self.ids[id(x)] = index
        self.objects.append(x)
        self.contents.append(contents)
        self.entries.append(None)
        parent.edges.append(index)
        return _Frame(index, kind, cls, contents, numbers=numbers, variable=variable)

    def _check_holds_arrays(self, index: int, variable: str) -> None:
        """Raise if a container that is part of the value of a Variable holds an object."""
        pending, seen = [index], set[int]()
        while pending:
            i = pending.pop() - self.base
            entry = self.entries[i] if i >= 0 else None  # else: checked where it was split
            if entry is not None and i not in seen:
                seen.add(i)
                self._check_no_object(entry.kind, entry.cls, variable)
                pending += [e for e in entry.edges if type(e) is int and e >= 0]

    def _check_no_object(self, kind: Kind, cls: Any, variable: str) -> None:
        if kind.is_object:
            raise NodeTypeError(
                f"this is a {cls.__name__} inside the value of a {variable}; a Variable holds "
                "arrays and containers of arrays: hold the object as an attribute"
            )

    def _variable(self, x: Any, cls: Any, parent: _Frame) -> int:
        """Encode a Variable that holds one array: the common case, without a frame."""
        if parent.variable is not None:
            self._open(parent, x, cls, VARIABLE)  # raises
        contents = VARIABLE.open(x)
        edges = (self._leaf(x._value),)
        index = self.base + len(self.entries)
        self.ids[id(x)] = index
        self.objects.append(x)
        self.contents.append(contents)
        self.entries.append(Entry(VARIABLE, cls, contents[0], contents[1], edges))
        return index

    def _leaf(self, x: Any) -> int:
        leaves = self.leaves
        if type(x) is np.ndarray and (
            x.dtype.kind not in _LEAF_DTYPES or x.dtype.type is np.void  # not bfloat16 and such
        ):
            raise NodeTypeError(
                f"a numpy array of dtype {x.dtype} cannot be traced; hold numbers, or a tuple "
                "of static values"
            )
        leaves.append(x)
        return ~(len(leaves) - 1)

    def _ref(self, x: Any) -> int:
        """Return the leaf of a mutable array, which is passed once."""
        known = self._refs.setdefault(id(x), len(self.leaves))
        if known == len(self.leaves):
            self.leaves.append(x)
        return ~known

    def _static(self, x: Any, rule: Any, frame: _Frame) -> Edge:
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
        if frame.variable is not None and rule is not NUMBER and x is not None:
            raise NodeTypeError(
                f"this is a {type(x).__name__} inside the value of a {frame.variable}; a Variable "
                "holds arrays and containers of arrays: hold a static value as a plain attribute "
                "or as metadata"
            )
        assert rule is STATIC or rule is NUMBER or rule is UNKNOWN
        return _static.encode(x)

    def _opaque(self, x: Any) -> Edge:
        _, keys, values = _kinds.OBJECT.open(x)
        encoded = tuple([_static.encode(value) for value in values])
        return (_static.OPAQUE, type(x), Opaque(x), keys, encoded)

    def _path(self) -> str:
        """Return how the place that is being encoded is written."""
        frames = self._stack
        done = [len(frame.edges) - 1 for frame in frames[:-1]] + [len(frames[-1].edges)]
        return "".join(
            [
                frame.kind.show_key(frame.keys[position])
                for frame, position in zip(frames, done, strict=True)
                if frame.cls is not None
            ]
        )


def _is_plain(x: tuple[Any, ...]) -> bool:
    exact = _static.EXACT_BY_TYPE
    return all([type(element) in exact for element in x])  # noqa: C419 - see `_DictKind.open`
