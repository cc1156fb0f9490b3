"""The spine of a call: what lies between the call and the Modules among its arguments.

A Module can say whether it has changed, and it can own what is known of it; a list, a dict, a tuple
or a dataclass that is an argument can do neither. So everything down to the first Modules (the
**roots**) is read anew on every call, into a key in which plans are looked up: exact types, keys,
static values, and the identities of roots. Two calls with equal keys and unchanged roots have the
same graphdef, if none of the nodes of the spine hangs on a root, or the same ones do (`_sharing`).
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._classify import LEAF, NUMBER, RULES, STATIC, UNKNOWN
from anabranch.graph._kinds import Kind
from anabranch.transforms._call import Selection, StaticArgument, method_of
from anabranch.transforms._lifting import found_stamp, hidden_in, with_known
from anabranch.transforms._watch import Unplannable, Watch

_LIMIT = 1 << 16  # nodes and values; longer spines are walked by `flatten`
_DEPTH = 32
_MODULE, _VARIABLE = _kinds.MODULE, _kinds.VARIABLE


class Table(dict[Any, Any]):
    """Plans by key; a dict that can be referred to weakly."""

    __slots__ = ("__weakref__",)


class Spine:
    """What was read: the key, and the objects of this call in the order of the walk."""

    __slots__ = (
        "key",
        "leaves",
        "nodes",
        "opened",
        "roots",
        "spans",
        "starts",
        "table",
        "tokens",
    )

    key: tuple[Any, ...]
    """What plans are looked up by."""

    table: Table
    """The plans for what the function captures now."""

    def __init__(self) -> None:
        # One element starts each item: None for a leaf, an int for a root, else a class.
        self.tokens: list[Any] = []
        self.leaves: list[Any] = []
        self.roots: list[Any] = []
        self.starts: list[int] = []  # how many leaves came before each root
        self.nodes: list[Any] = []  # Variables, lists, dicts and others with identity
        self.spans: dict[int, tuple[int, int, int]] = {}
        """For each node, its first leaf, the leaf after its last one, and the same for nodes."""
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
        elif isinstance(rule, Kind) and rule.is_root:
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
        number, start = len(self.nodes), len(self.leaves)
        if kind.identity:
            self.nodes.append(x)
        extra, keys, values = kind.open(x)
        if kind.numbers is not None:
            numbers = kind.numbers
        self.tokens += (cls, extra, keys)
        if kind.is_variable:
            numbers = True
        if are_arrays(values):  # most often
            self.tokens += [None] * len(values)
            self.leaves += values
        else:
            for value in values:
                self.add(value, depth - 1, numbers=numbers)
        if kind.identity:
            self.spans[number] = start, len(self.leaves), len(self.nodes)


def are_arrays(values: Sequence[Any]) -> bool:
    """Tell whether values are arrays, tracers not among them."""
    rules = RULES
    return all([rules.get(cls) is LEAF for cls in {*map(type, values)}])  # noqa: C419


class Head(NamedTuple):
    """What was read of the function itself; it is the same as long as it captures the same."""

    watch: Watch
    found: object  # the stamp of what was found by its use
    roots: Sequence[weakref.ref[Any]]
    starts: Sequence[int]
    nodes: Sequence[weakref.ref[Any] | int]  # containers by their places in what is watched
    variables: Sequence[tuple[int, Any, type]]  # which nodes, their metadata, their classes
    spans: Mapping[int, tuple[int, int, int]]  # see `Spine`
    table: Table
    captures_nothing: bool
    hidden: tuple[Callable[[], list[int]], list[int]] | None  # what was found by its use

    def read(self, spine: Spine) -> bool:
        """Read the function; return False if that has to be done in full."""
        now = self.watch.read() if self.watch else ()
        if self.found is not found_stamp() or now is None:
            return False
        if self.hidden is not None and self.hidden[0]() != self.hidden[1]:
            return False
        spine.table = self.table
        if self.roots:
            spine.roots += [ref() for ref in self.roots]
            spine.starts += self.starts
        if self.nodes:
            spine.nodes += [now[ref] if isinstance(ref, int) else ref() for ref in self.nodes]
            spine.spans.update(self.spans)
            for i, metadata, cls in self.variables:
                variable = spine.nodes[i]
                if type(variable) is not cls or variable._metadata is not metadata:
                    return False
                spine.leaves.append(variable._value)
            return are_arrays(spine.leaves) and not any(x is None for x in spine.nodes)
        return True


def _read_simple(args: Sequence[Any], table: Table) -> Spine | None:
    """Read arguments that are Modules and arrays; return None if there are others."""
    tokens: list[Any] = []
    leaves: list[Any] = []
    roots: list[Any] = []
    rules = RULES
    for x in args:
        rule = rules.get(type(x))
        if rule is _MODULE or (isinstance(rule, Kind) and rule.is_root):
            tokens.append(id(x))
            roots.append(x)
        elif rule is LEAF or rule is NUMBER:
            tokens.append(None)
            leaves.append(x)
        else:
            return None
    spine = _new(Spine)
    spine.key, spine.leaves, spine.roots = tuple(tokens), leaves, roots
    spine.nodes, spine.table = _NO_NODES, table
    return spine


_new: Any = object.__new__
_NO_NODES: list[Any] = []


class SpineReader:
    """Reads the spine of calls of one function.

    Arguments:
        function: of the user.
        static: which arguments are static.
    """

    def __init__(self, function: Any, static: Selection) -> None:
        self._function, self._static = function, static
        self.tables: dict[Any, Table] = {}
        """From what was read of the function to the plans."""
        self._head: Head | None = None

    def head(self) -> Head | None:
        """Return what was read of the function, None if that has to be read in full."""
        head = self._head
        followed = head is not None and head.hidden is None and head.found is found_stamp()
        return head if followed else None

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spine | None:
        """Return the spine of a call, or None if it cannot be planned."""
        head = self._head
        if head is not None and head.captures_nothing and not kwargs and not self._static:
            spine = _read_simple(args, head.table)
            if spine is not None:
                return spine
        return self.read_in_full(args, kwargs)

    def read_in_full(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Spine | None:
        """Return the spine with all that a plan is made from."""
        spine = Spine()
        try:
            if self._head is None or not self._head.read(spine):
                spine = self._read_function()
            self._read_arguments(spine, args, kwargs)
        except (Unplannable, NodeTypeError, StaticValueError):
            return None
        spine.key = (*spine.tokens, *_repeats(spine.nodes))
        return spine

    def _read_arguments(self, spine: Spine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        rules, tokens = RULES, spine.tokens
        static = self._static
        chosen = static.of_args(args) if static.nums else ()
        for i, x in enumerate(args):
            rule = rules.get(type(x))
            if chosen and i in chosen:
                _add_static(spine, x)
            elif rule is _MODULE or (isinstance(rule, Kind) and rule.is_root):
                tokens.append(id(x))
                spine.roots.append(x)
                spine.starts.append(len(spine.leaves))
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

    def _read_function(self) -> Spine:
        """Read the function in full, and remember it if it can be watched."""
        function, found = self._function, found_stamp()
        spine = Spine()
        watched = [function]
        shown = function
        if not isinstance(function, types.FunctionType):
            shown = method_of(function)
            watched.append(type(function).__call__)
        watch = None
        if isinstance(function, (types.FunctionType, types.MethodType)) or shown is function:
            with contextlib.suppress(Unplannable):
                watch = Watch(watched)  # before it is read
        now = hidden_in(function)
        hidden = None if now is None else (now, now())
        spine.add(with_known(shown, function))
        tokens = tuple(spine.tokens)
        spine.tokens.clear()
        if len(self.tables) >= _HEADS:
            self.tables = {key: table for key, table in self.tables.items() if table}
        spine.table = self.tables.setdefault(tokens, Table())
        self._head = None if watch is None else _head_of(spine, watch, found, hidden)
        return spine


_HEADS = 64


def _head_of(spine: Spine, watch: Watch, found: object, hidden: Any) -> Head | None:
    """Return what can be remembered of what was read, None if not all of it can."""
    variables: list[tuple[int, Any, type]] = []
    nodes: list[weakref.ref[Any] | int] = []
    for i, node in enumerate(spine.nodes):
        if _classify.rule_of(node) is _VARIABLE:
            variables.append((i, node._metadata, type(node)))
        elif not isinstance(node, types.FunctionType):
            place = watch.place_of(node)
            if place is None:
                return None
            nodes.append(place)
            continue
        nodes.append(weakref.ref(node))
    values = [spine.nodes[i]._value for i, _, _ in variables]
    if [*map(id, values)] != [*map(id, spine.leaves)]:
        return None
    roots = [*map(weakref.ref, spine.roots)]
    return Head(
        watch,
        found,
        roots,
        [*spine.starts],
        nodes,
        variables,
        dict(spine.spans),
        spine.table,
        not (watch or roots or nodes),
        hidden,
    )


def _repeats(nodes: Sequence[Any]) -> tuple[Any, ...]:
    """Return for each node the first place that it has, nothing if all are different."""
    ids = [*map(id, nodes)]
    if len({*ids}) == len(ids):
        return ()
    first: dict[int, int] = {}
    return ("repeats", *[first.setdefault(x, i) for i, x in enumerate(ids)])


def _add_static(spine: Spine, x: Any) -> None:
    cls: Any = type(x)
    value = (cls, x) if cls in _static.EXACT_BY_TYPE else _static.encode(x)
    spine.tokens += (StaticArgument, value)
