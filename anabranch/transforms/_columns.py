"""Many values of one form, read by columns: the layers in a list, what each of them holds.

A model of dataclasses can tell nobody that it was written, so all of it is looked at on every call.
Object by object that takes a line of Python for each; here it is a few calls in C for each place
in the form: all the classes, all the names, then all first attributes, all second ones, and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.transforms._source import Source

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


class Columns:
    """Adds the lines that compare values of one form.

    Arguments:
        source: where they go.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        source.names.update(chain=chain.from_iterable, dict_values=dict[Any, Any].values)
        self.leaves: list[str] = []  # the columns of arrays, in the order of a row
        self.nodes: list[str] = []  # those of objects with identity
        self.numbers: list[bool] = []  # whether Python numbers are leaves, by column
        self._values: list[Sequence[Any]] = []

    def take(self, name: str, rows: Sequence[Any], *, numbers: bool) -> None:
        """Compare a column with what it was when the plan was made.

        Arguments:
            name: of the variable that holds the column.
            rows: what it held.
            numbers: whether Python numbers are leaves.
        """
        source, x = self._source, rows[0]
        cls: Any = type(x)
        rule = _classify.RULES.get(cls)
        if rule is _classify.LEAF or (rule is _classify.NUMBER and numbers):
            self.leaves.append(name)
            self.numbers.append(numbers)
            self._values.append(rows)
            return
        if cls in (float, complex):
            self._compare_identities(name, rows)
            return
        source.unless(f"[*map(type, {name})] == {source.constant([cls] * len(rows))}")
        if cls in _static.EXACT_BY_TYPE:
            source.unless(f"[*{name}] == {source.constant([*rows])}")
        elif rule is _kinds.VARIABLE:
            self._take_variables(name, rows)
        elif rule is _kinds.OBJECT or rule is _kinds.FROZEN:
            self._take_objects(name, rows, numbers=numbers and rule is _kinds.FROZEN)
        else:
            self._take_containers(name, rows, numbers=numbers)

    def join(self) -> str | None:
        """Add the lines that put all leaves in one list, row by row; return its name, if any."""
        source, columns = self._source, self.leaves
        if not columns:
            return None
        leaves = columns[0]
        if len(columns) > 1:
            leaves = source.fresh()
            source.add(f"{leaves} = [*chain(zip({', '.join(columns)}))]")
        every = all(self.numbers)
        if every == any(self.numbers):
            values = [*chain.from_iterable(zip(*self._values, strict=True))]
            source.unless(have_types(source, leaves, values, numbers=every))
        else:
            for column, values, numbers in zip(columns, self._values, self.numbers, strict=True):
                source.unless(have_types(source, column, values, numbers=numbers))
        return leaves

    def _compare_identities(self, name: str, rows: Sequence[Any]) -> None:
        self._source.unless(f"all(map(is_, {name}, {self._source.constant([*rows])}))")

    def _take_variables(self, name: str, rows: Sequence[Any]) -> None:
        source, metadata, values = self._source, self._source.fresh(), self._source.fresh()
        self.nodes.append(name)
        source.add(f"{metadata} = [v._metadata for v in {name}]")
        self._compare_identities(metadata, [x._metadata for x in rows])
        source.add(f"{values} = [v._value for v in {name}]")
        self.take(values, [x._value for x in rows], numbers=True)

    def _take_objects(self, name: str, rows: Sequence[Any], *, numbers: bool) -> None:
        source, attributes = self._source, self._source.fresh()
        if _classify.RULES[type(rows[0])] is _kinds.OBJECT:
            self.nodes.append(name)
        source.add(f"{attributes} = [x.__dict__ for x in {name}]")
        self._take_attributes(attributes, [*map(vars, rows)], numbers=numbers)

    def _take_containers(self, name: str, rows: Sequence[Any], *, numbers: bool) -> None:
        cls = type(rows[0])
        if cls in (list, dict):
            self.nodes.append(name)
        if cls is dict:
            self._take_attributes(name, rows, numbers=numbers)
        else:
            self._source.unless(f"{{*map(len, {name})}} == {self._source.constant({len(rows[0])})}")
            self._split(name, rows, numbers=numbers)

    def _take_attributes(self, name: str, rows: Sequence[dict[str, Any]], *, numbers: bool) -> None:
        """Compare a column of dictionaries."""
        source = self._source
        if not rows[0]:
            source.unless(f"not any({name})")
            return
        # as no dictionary has a name twice, all names together tell how many each of them has
        source.unless(f"[*chain({name})] == {source.constant([*rows[0]] * len(rows))}")
        self._split(f"map(dict_values, {name})", [[*row.values()] for row in rows], numbers=numbers)

    def _split(self, expression: str, rows: Sequence[Sequence[Any]], *, numbers: bool) -> None:
        """Compare columns of containers, element by element of the containers."""
        source, width = self._source, len(rows[0])
        if not width:
            return
        every = source.fresh()
        source.add("try:")
        source.add(f"{every} = [*chain({expression})]", 2)
        source.add("except RuntimeError: return AGAIN")  # somebody is writing one
        source.unless(f"len({every}) == {width * len(rows)}")
        for i, column in enumerate(zip(*rows, strict=True)):
            name = every
            if width > 1:
                name = source.fresh()
                source.add(f"{name} = {every}[{i}::{width}]")
            self.take(name, column, numbers=numbers)
