"""Read the objects of one class in a function that is written for what they hold.

Objects of one class are most often alike: the same names, Variables of the same kinds under them,
the same static values. When a few of them have been met, what a walk does with one is written out
as the source of a function. For a module with a weight and a bias it is

    def read(x, index, walk):
        if not (id(x) not in walk.ids): return 0
        a1 = attributes_of(x)
        a2, a3, = a1
        if not (a2 is "w" and a3 is "b"): return 0
        a4 = both(a1)
        a5, a6, = a4
        if not (type(a5) is Param and type(a6) is Param): return 0
        ...  # they hold arrays, have no metadata, and were not met before either
        walk.objects += (x, a5, a6,)
        walk.held[index] = a4
        walk.tokens += (Linear, Param, LEAF, Param, LEAF,)
        walk.leaves += (a7, a8,)
        return index + 3

Where something does not hold it returns 0, with nothing done, and the walk takes the object by
itself. What objects hold is read along with them, up to the first thing that such a function does
not know: from there on the walk goes on.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from anabranch._source import Source
from anabranch.graph import _classify, _kinds, _static, _table
from anabranch.graph._classify import LEAF, READERS, REF, RULES
from anabranch.graph._kind import Kind, items_of
from anabranch.graph._table import Spec, spec_of
from anabranch.graph._variable import NO_METADATA

if TYPE_CHECKING:
    from anabranch.graph._walk import Walk

Read: TypeAlias = "Callable[[Any, int, Walk], int]"

_VARIABLE = _kinds.VARIABLE
_VALUE = ("value",)
_PLAIN = frozenset({*_static.EXACT_BY_TYPE, float})  # compared as they are encoded
_FEW = 8  # objects of a class that are met before a function is written
_LONG = 1 << 20
_FILE = f"<{__name__}>"
_VARIANTS = 2  # functions of one class
_MOST = 48  # things that one function reads
_SMALL = 256  # bytes of a value that a function keeps
_CLASSES = 4096  # beyond which all functions are forgotten: some programs make class after class


def _no(x: Any, index: int, walk: Walk) -> int:
    return 0


class Reader:
    """Reads the objects of one class.

    Arguments:
        kind: of the objects, which store what they hold in a dictionary.
        cls: their class.
    """

    __slots__ = ("_cls", "_kind", "_patience", "_spec", "_storage", "_variants", "_wait", "read")

    def __init__(self, kind: Kind, cls: type) -> None:
        self._kind, self._cls = kind, cls
        self._storage: Any = kind.storage(cls)
        self._spec: Spec | None = None  # most are alike
        self._variants: list[Read] = []
        self._wait = self._patience = _FEW
        self.read: Read = _no
        """The function that fitted last: returns the index after the last object, or 0."""

    def read_otherwise(self, x: Any, index: int, walk: Walk) -> int:
        """Read an object that `read` does not fit."""
        known = walk.ids.get(id(x))
        if known is not None:
            walk.tokens.append(known)
            return index
        for read in self._variants:
            if read is not self.read and (after := read(x, index, walk)):
                self.read = read
                return after
        self._wait -= 1
        if self._wait <= 0:
            self._write(x, walk)
        keys, values = items_of(self._storage(x))
        spec = self._spec
        if spec is None or keys != spec.keys:
            spec = self._spec = spec_of(self._kind, self._cls, None, keys)
        walk.ids[id(x)] = index
        walk.objects.append(x)
        walk.held[index] = walk.rest = values
        walk.tokens.append(spec)
        return index + 1

    def _write(self, x: Any, walk: Walk) -> None:
        """Write a function for an object like this one; the more of them, the later the next."""
        self._patience = min(4 * self._patience, _LONG)
        self._wait = self._patience
        shape = _Shaper(walk).shape_of(x, whole=False)
        if shape is not None and shape.children:
            read = _Writer(shape).compile()
            self._variants = [read, *self._variants[: _VARIANTS - 1]]
            self.read = read


def add_reader(kind: Kind, cls: type) -> None:
    """Begin to read objects of a class, if they store what they hold in a dictionary."""
    if kind.numbers is False and cls not in READERS and kind.storage(cls) is not None:
        if len(READERS) >= _CLASSES:
            READERS.clear()
        READERS[cls] = Reader(kind, cls)


class _Shape(NamedTuple):
    """What something is made of, as far as a function knows it."""

    rule: Any  # a kind, LEAF, or None for a static value
    cls: type
    value: Any  # of a static; the array of a Variable
    storage: Any = None  # of a node, but for a list
    keys: Sequence[Any] = ()  # of a node; of a Variable, its metadata
    children: Sequence[_Shape] = ()  # the first of them, if they are not all known


class _Shaper:
    """Finds out what an object is made of.

    Arguments:
        walk: that meets it. What is known to it was shared, and will be: the walk has to see to it.
    """

    def __init__(self, walk: Walk) -> None:
        self._ids = walk.ids
        self._seen: set[int] = set()
        self._left = _MOST

    def shape_of(self, x: Any, *, whole: bool = True) -> _Shape | None:
        """Return what something is made of; None if the walk has to take it by itself.

        Arguments:
            x: anything.
            whole: all that it holds must be known.
        """
        rule, cls = _classify.rule_of(x), type(x)
        self._left -= 1
        if self._left < 0 or rule is REF:
            return None
        if rule is LEAF:
            return _Shape(LEAF, cls, x)
        if not isinstance(rule, Kind):
            return _Shape(None, cls, x)
        if id(x) in self._ids or id(x) in self._seen:
            return None
        self._seen.add(id(x))
        if rule is _VARIABLE:
            value, names = x._value, (*x._metadata,)
            is_cell = _classify.rule_of(value) is LEAF
            return _Shape(rule, cls, value, keys=names) if is_cell else None
        storage = rule.storage(cls)
        if not rule.identity or (storage is None and rule is not _kinds.LIST):
            return None
        if rule is _kinds.DICT and not all([type(key) is str for key in x]):  # noqa: C419
            return None
        _, keys, values = rule.open(x)
        children: list[_Shape] = []
        for value in values:
            child = self.shape_of(value)
            if child is None:
                break
            children.append(child)
        if whole and len(children) < len(keys):
            return None
        return _Shape(rule, cls, None, storage, keys, children)


class _Writer:
    """Writes the function for objects of a shape."""

    def __init__(self, shape: _Shape) -> None:
        self._source = source = Source("read(x, index, walk)", "0", _FILE)
        source.names.update(
            {f.__name__: f for f in (encoded, static_token, spec_with, is_leaf, undone)},
            NO_METADATA=NO_METADATA,
            LEAF=_table.LEAF,
        )
        self._objects: list[str] = []
        self._held: list[tuple[int, str]] = []
        self._tokens: list[str] = []
        self._leaves: list[str] = []
        source.unless("id(x) not in walk.ids")
        start = len(source.lines)
        held = self._read_node("x", shape)
        source.guard(start)
        self._add(None if len(shape.children) == len(shape.keys) else held, len(shape.children))

    def compile(self) -> Read:
        """Return the function."""
        return self._source.compile()

    def _add(self, held: str | None, done: int) -> None:
        """Give the walk what was read; some of what the object holds may be left."""
        source = self._source
        places = ["index", *[source.fresh("i") for _ in self._objects[1:]]]
        for k, place in enumerate(places[1:], 1):
            source.add(f"{place} = index + {k}")
        source.add("add = walk.ids.setdefault")
        met = [f"add(id({x}), {i}) is {i}" for x, i in zip(self._objects, places, strict=True)]
        objects = ", ".join(self._objects)
        source.add(f"if not ({' and '.join(met)}): return undone(walk.ids, ({objects},), index)")
        source.add(f"walk.objects += ({objects},)")
        for place, name in self._held:
            source.add(f"walk.held[{places[place]}] = {name}")
        source.add(f"walk.tokens += ({', '.join(self._tokens)},)")
        if self._leaves:
            source.add(f"walk.leaves += ({', '.join(self._leaves)},)")
        if held is not None:
            source.add(f"walk.rest = {held}[{done}:]")
        source.add(f"return index + {len(self._objects)}")

    def _read_node(self, name: str, shape: _Shape) -> str:
        source, (kind, cls, _, storage, keys, children) = self._source, shape
        held = source.fresh()
        self._held.append((len(self._objects), held))
        self._objects.append(name)
        if storage is None:
            source.add(f"{held} = (*{name},)")
            source.unless(f"len({held}) == {len(keys)}")
        else:
            stored = source.fresh()
            source.add(f"{stored} = {source.constant(storage)}({name})")
            self._compare_keys(stored, kind, keys)
            source.add(f"{held} = {self._values(stored, keys)}")
        self._tokens.append(source.constant(spec_of(kind, cls, None, keys)))
        names = [source.fresh() for _ in children]
        if names:
            part = "" if len(children) == len(keys) else f"[:{len(children)}]"
            source.add(f"{', '.join(names)}, = {held}{part}")
        for child, inner in zip(names, children, strict=True):
            self._read(child, inner)
        return held

    def _compare_keys(self, stored: str, kind: Kind, keys: Sequence[Any]) -> None:
        source = self._source
        if kind is _kinds.DICT:  # whose keys may be made anew each time, and equal others
            source.unless(f"(*{stored},) == {source.constant(keys)}")
            source.unless(f"(*map(type, {stored}),) == {source.constant((str,) * len(keys))}")
        elif not keys:
            source.unless(f"not {stored}")
        else:
            names = [source.fresh() for _ in keys]
            source.add(f"{', '.join(names)}, = {stored}")
            constants = map(source.constant, keys)
            same = [f"{name} is {key}" for name, key in zip(names, constants, strict=True)]
            source.unless(" and ".join(same))

    def _values(self, stored: str, keys: Sequence[Any]) -> str:
        if len(keys) < 2:
            return f"({stored}[{self._source.constant(keys[0])}],)" if keys else "()"
        return f"{self._source.constant(operator.itemgetter(*keys))}({stored})"

    def _read(self, name: str, shape: _Shape) -> None:
        source, (rule, cls, value, _, _, _) = self._source, shape
        if rule is LEAF:
            self._read_leaf(name, cls)
        elif rule is None:
            token = source.fresh()
            self._tokens.append(token)
            if cls in _PLAIN and sys.getsizeof(value) <= _SMALL:
                then = source.constant(value), source.constant(_static.encode(value))
                what = source.constant(cls)
                source.add(
                    f"{token} = {then[1]} if {name} is {then[0]} else encoded({name}, {what})"
                )
            else:
                source.add(f"{token} = static_token({name}, walk)")
            source.unless(f"{token} is not None")
        else:
            source.unless(f"type({name}) is {source.constant(cls)}")
            if rule is _VARIABLE:
                self._read_variable(name, shape)
            else:
                self._read_node(name, shape)

    def _read_variable(self, name: str, shape: _Shape) -> None:
        source, value = self._source, self._source.fresh()
        self._objects.append(name)
        source.add(f"{value} = {name}._value")
        if shape.keys:
            self._tokens.append(spec := source.fresh())
            source.add(f"{spec} = spec_with({name})")
            source.unless(f"{spec} is not None")
        else:
            source.unless(f"{name}._metadata is NO_METADATA")
            self._tokens.append(source.constant(spec_of(_VARIABLE, shape.cls, None, _VALUE)))
        self._read_leaf(value, type(shape.value))

    def _read_leaf(self, name: str, cls: type) -> None:
        # not all numpy arrays can be traced, and some tracers stand for Refs
        is_known = cls is not np.ndarray and RULES.get(cls) is LEAF
        known = f"type({name}) is {self._source.constant(cls)} or " if is_known else ""
        self._source.unless(f"{known}is_leaf({name})")
        self._tokens.append("LEAF")
        self._leaves.append(name)


# what functions call


def encoded(x: Any, cls: type) -> Any:
    """Return the token for a static value, None if it is not of this class."""
    return _static.encode(x) if type(x) is cls else None


def static_token(x: Any, walk: Walk) -> Any:
    """Return the token for a static value, None if it is something else."""
    rule = _classify.rule_of(x)
    if isinstance(rule, Kind) or rule is LEAF or rule is REF:
        return None
    try:
        return walk.static(x, rule)
    except Exception:
        return None  # the walk raises it, and says where


def spec_with(variable: Any) -> Spec | None:
    """Return the spec of a Variable, None if there is something wrong with its metadata."""
    try:
        return spec_of(_VARIABLE, type(variable), _VARIABLE.open(variable)[0], _VALUE)
    except Exception:
        return None  # the walk raises it, and says where


def is_leaf(x: Any) -> bool:
    """Tell whether something is an array that can be traced."""
    if type(x) is np.ndarray:
        return _classify.is_traceable(x)
    return _classify.rule_of(x) is LEAF


def undone(ids: dict[int, int], objects: Sequence[Any], index: int) -> int:
    """Forget which of some objects were met: others were met before. Returns 0."""
    for x in objects:
        if ids.get(id(x), -1) >= index:
            del ids[id(x)]
    return 0
