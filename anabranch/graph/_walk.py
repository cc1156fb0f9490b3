"""The walk: from objects to tokens and leaves, with an explicit stack.

A `Walk` numbers every node once, in the order of discovery, and every value once for each place. It
can be given several objects; what they share is found. Seeded with known objects it encodes what
is new only, which is how the inside of a transform says what has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from anabranch.errors import NodeTypeError, StaticValueError, bounded
from anabranch.graph import _classify, _kinds, _static, _table
from anabranch.graph._classify import LEAF, NUMBER, OPAQUE, READERS, REF, RULES, STATIC, UNKNOWN
from anabranch.graph._kinds import Kind
from anabranch.graph._readers import Reader, add_reader
from anabranch.graph._scope import OPEN, here, object_here
from anabranch.graph._table import Edge, Entry, Spec, spec_of, unfinished
from anabranch.graph._variable import NO_METADATA

Contents: TypeAlias = "tuple[Any, Sequence[Any], Sequence[Any]]"

VARIABLE = _kinds.VARIABLE
_VALUE = ("value",)

_CELLS: dict[type, Spec] = {}
"""The specs of Variables without metadata, by class."""


class Opaque:
    """An opaque static object in an edge: equal only to itself."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __hash__(self) -> int:
        return id(self.obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.obj is self.obj


class Walk:
    """Encode objects into tokens.

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
        self.tokens: list[Any] = []
        self.objects: list[Any] = []  # by index; keeps what `ids` refers to alive
        self.held: dict[int, Sequence[Any]] = {}  # by index; else one value, which is a leaf
        self.leaves: list[Any] = []
        self._variable_numbers = variable_numbers
        self._refs: dict[int, int] = {}
        self.rest: Sequence[Any] = ()  # what is left of what a reader has read
        self._first_leaf = 0  # leaves are numbered from here

    def begin(self) -> tuple[int, int, int]:
        """Let leaves count from zero again.

        Returns:
            How many tokens, objects and leaves there are.
        """
        self._first_leaf = len(self.leaves)
        return len(self.tokens), len(self.objects), self._first_leaf

    def table(self) -> tuple[list[Entry], list[Edge]]:
        """Return the entries, and the edges to what was added."""
        return _table.read(self.tokens, self.base)

    def add(self, obj: Any, name: str = "", *, numbers: bool = False) -> None:
        """Encode an object, and what it reaches that is new: one edge.

        Arguments:
            obj: any object.
            name: how error messages call it.
            numbers: whether Python numbers in containers are leaves here.

        Raises:
            NodeTypeError: for an object that can be neither walked nor compared.
        """
        self._run((obj,), numbers, None, lambda _: name)

    def add_leaf(self, leaf: Any) -> None:
        """Encode an array, of which nothing is to be checked any more."""
        self.tokens.append(_table.LEAF)
        self.leaves.append(leaf)

    def add_contents(
        self,
        obj: Any,
        contents: Contents,
        variable: str | None = None,
        name: Callable[[], str] = str,
    ) -> None:
        """Encode what a known object holds, and what it reaches that is new: an edge for each key.

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
        _, keys, values = contents
        self._run(values, numbers, variable, lambda done: kind.show_below(name(), keys[done]))

    def _run(
        self,
        values: Sequence[Any],
        numbers: bool,
        variable: str | None,
        name: Callable[[int], str],
    ) -> None:
        """Encode objects, given how messages call each of them."""
        tokens, objects, leaves = len(self.tokens), len(self.objects), len(self.leaves)
        try:
            self._encode(values, numbers, variable)
        except BaseException as error:
            expected = isinstance(error, (NodeTypeError, StaticValueError))
            where = self._where(tokens, name) if expected else ""
            self._forget(tokens, objects, leaves)
            if not expected:
                raise
            raise type(error)(bounded(f"{where}: {error}" if where else str(error))) from None

    def _encode(  # noqa: PLR0915 - in one loop, since a call for each object is what is saved
        self, values: Sequence[Any], numbers: bool, variable: str | None
    ) -> None:
        ids, objects, leaves = self.ids, self.objects, self.leaves
        rules, cells, new_leaf = RULES, _CELLS, _table.LEAF
        # inside of a transform, static values are looked up one by one
        readers: dict[type, Reader] = READERS if self._located is None else {}
        tokens, base, stack, no_metadata = self.tokens, self.base, list[Any](), NO_METADATA
        index, rest, array = base + len(objects), iter(values), None
        while True:
            for x in rest:
                of: Any = type(x)
                spec = cells.get(of)
                if spec is not None and variable is None:
                    if OPEN and id(x) not in ids:
                        x = here(x, x._token)
                    value = x._value
                    inner = type(value)
                    if inner is array or (rules.get(inner) or _classify.rule_of(value)) is LEAF:
                        # a Variable that holds one array: the common case, closed at once
                        if inner is np.ndarray:
                            _check_dtype(value)
                        if inner is not array and inner in rules:  # else it may be a Ref, too
                            array = inner  # most are alike
                        if x._metadata is not no_metadata or type(x) is not of:
                            spec = spec_of(VARIABLE, type(x), VARIABLE.open(x)[0], _VALUE)
                        known = ids.setdefault(id(x), index)
                        if known != index:
                            tokens.append(known)
                            continue
                        index += 1
                        objects.append(x)
                        leaves.append(value)
                        tokens.append(spec)
                        tokens.append(new_leaf)
                        continue
                reader = readers.get(of)
                if reader is not None and variable is None and not OPEN:
                    index = reader.read(x, index, self) or reader.read_otherwise(x, index, self)
                    if self.rest:
                        stack.append((rest, numbers, None))
                        rest, numbers, self.rest = iter(self.rest), False, ()
                        break
                    continue
                rule: Any = rules.get(of) or _classify.rule_of(x)
                if rule is LEAF:
                    if of is np.ndarray:
                        _check_dtype(x)
                    leaves.append(x)
                    tokens.append(new_leaf)
                elif not isinstance(rule, Kind):
                    tokens.append(self._end(x, rule, numbers, variable))
                elif (opened := self._open(x, rule, numbers, variable)) is not None:
                    index = base + len(objects)
                    stack.append((rest, numbers, variable))
                    rest = iter(opened)
                    if rule.is_variable:
                        variable, numbers = of.__name__, self._variable_numbers
                    if rule.numbers is not None:
                        numbers = rule.numbers
                    break
            else:
                if not stack:
                    return
                rest, numbers, variable = stack.pop()

    def _open(
        self, x: Any, kind: Kind, numbers: bool, variable: str | None
    ) -> Sequence[Any] | None:
        """Begin an entry and return what the object holds; None if the entry is complete."""
        ids, add = self.ids, self.tokens.append
        if kind.identity and OPEN and id(x) not in ids:
            x = here(x, kind.token(x)) if kind.is_variable else object_here(x)
        known = ids.get(id(x)) if kind.identity or self.base else None
        if known is not None:
            if variable is not None:
                self._check_holds_arrays(x, variable)
            return add(known)
        cls = type(x)
        if variable is not None:
            self._check_no_object(kind, cls, variable)
        if cls is tuple and not numbers and _is_plain(x):
            return add(_static.encode(x))
        extra, keys, values = kind.open(x)
        if cls is defaultdict:
            _check_factory(x.default_factory)
        spec = spec_of(kind, cls, extra, keys)
        if kind is VARIABLE:
            _CELLS[cls] = spec_of(kind, cls, None, _VALUE)
        else:
            add_reader(kind, cls)
        index = self.base + len(self.objects)
        if kind.identity:
            ids[id(x)] = index
        self.objects.append(x)
        self.held[index] = values
        add(spec)
        return values

    def _end(self, x: Any, rule: Any, numbers: bool, variable: str | None) -> Any:
        """Return the token for what is neither an array nor has contents."""
        if rule is REF:
            return self._ref(x)
        if rule is NUMBER and numbers:
            self.leaves.append(x)
            return _table.LEAF
        return self.static(x, rule, variable)

    def _where(self, start: int, name: Callable[[int], str]) -> str:
        """Return how the place that is being encoded is written."""
        (_, top), *around = unfinished(self.tokens[start:])
        text = name(top - 1 if around else top)
        for i, (spec, done) in enumerate(around, 1):
            assert spec is not None
            position = done if i == len(around) else done - 1
            text = spec.kind.show_below(text, spec.keys[position])
        return text.lstrip(".")

    def _forget(self, tokens: int, objects: int, leaves: int) -> None:
        """Go back to what there was before an error."""
        index = self.base + objects
        self.ids = {key: i for key, i in self.ids.items() if i < index}
        self.held = {i: values for i, values in self.held.items() if i < index}
        del self.tokens[tokens:], self.objects[objects:], self.leaves[leaves:]
        self._refs = {key: leaf for key, leaf in self._refs.items() if leaf < leaves}

    def _check_holds_arrays(self, x: Any, variable: str) -> None:
        """Raise if a container that is part of the value of a Variable holds an object."""
        pending, seen = [x], set[int]()
        while pending:
            x = pending.pop()
            rule = _classify.rule_of(x)
            if isinstance(rule, Kind) and id(x) not in seen:
                self._check_no_object(rule, type(x), variable)
                if self.ids.get(id(x), self.base) >= self.base:  # else: checked where it was split
                    seen.add(id(x))
                    pending += rule.open(x)[2]

    def _check_no_object(self, kind: Kind, cls: Any, variable: str) -> None:
        if kind.is_object:
            raise NodeTypeError(
                f"this is a {cls.__name__} inside the value of a {variable}; a Variable holds "
                "arrays and containers of arrays: hold the object as an attribute"
            )

    def _ref(self, x: Any) -> Any:
        """Return the token for a mutable array, which is passed once."""
        leaves = self.leaves
        known = self._refs.setdefault(id(x), len(leaves))
        if known == len(leaves):
            leaves.append(x)
            return _table.LEAF
        if known < self._first_leaf:
            raise NodeTypeError(
                "this jax.Ref was split before in this context, and would be passed twice: split "
                "what holds it at once"
            )
        return ~(known - self._first_leaf)

    def static(self, x: Any, rule: Any, variable: str | None = None) -> Edge:
        """Return the token for a static value, given what it is by its type."""
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


def contents_of(
    entries: Iterable[Entry], held: Mapping[int, Sequence[Any]], leaves: Sequence[Any]
) -> list[Contents]:
    """Return extra, keys and values of each object that was walked.

    Arguments:
        entries: of these objects.
        held: the values, by index; of an object that is missing, the value is a leaf.
        leaves: the leaves.
    """
    return [content_of(entry, held.get(i), leaves) for i, entry in enumerate(entries)]


def content_of(entry: Entry, values: Sequence[Any] | None, leaves: Sequence[Any]) -> Contents:
    """Return extra, keys and values of one object, whose value is a leaf if there are none."""
    if values is None:
        (edge,) = entry.edges
        assert type(edge) is int
        values = (leaves[~edge],)
    return entry.extra, entry.keys, values


def _check_dtype(x: Any) -> None:
    if not _classify.is_traceable(x):
        raise NodeTypeError(
            f"a numpy array of dtype {x.dtype} cannot be traced; hold numbers, or a tuple "
            "of static values"
        )


def _check_factory(factory: Any) -> None:
    walk = Walk()
    walk.add(factory)
    found = [x for x in walk.objects if _classify.is_object(x)]
    if found or walk.leaves:
        what = f"a {type(found[0]).__name__}" if found else "an array"
        raise NodeTypeError(
            f"this defaultdict makes its values with a function that reaches {what}, which would "
            "not be part of a copy: use a dict, and make what is missing where it is missed"
        )


def _is_plain(x: tuple[Any, ...]) -> bool:
    exact = _static.EXACT_BY_TYPE
    return all([type(element) in exact for element in x])  # noqa: C419 - see `_DictKind.open`
