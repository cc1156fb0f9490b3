"""Many values of one form, read by columns: the layers in a list, what each of them holds.

A model of dataclasses can tell nobody that it was written, so all of it is looked at on every call.
Object by object that takes a line of Python for each; here it is a few calls in C for each place
in the form: all the classes, all the names, then all first attributes, all second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from anabranch._source import Source
from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.transforms._rows import Rows

LONG = 10
"""Children of one form from which on they are read by columns."""
_DEPTH = 16
_LEAF, _STATIC, _IDENTICAL = "leaf", "static", "identical"


def leaf_types(numbers: bool) -> frozenset[type]:
    """Return the types of what JAX takes for arrays, and Python numbers if they are."""
    leaf = (_classify.LEAF, _classify.NUMBER) if numbers else (_classify.LEAF,)
    return frozenset([cls for cls, rule in [*_classify.RULES.items()] if rule in leaf])


def have_types(source: Source, name: str, leaves: Sequence[Any], *, numbers: bool) -> str:
    """Return the condition that a list holds leaves; most often of the types that there were."""
    types, known = source.constant([*map(type, leaves)]), source.constant(leaf_types(numbers))
    return f"[*map(type, {name})] == {types} or {known}.issuperset(map(type, {name}))"


def has_plain_attributes(x: Any) -> bool:
    """Tell whether all attributes of an object are in its dictionary."""
    cls: Any = type(x)
    plain = cls.__getattribute__ is object.__getattribute__ and hasattr(x, "__dict__")
    return plain and not _module.slot_names(cls)


def form_of(x: Any, *, numbers: bool, depth: int = _DEPTH) -> Hashable:
    """Return what values have in common that can be read by columns; None if this one cannot.

    Arguments:
        x: a value.
        numbers: whether Python numbers are leaves.
        depth: how many levels are looked at.
    """
    cls: Any = type(x)
    rule = _classify.RULES.get(cls)
    if rule is _classify.LEAF or (rule is _classify.NUMBER and numbers):
        return _LEAF
    if cls in _static.EXACT_BY_TYPE:
        return _STATIC, cls
    if cls in (float, complex):
        return _IDENTICAL, cls
    if depth == 0:
        return None
    if rule is _kinds.VARIABLE:
        value = form_of(x._value, numbers=True, depth=depth - 1)
        return (cls, value) if value == _LEAF else None
    if rule is _kinds.OBJECT or rule is _kinds.FROZEN:
        if not has_plain_attributes(x):
            return None
        names, children = (*vars(x),), vars(x).values()
        numbers = numbers and rule is _kinds.FROZEN
    elif cls is dict:
        names, children = (*x,), x.values()
        if any(type(name) is not str for name in names):
            return None
    elif cls is list or rule is _kinds.TUPLE:
        names, children = len(x), x
    else:
        return None
    forms = (*[form_of(child, numbers=numbers, depth=depth - 1) for child in children],)
    return None if None in forms else (cls, names, forms)


class Column(NamedTuple):
    """Every so many elements of a list."""

    name: str  # of the list
    width: int  # of its rows
    position: int

    @property
    def expression(self) -> str:
        """The elements."""
        whole = self.width == 1
        return self.name if whole else f"{self.name}[{self.position}::{self.width}]"

    def element(self, row: int) -> str:
        """Return one of them."""
        return f"{self.name}[{row * self.width + self.position}]"


class Part(NamedTuple):
    """What values in one place of a form hold, first to last."""

    leaves: list[Column]
    nodes: list[Column]


class Columns:
    """Adds the lines that compare values of one form.

    Where all that stands beside each other is of one kind, it is compared at once, row by row: then
    what comes out last is the list of all arrays, in their order.

    Arguments:
        source: where the lines go.
        name: of the variable that holds a list of the values.
        rows: what it held when the plan was made.
        numbers: whether Python numbers are leaves.
    """

    def __init__(self, source: Source, name: str, rows: Sequence[Any], *, numbers: bool) -> None:
        self._source = source
        source.names["chain"] = chain.from_iterable
        self.lists: list[str] = []  # of nodes
        ((self.leaves, self.nodes),) = self._compare(name, rows, 1, numbers=numbers)

    def join(self) -> str | None:
        """Return the name of a list of all leaves, row by row; None if there are none."""
        columns = self.leaves
        if not columns:
            return None
        name, width, _ = columns[0]
        if columns == [Column(name, width, i) for i in range(width)]:
            return name
        joined = self._source.fresh()
        parts = ", ".join([column.expression for column in columns])
        self._source.add(f"{joined} = [*chain(zip({parts}))]")
        return joined

    def _compare(
        self, name: str, values: Sequence[Any], width: int, *, numbers: bool
    ) -> list[Part]:
        """Compare rows of values.

        Arguments:
            name: of a list of them.
            values: what it held.
            width: of the rows.
            numbers: whether Python numbers are leaves.

        Returns:
            What is in each place of a row.
        """
        source, row = self._source, values[:width]
        columns = [Column(name, width, i) for i in range(width)]
        if all(_is_leaf(x, numbers=numbers) for x in row):
            source.unless(have_types(source, name, values, numbers=numbers))
            return [Part([column], []) for column in columns]
        for kind in (_kinds.OBJECT, _kinds.FROZEN, _kinds.DICT):
            if all(_classify.RULES.get(type(x)) is kind for x in row):
                numbers = numbers and kind is not _kinds.OBJECT
                return self._compare_attributes(columns, values, kind, numbers=numbers)
        if width == 1:
            return [self._compare_column(name, values, numbers=numbers)]
        found: list[Part] = []
        for column in columns:
            part = source.fresh()
            source.add(f"{part} = {column.expression}")
            found += self._compare(part, values[column.position :: width], 1, numbers=numbers)
        return found

    def _compare_attributes(
        self, columns: Sequence[Column], values: Sequence[Any], kind: Any, *, numbers: bool
    ) -> list[Part]:
        """Compare rows of dictionaries, or of objects with attributes."""
        source, name, every = self._source, columns[0].name, self._source.fresh()
        held = [x if kind is _kinds.DICT else vars(x) for x in values]
        rows = Rows(values, held, are_dictionaries=kind is _kinds.DICT)
        source.add(f"{every} = {source.constant(rows.read)}({name})")
        source.unless(f"{every} is not None")
        sizes = [len(part) for part in held[: len(columns)]]
        children = [x for part in held for x in part.values()]
        parts = self._compare(every, children, sum(sizes), numbers=numbers) if children else []
        if kind is not _kinds.FROZEN:
            self.lists.append(name)
        found: list[Part] = []
        for column, size in zip(columns, sizes, strict=True):
            own, parts = parts[:size], parts[size:]
            nodes = [] if kind is _kinds.FROZEN else [column]
            leaves = [leaf for part in own for leaf in part.leaves]
            found.append(Part(leaves, nodes + [node for part in own for node in part.nodes]))
        return found

    def _split(
        self, expression: str, children: Sequence[Any], width: int, *, numbers: bool
    ) -> list[Part]:
        """Compare what containers hold."""
        source = self._source
        if not width:
            return []
        every = source.fresh()
        source.add(f"{every} = [*chain({expression})]")
        source.unless(f"len({every}) == {len(children)}")
        return self._compare(every, children, width, numbers=numbers)

    def _compare_column(self, name: str, values: Sequence[Any], *, numbers: bool) -> Part:
        """Compare values that are no leaves, and have no names."""
        source, x = self._source, values[0]
        cls: Any = type(x)
        if cls in (float, complex):
            self._compare_identities(name, values)
            return Part([], [])
        source.unless(f"[*map(type, {name})] == {source.constant([*map(type, values)])}")
        if cls in _static.EXACT_BY_TYPE:
            source.unless(f"[*{name}] == {source.constant([*values])}")
            return Part([], [])
        own = Column(name, 1, 0)
        if _classify.RULES.get(cls) is _kinds.VARIABLE:
            metadata, arrays = source.fresh(), source.fresh()
            source.add(f"{metadata} = [v._metadata for v in {name}]")
            self._compare_identities(metadata, [x._metadata for x in values])
            source.add(f"{arrays} = [v._value for v in {name}]")
            parts = self._compare(arrays, [x._value for x in values], 1, numbers=True)
        else:
            source.unless(f"[*map(len, {name})] == {source.constant([*map(len, values)])}")
            children = [*chain.from_iterable(values)]
            parts = self._split(name, children, len(x), numbers=numbers)
        nodes = [node for part in parts for node in part.nodes]
        if cls is not tuple and _classify.RULES.get(cls) is not _kinds.TUPLE:
            self.lists.append(name)
            nodes = [own, *nodes]
        return Part([leaf for part in parts for leaf in part.leaves], nodes)

    def _compare_identities(self, name: str, values: Sequence[Any]) -> None:
        self._source.unless(f"all(map(is_, {name}, {self._source.constant([*values])}))")


def _is_leaf(x: Any, *, numbers: bool) -> bool:
    rule = _classify.RULES.get(type(x))
    return rule is _classify.LEAF or (rule is _classify.NUMBER and numbers)


def runs_of(
    children: Sequence[Any], apart: Collection[int], *, numbers: bool
) -> list[tuple[int, int]]:
    """Return where long runs of children of one form start and end.

    Arguments:
        children: values.
        apart: the ids of those that belong to no run.
        numbers: whether Python numbers are leaves.
    """
    forms = [None if id(x) in apart else form_of(x, numbers=numbers) for x in children]
    found: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(forms) + 1):
        if end == len(forms) or forms[end] is None or forms[end] != forms[start]:
            if end - start >= LONG and forms[start] is not None:
                found.append((start, end))
            start = end
    return found
