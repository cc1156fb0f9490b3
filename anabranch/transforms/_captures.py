"""What functions capture, place by place: the places in functions, and those in containers."""

from __future__ import annotations

import enum
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from anabranch._source import Source
from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._function import is_filled, is_settled
from anabranch.graph._kinds import Kind
from anabranch.transforms._columns import has_plain_attributes

_MOST = 512  # elements that are looked at
_FEW = 16  # elements of a container that are compared one by one
_MAKERS = frozenset({"builtins", "jax", "jaxlib"})  # of functions, and of what wraps them
_DICTS = frozenset({dict, OrderedDict, defaultdict})
_CONTAINERS = frozenset(
    {
        _kinds.LIST,
        _kinds.DEQUE,
        _kinds.DICT,
        _kinds.TUPLE,
        _kinds.FROZEN,
        _kinds.METHOD,
        _kinds.PARTIAL,
    }
)


class CapturedFunction(NamedTuple):
    """The places in one function."""

    ref: weakref.ref[types.FunctionType]
    filled: tuple[bool, ...]  # of its cells
    names: tuple[str, ...]  # of globals that are set
    absent: tuple[str, ...]  # of those that are not
    is_given: bool  # and kept alive by who asks

    def read(self) -> list[Any] | None:
        """Return what is in the places, None if one is empty that was not, or the reverse."""
        function = self.ref()
        if function is None:
            return None
        found: list[Any] = []
        if self.filled:
            cells = function.__closure__ or ()
            if tuple(map(is_filled, cells)) != self.filled:
                return None
            found += [c.cell_contents for c, full in zip(cells, self.filled, strict=True) if full]
        scope = function.__globals__
        if self.names:
            try:
                found += [scope[name] for name in self.names]
            except KeyError:
                return None
        if self.absent and any(map(scope.__contains__, self.absent)):
            return None
        found += function.__defaults__ or ()
        if function.__kwdefaults__:
            found += function.__kwdefaults__.values()
        return found

    def lines(self, source: Source) -> tuple[list[str], list[str]] | None:
        """Return conditions for the places to be the same ones, and expressions for them.

        Returns:
            None if there are empty cells.
        """
        function = self.ref()
        if function is None or not all(self.filled):
            return None
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        if self.is_given:
            own, scope = source.constant(function), source.constant(function.__globals__)
            cells = [source.constant(cell) for cell in function.__closure__ or ()]
            conditions: list[str] = []
        else:
            own = source.fresh()
            scope = f"{own}.__globals__"
            cells = [f"{own}.__closure__[{i}]" for i in range(len(self.filled))]
            conditions = [f"({own} := {source.constant(self.ref)}()) is not None"]
        conditions += [f"{name!r} not in {scope}" for name in self.absent]
        if defaults:
            conditions.append(f"len({own}.__defaults__ or ()) == {len(defaults)}")
        else:
            conditions.append(f"not {own}.__defaults__")
        if by_name:
            keys = source.constant([*by_name])
            conditions.append(f"[*({own}.__kwdefaults__ or ())] == {keys}")
        else:
            conditions.append(f"not {own}.__kwdefaults__")
        return conditions, [
            *[f"{cell}.cell_contents" for cell in cells],
            *[f"{scope}[{name!r}]" for name in self.names],
            *[f"{own}.__defaults__[{i}]" for i in range(len(defaults))],
            *[f"{own}.__kwdefaults__[{name!r}]" for name in by_name],
        ]


class CapturedContainer(NamedTuple):
    """A container that leads to objects or functions."""

    at: int  # its place among all that is read
    kind: Kind
    cls: type
    extra: Any
    keys: Any

    def read(self, x: Any) -> Sequence[Any] | None:
        """Return what it holds, None if it is another one."""
        if type(x) is not self.cls:
            return None
        try:
            extra, keys, values = self.kind.open(x)
        except (RuntimeError, NodeTypeError, StaticValueError):  # somebody is writing it
            return None
        return values if keys == self.keys and extra == self.extra else None

    def places(self, name: str, x: Any) -> list[str] | None:
        """Return expressions for what it holds, None if that is not simple.

        Arguments:
            name: of it.
            x: the container itself.
        """
        if len(self.keys) > _FEW:
            return None
        if self.kind is _kinds.METHOD:
            return [f"{name}.{key}" for key in self.keys]
        if self.cls in (list, tuple):
            return [f"{name}[{i}]" for i in range(len(x))]
        if self.cls is dict and all(type(key) is str for key in self.keys):
            return [f"{name}[{key!r}]" for key in self.keys]
        if self.kind is _kinds.PARTIAL:
            by_name = [f"{name}.keywords[{key!r}]" for key in x.keywords]
            return [f"{name}.func", *[f"{name}.args[{i}]" for i in range(len(x.args))], *by_name]
        if self.kind is _kinds.FROZEN and has_plain_attributes(x):
            return [f"{name}.__dict__[{key!r}]" for key in self.keys]
        return None

    def conditions(self, name: str, source: Source) -> list[str]:
        """Return conditions for it to hold as much under the same keys."""
        if self.cls in (list, tuple):
            return [f"len({name}) == {len(self.keys)}"]
        if self.cls is dict:
            return [f"[*{name}] == {source.constant([*self.keys])}"]
        if self.kind is _kinds.PARTIAL:
            count = len(self.keys) - 1 - len(self.extra)
            by_name = source.constant([*self.extra])
            return [f"len({name}.args) == {count}", f"[*{name}.keywords] == {by_name}"]
        if self.kind is _kinds.FROZEN:
            return [f"[*{name}.__dict__] == {source.constant([*self.keys])}"]
        return []  # a method cannot change


def is_weak(x: Any) -> bool:
    if isinstance(x, types.FunctionType) or type(x) in _classify.LOOK:
        return True
    rule = _classify.rule_of(x)
    return isinstance(rule, Kind) and rule.is_object and bool(type(x).__weakrefoffset__)


def is_container(x: Any) -> bool:
    rule = _classify.rule_of(x)
    return rule in _CONTAINERS and (rule is not _kinds.DICT or type(x) in _DICTS)


def is_live(x: Any) -> bool:
    """Tell whether an object may come into a container."""
    rule = _classify.rule_of(x)
    return rule is _kinds.LIST or rule is _kinds.DEQUE or type(x) in _DICTS


def leads(x: Any) -> bool:
    """Tell whether a container leads to an object or a function."""
    pending, seen = [x], set[int]()
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if is_weak(x) or len(seen) > _MOST:
            return True
        if is_container(x):
            pending += children_of(x)
    return False


def children_of(x: Any) -> Sequence[Any]:
    if type(x) in _classify.LOOK:
        return (getattr(x, "__wrapped__", None),)
    kind: Any = _classify.rule_of(x)
    return kind.open(x)[2] if is_container(x) else ()


def are_comparable(pending: list[Any]) -> bool:
    """Tell whether what is in a container stays the same as long as it is that one.

    Arguments:
        pending: the elements; the list is used up.
    """
    seen: set[int] = set()
    while pending:
        x = pending.pop()
        if id(x) in seen or is_weak(x):
            continue
        seen.add(id(x))
        if is_container(x):
            pending += children_of(x)
        elif not (_classify.rule_of(x) is _classify.LEAF or type(x) in _UNCHANGING or is_itself(x)):
            return False
    return True


_UNCHANGING = _static.EXACT_BY_TYPE | {float, complex}


def is_itself(x: Any) -> bool:
    """Tell whether a static value is what it is for good, so that its identity is enough.

    Functions of the user are not: they may reach an object one day.
    """
    if isinstance(x, (type, enum.Enum, np.dtype)):
        return True
    if isinstance(x, types.BuiltinFunctionType):
        return isinstance(x.__self__, types.ModuleType)
    function = x
    while not isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, types.FunctionType):
        return is_settled(function) and type(x).__module__.partition(".")[0] in _MAKERS
    return _classify.RULES.get(type(x)) is _classify.STATIC and not callable(x)
