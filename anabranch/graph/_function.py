"""Functions that reach objects: a closure is one more way to an object, so they are nodes.

What a function captures (in cells, defaults, and globals that its code loads by name) are its
contents, as far as objects can be reached there: an object itself, a list or a dict that holds one,
a helper function that reaches one in the same ways. Its twin has the same code and other cells, so
that it sees twins where it would have seen the caller's objects; functions that share a variable
have twins that share one. A function that reaches no object is static, and what it captures is a
constant, as it is for JAX.

An entry refers to its function weakly: a graphdef in a cache keeps nothing alive.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from anabranch.graph import _classify, _kinds
from anabranch.graph._code import names_in
from anabranch.graph._kinds import Kind, Opened
from anabranch.graph._leaf_info import VariableName
from anabranch.graph._scope import is_twin_here

CELL, DEFAULT, KEYWORD, GLOBAL = "cell", "default", "keyword", "global"

LIBRARIES = frozenset({"anabranch", "jax", "jaxlib", "numpy", "flax", "optax", "equinox", "chex"})
_MOST = 4096  # elements of a container that are looked at, and functions that are followed
_SEQUENCES = frozenset({_kinds.LIST, _kinds.DEQUE, _kinds.TUPLE})
_MUTABLE = frozenset({_kinds.LIST, _kinds.DICT, _kinds.DEQUE, _kinds.SET})


class Unset:
    """What stands for a captured variable that was deleted: the class itself."""


class Capture(NamedTuple):
    """A place where a function reaches an object."""

    where: str
    at: Any  # the number of a cell or a default, the name of a global
    name: str

    def read(self, function: types.FunctionType) -> Any:
        """Return what is there now."""
        if self.where == CELL:
            try:
                return _cells(function)[self.at].cell_contents
            except ValueError:
                return Unset
        if self.where == GLOBAL:
            try:
                return function.__globals__[self.name]
            except KeyError:
                return Unset
        held: Any = function.__defaults__ if self.where == DEFAULT else function.__kwdefaults__
        return held[self.at]

    def write(self, function: types.FunctionType, value: Any) -> None:
        """Put something else there."""
        held: Any
        if self.where == CELL:
            held = _cells(function)[self.at]
            if value is Unset:
                del held.cell_contents
            else:
                held.cell_contents = value
        elif self.where == GLOBAL:
            if value is Unset:
                del function.__globals__[self.name]
            else:
                function.__globals__[self.name] = value
        elif self.where == DEFAULT:
            held = list(function.__defaults__ or ())
            held[self.at] = value
            function.__defaults__ = tuple(held)
        else:
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), self.name: value}


def is_filled(cell: types.CellType) -> bool:
    """Tell whether a captured variable has a value."""
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


def _cells(function: types.FunctionType) -> list[types.CellType]:
    return [*(function.__closure__ or ())]


class Origin:
    """Which function an entry is about, and where it reaches objects; equal only for the same.

    Arguments:
        function: the function.
        captures: where it reaches objects.
        keep: keep it alive: for a function that was made inside, of which nothing else is left.
    """

    __slots__ = ("_ref", "captures", "kept")

    def __init__(
        self, function: types.FunctionType, captures: tuple[Capture, ...], *, keep: bool = False
    ) -> None:
        self._ref = weakref.ref(function)  # Python keeps one reference an object
        self.kept = function if keep else None
        self.captures = captures

    @property
    def function(self) -> Any:
        """The function, None if it is gone."""
        return self._ref()

    def __hash__(self) -> int:
        return hash((id(self._ref), self.captures))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Origin)
            and other._ref is self._ref
            and self._ref() is not None
            and other.captures == self.captures
        )

    def __repr__(self) -> str:
        return f"<{getattr(self.function, '__qualname__', 'a function that is gone')}>"


_TWINS: weakref.WeakKeyDictionary[types.FunctionType, Origin] = weakref.WeakKeyDictionary()
"""What twins were made from; so a twin of a twin is one of the function of the user."""


class Globals(dict[str, Any]):
    """The globals of twins: twins under the names that they capture, all others as they are."""

    __slots__ = ("captured", "real")

    def __init__(self, real: dict[str, Any]) -> None:
        # the interpreter looks these up without asking `__missing__`
        super().__init__({name: x for name, x in real.items() if name.startswith("__")})
        self.real = real
        self.captured: set[str] = set()

    def __missing__(self, name: str) -> Any:
        return self.real[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.real

    def get(self, name: str, default: Any = None) -> Any:
        """Return a global, or the default."""
        try:
            return self[name]
        except KeyError:
            return default


class _FunctionKind(Kind):
    """A function that reaches objects."""

    __slots__ = ()
    numbers = False

    def open(self, obj: Any) -> Opened:
        origin = _TWINS.get(obj)
        if origin is None:
            origin = Origin(obj, captures_of(obj))
        return origin, origin.captures, tuple([c.read(obj) for c in origin.captures])

    def create(self, cls: Any, extra: Any) -> Any:
        return _copy(extra, {})

    def create_all(self, classes: Sequence[Any], extras: Sequence[Any]) -> Iterable[Any]:
        shared: dict[int, Any] = {}
        return [_copy(origin, shared) for origin in extras]

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        for capture, value in zip(keys, values, strict=True):
            if capture.read(obj) is not value:
                capture.write(obj, value)

    def empty(self, obj: Any) -> None:
        """Bring globals that a twin has set, and that are none of its contents, outside."""
        scope = obj.__globals__
        if type(scope) is Globals:
            others = scope.keys() - scope.captured
            for name in [n for n in others if scope[n] is not scope.real.get(n)]:
                scope.real[name] = scope[name]

    def show_key(self, key: Any) -> str:
        return f".{key.name}"

    def show_below(self, text: str, key: Any) -> str:
        return key.name  # that is how the function calls it, however the function is reached

    def path_key(self, key: Any) -> Any:
        return VariableName(key.name)


FUNCTION = _FunctionKind("function")


def _copy(origin: Origin, shared: dict[int, Any]) -> types.FunctionType:
    """Return a function with the same code, whose captured cells are empty.

    Arguments:
        origin: of the function.
        shared: the cells and globals of the copies that belong together, by the id of the original.
    """
    function = origin.function
    cells = _cells(function)
    for capture in origin.captures:
        if capture.where == CELL:
            cells[capture.at] = shared.setdefault(id(cells[capture.at]), types.CellType())
    scope = function.__globals__
    if scope is vars(functools):  # `singledispatch` remembers there which function it has found
        for i, cell in enumerate(cells):
            if is_filled(cell) and type(cell.cell_contents) is weakref.WeakKeyDictionary:
                cells[i] = shared.setdefault(
                    id(cell), types.CellType(weakref.WeakKeyDictionary[Any, Any]())
                )
    names = [capture.name for capture in origin.captures if capture.where == GLOBAL]
    if origin.kept:  # it was made inside, and goes outside
        scope = scope.real if type(scope) is Globals else scope
    elif names:
        scope = shared.get(id(scope)) or shared.setdefault(id(scope), Globals(scope))
        scope.captured.update(names)
    twin = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, tuple(cells)
    )
    twin.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(twin, name, getattr(function, name))
    twin.__dict__ = function.__dict__  # what it sets on itself is there afterwards
    _TWINS[twin] = origin
    return twin


def lasting(origin: Origin, shared: dict[int, Any]) -> Origin:
    """Return what to keep of a function that was made inside, and is left behind.

    Arguments:
        origin: of the function.
        shared: as for the other functions that are left behind: see `_copy`.
    """
    return Origin(_copy(origin, shared), origin.captures, keep=True)


def captures_of(function: types.FunctionType) -> tuple[Capture, ...]:
    """Return where a function reaches objects."""
    nodes = TAKEN_FOR_NODES.get(function, ())
    return tuple(
        [
            capture
            for capture, value in what_is_captured(function)
            if _reaches([value]) or (capture in nodes and is_mutable_container(value))
        ]
    )


def what_is_captured(function: types.FunctionType) -> list[tuple[Capture, Any]]:
    """Return what a function captures, whatever it is."""
    cells, names = _captures_in(function.__code__)
    found: list[tuple[Capture, Any]] = []
    for capture, cell in zip(cells, function.__closure__ or (), strict=False):
        try:
            found.append((capture, cell.cell_contents))
        except ValueError:  # it is empty
            continue
    for i, value in enumerate(function.__defaults__ or ()):
        found.append((Capture(DEFAULT, i, f"__defaults__[{i}]"), value))
    for name, value in (function.__kwdefaults__ or {}).items():
        found.append((Capture(KEYWORD, name, name), value))
    scope = function.__globals__
    if names and not is_library(scope):
        found += [(capture, scope[name]) for capture in names if (name := capture.name) in scope]
    return found


@functools.lru_cache(maxsize=4096)
def _captures_in(code: types.CodeType) -> tuple[list[Capture], list[Capture]]:
    """Return the cells and the globals that are captured by any function with some code."""
    cells = [Capture(CELL, i, name) for i, name in enumerate(code.co_freevars)]
    return cells, [Capture(GLOBAL, name, name) for name in global_names(code)]


def is_library(scope: dict[str, Any]) -> bool:
    """Tell whether globals are those of a library whose code reaches no objects by them."""
    return _is_of_library(str(scope.get("__name__", "")))


@functools.lru_cache(maxsize=4096)
def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _reaches(pending: list[Any]) -> bool:
    """Tell whether an object can be reached from what a function captures; the list is used up."""
    seen = set[int]()
    while pending and len(seen) < _MOST:
        x = pending.pop()
        cls = type(x)
        if cls in _classify.EXACT_BY_TYPE or id(x) in seen:
            continue
        seen.add(id(x))
        if cls is types.FunctionType:
            if not is_settled(x):
                captured = what_is_captured(x)
                nodes = TAKEN_FOR_NODES.get(x, ())
                if nodes and any(
                    c in nodes and is_mutable_container(value) for c, value in captured
                ):
                    return True
                pending += [value for _, value in captured]
            continue
        rule = _classify.RULES.get(cls)
        if rule is None:
            if cls in _classify.LOOK:
                pending.append(getattr(x, "__wrapped__", None))
                continue
            rule = _classify.rule_of(x)
        if not isinstance(rule, Kind):
            continue
        if rule.is_object or (rule.identity and is_twin_here(x)):
            return True
        if rule is _kinds.METHOD:
            pending += [x.__self__, x.__func__]
        elif rule is _kinds.PARTIAL:
            pending += [x.func, *x.args, *x.keywords.values()]
        elif rule is _kinds.DICT:
            pending.extend(itertools.islice(x.values(), _MOST))
        elif rule in _SEQUENCES:
            pending.extend(itertools.islice(x, _MOST))
        elif rule is _kinds.FROZEN:
            pending.extend(rule.open(x)[2])
    return False


TAKEN_FOR_NODES = weakref.WeakKeyDictionary[types.FunctionType, set[Capture]]()
"""Captured containers that are nodes though they hold no object: see `_containers`."""


def reaches_object(x: Any) -> bool:
    """Tell whether an object can be reached from something that a function captures."""
    return _reaches([x])


def is_mutable_container(x: Any) -> bool:
    """Tell whether something is a list, a dict, a deque or a set."""
    return _classify.rule_of(x) in _MUTABLE


def plain_function(target: Any) -> Any:
    """Return the function behind methods, partials and transformed functions."""
    while True:
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(target, types.MethodType):
            target = target.__func__
        elif not isinstance(target, types.FunctionType) and hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        else:
            return target


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals in code, and in code nested in it."""
    return names_in(code).used


def _rule(function: types.FunctionType) -> Any:
    if function in _TWINS:
        return FUNCTION
    if is_settled(function):
        return _classify.STATIC
    return FUNCTION if _reaches([function]) else _classify.STATIC


_SETTLED: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()
"""Functions of libraries that will never reach an object: most initialisers and activations."""


def is_settled(function: Any) -> bool:
    """Tell whether a function need not be looked at again.

    It is one of a library, and captures nothing that could hold an object later.
    """
    if not isinstance(function, types.FunctionType) or not is_library(function.__globals__):
        return False
    return function in _SETTLED or _settle(function)


def _settle(function: types.FunctionType) -> bool:
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            if not is_library(x.__globals__):
                return False
            pending += [value for _, value in what_is_captured(x)]
        elif isinstance(x, tuple):
            pending += x
        elif type(x) in _classify.LOOK:
            pending.append(getattr(x, "__wrapped__", None))
        elif isinstance(_classify.rule_of(x), Kind):
            return False
    _SETTLED.add(function)
    return True


_classify.declare_look(types.FunctionType, _rule)
