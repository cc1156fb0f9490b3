"""The spine of a call: what lies between the call and the Modules among its arguments.

A Module can say whether it has changed, and it can own what is known of it; a list, a dict, a tuple
or a dataclass that is an argument can do neither. So everything down to the first Modules (the
**roots**) is read anew on every call, into a key in which plans are looked up: exact types, keys,
static values, and the identities of roots. Two calls with equal keys and unchanged roots have the
same graphdef, if the nodes of the spine are different objects and none of them hangs on a root.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._classify import LEAF, NUMBER, RULES, STATIC, UNKNOWN
from anabranch.graph._kinds import Kind
from anabranch.transforms._call import Selection, StaticArgument, method_of
from anabranch.transforms._lifting import with_known

_LIMIT = 256  # nodes and values; longer spines are walked by `flatten`
_DEPTH = 32
_MODULE, _VARIABLE = _kinds.MODULE, _kinds.VARIABLE


class Unplannable(Exception):
    """A call cannot be planned."""


class Spine:
    """What was read: the key, and the objects of this call in the order of the walk."""

    __slots__ = ("key", "leaves", "nodes", "opened", "roots", "starts", "tokens")

    key: tuple[Any, ...]
    """What plans are looked up by."""

    def __init__(self) -> None:
        # One element starts each item: None for a leaf, an int for a root, else a class.
        self.tokens: list[Any] = []
        self.leaves: list[Any] = []
        self.roots: list[Any] = []
        self.starts: list[int] = []  # how many leaves came before each root
        self.nodes: list[Any] = []  # Variables, lists, dicts and others with identity
        self.opened = 0

    def add(self, x: Any, depth: int = _DEPTH, *, numbers: bool = True) -> None:
        """Read one object.

        Raises:
            Unplannable: it is none of what can be matched.
        """
        cls: Any = type(x)
        rule = RULES.get(cls) or _classify.rule_of(x)
        if rule is LEAF:
            if cls not in RULES:  # a tracer
                raise Unplannable
            self.tokens.append(None)
            self.leaves.append(x)
        elif rule is _MODULE:
            self.tokens.append(id(x))
            self.roots.append(x)
            self.starts.append(len(self.leaves))
        elif isinstance(rule, Kind):
            self._open(x, cls, rule, depth, numbers=numbers)
        elif rule is NUMBER and numbers:
            self.tokens.append(None)
            self.leaves.append(x)
        elif rule is STATIC or rule is NUMBER or rule is UNKNOWN:
            if rule is UNKNOWN:
                _classify.check_static(x)
            self.tokens += (cls, x if cls in _static.EXACT_BY_TYPE else _static.encode(x))
        else:  # opaque, or a `jax.Ref`
            raise Unplannable

    def _open(self, x: Any, cls: Any, kind: Kind, depth: int, *, numbers: bool) -> None:
        self.opened += 1
        if not depth or self.opened > _LIMIT:
            raise Unplannable
        if kind.identity:
            self.nodes.append(x)
        extra, keys, values = kind.open(x)
        if kind.numbers is not None:
            numbers = kind.numbers
        self.tokens += (cls, extra, keys)
        if kind is _VARIABLE:
            numbers = True
        if are_arrays(values):  # most often
            self.tokens += [None] * len(values)
            self.leaves += values
            return
        for value in values:
            self.add(value, depth - 1, numbers=numbers)


def are_arrays(values: Sequence[Any]) -> bool:
    """Tell whether values are arrays, tracers not among them."""
    rules = RULES
    return all([rules.get(cls) is LEAF for cls in {*map(type, values)}])  # noqa: C419


class SpineReader:
    """Read the spine of calls of one function."""

    def __init__(self, function: Any, static: Selection) -> None:
        self._function, self._static = function, static
        self._is_plain = type(function) is types.FunctionType

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spine | None:
        """Return the spine of a call, or None if it cannot be planned."""
        spine = Spine()
        try:
            function = self._function if self._is_plain else method_of(self._function)
            spine.add(with_known(function, self._function))
            static = self._static
            chosen = static.of_args(args) if static else ()
            rules, tokens = RULES, spine.tokens
            for i, x in enumerate(args):
                rule = rules.get(type(x))
                if chosen and i in chosen:
                    _add_static(spine, x)
                elif rule is LEAF or rule is NUMBER:
                    tokens.append(None)
                    spine.leaves.append(x)
                else:
                    spine.add(x)
            if kwargs:
                tokens.append(tuple(kwargs))
                for name, x in kwargs.items():
                    if name in static.names:
                        _add_static(spine, x)
                    else:
                        spine.add(x)
        except (Unplannable, NodeTypeError, StaticValueError):
            return None
        nodes = spine.nodes
        if len(nodes) > 1 and len({*map(id, nodes)}) < len(nodes):
            return None
        spine.key = tuple(spine.tokens)
        return spine


def _add_static(spine: Spine, x: Any) -> None:
    cls: Any = type(x)
    value = (cls, x) if cls in _static.EXACT_BY_TYPE else _static.encode(x)
    spine.tokens += (StaticArgument, value)
