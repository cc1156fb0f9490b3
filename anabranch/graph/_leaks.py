"""What a function leaves of a trace in places that are no objects, where it would be lost.

A variable of the function around it, a global, an attribute of a class, of a function or of an
instance that is no node: what a function puts there it puts there when it is traced, and in no
later call. For a number or a text that is as with JAX. A tracer or a twin is of no use outside, so
the place gets back what it held, and the caller is told.

The places are found as objects are: by following what functions capture, and from there classes and
attributes. What they hold is remembered before a run and compared after it, by identity; only what
has changed is looked into.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from anabranch.errors import CapturedWriteError, first_few
from anabranch.graph import _classify, _kinds, _module
from anabranch.graph._code import names_in
from anabranch.graph._function import (
    LIBRARIES,
    is_filled,
    is_library,
    plain_function,
    what_is_captured,
)
from anabranch.graph._kinds import Kind
from anabranch.graph._module import ABSENT, read_slot
from anabranch.graph._scope import Scope
from anabranch.graph._spend import SPENT

_MOST = 1024  # things that are followed, nearest first
_LONG = 64  # elements of a container that are followed
_SEQUENCES = frozenset({_kinds.LIST, _kinds.DEQUE, _kinds.TUPLE})
_FOREIGN = LIBRARIES | sys.stdlib_module_names
# instances of these are locks, loggers and the like, from which everything can be reached
_CLOSED = LIBRARIES | {"builtins", "functools", "logging", "threading", "weakref", "_thread"}
_attributes_of_class = vars(type)["__dict__"].__get__


class _Sort(NamedTuple):
    """How places of one sort are read and written. Each has an owner, and names for what it holds.

    All that is done for a place before and after a run, unless something is found, is `read`.
    """

    read: Callable[[Any], dict[str, Any]]
    put: Callable[[Any, str, Any], None]
    delete: Callable[[Any, str], None]
    text: Callable[[Any, str, str], str]  # from the owner, its name and the name of what it holds


def _cells_of(function: Any) -> dict[str, Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return {name: cells[name] for name in names_in(function.__code__).rebound}


def _variables_of(function: Any) -> dict[str, Any]:
    cells = _cells_of(function).items()
    return {name: cell.cell_contents for name, cell in cells if is_filled(cell)}


def _globals_of(function: Any) -> dict[str, Any]:
    scope = function.__globals__
    return {name: scope[name] for name in names_in(function.__code__).stored if name in scope}


def _slots_of(x: Any) -> dict[str, Any]:
    names = _module.slot_names(type(x))
    return {name: y for name in names if (y := read_slot(x, name)) is not ABSENT}


_DICT = _Sort(
    dict[str, Any].copy,
    dict[str, Any].__setitem__,
    dict[str, Any].__delitem__,
    lambda _, name, key: f"{name}.{key}",
)
_CELLS = _Sort(
    _variables_of,
    lambda function, key, x: setattr(_cells_of(function)[key], "cell_contents", x),
    lambda function, key: delattr(_cells_of(function)[key], "cell_contents"),
    lambda function, _, key: (
        f"{key} (a variable of {function.__qualname__.rpartition('.<locals>.')[0]})"
    ),
)
_GLOBALS = _Sort(
    _globals_of,
    lambda function, key, x: function.__globals__.__setitem__(key, x),
    lambda function, key: function.__globals__.__delitem__(key),
    lambda function, _, key: f"{key} (a global of {function.__globals__.get('__name__')})",
)
_CLASS = _Sort(
    lambda cls: _attributes_of_class(cls).copy(),
    type.__setattr__,
    type.__delattr__,
    lambda cls, _, key: f"{cls.__qualname__}.{key} (an attribute of the class)",
)
_SLOTS = _Sort(_slots_of, object.__setattr__, object.__delattr__, _DICT.text)


class Places:
    """The places that functions reach, and what they hold now.

    Arguments:
        functions: functions, methods, partials and callable objects.
        classes: of the objects that they work on.
        around: the places of the function that calls them. What is left in one of those is found
            when that function ends, so what it reaches is not followed again.
    """

    __slots__ = ("_covered", "_pending", "_places", "_seen")

    def __init__(
        self, functions: Collection[Any], classes: Iterable[type], around: Places | None = None
    ) -> None:
        # functions, classes and modules that are followed, by whomever
        self._covered: dict[int, Any] = {} if around is None else around._covered.copy()
        for function in functions:  # but the error shall name the transform that this one is given
            self._covered.pop(id(plain_function(function)), None)
        # a sort, an owner and its name, and what it holds
        self._places: list[tuple[_Sort, Any, str, dict[str, Any]]] = []
        self._seen: dict[int, Any] = {}  # by id; with the things, so that ids stay valid
        # a thing, what it is called, and whether it is reached in a way of which no twin is made
        self._pending = deque([(x, "", False) for x in (*functions, *classes)])
        pending, seen, covered = self._pending, self._seen, self._covered
        while pending and len(seen) < _MOST:
            x, name, hidden = pending.popleft()
            if (
                type(x) not in _classify.EXACT_BY_TYPE
                and id(x) not in seen
                and id(x) not in covered
            ):
                seen[id(x)] = x
                self._follow(x, name, hidden)

    def take_back(self, scope: Scope) -> list[str]:
        """Put back what was there before, wherever something was left that must not stay.

        Arguments:
            scope: of the run.

        Returns:
            How these places are called.
        """
        found: list[str] = []
        for sort, owner, name, before in self._places:
            now = sort.read(owner)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for key, x in now.items():
                old = before.get(key, ABSENT)
                if old is not x and _reaches_inside(x, scope):
                    if old is ABSENT:
                        sort.delete(owner, key)
                    else:
                        sort.put(owner, key, old)
                    found.append(sort.text(owner, name, key))
        return found

    def _add(self, sort: _Sort, owner: Any, name: str = "") -> None:
        self._places.append((sort, owner, name, sort.read(owner)))

    def _follow(self, x: Any, name: str, hidden: bool) -> None:
        cls: Any = type(x)
        if cls is types.FunctionType:
            self._covered[id(x)] = x
            self._function(x, name)
        elif cls in _classify.LOOK:  # a transformed function
            self._add(_DICT, vars(x), name)
            self._pending.append((getattr(x, "__wrapped__", None), name, hidden))
        elif issubclass(cls, type):
            self._covered[id(x)] = x
            self._class(x)
        elif cls is types.ModuleType:
            self._covered[id(x)] = x
            if _library_of(x.__name__) not in _FOREIGN:
                self._add(_DICT, vars(x), name)
        else:
            self._other(x, _classify.rule_of(x), name, hidden)

    def _function(self, function: types.FunctionType, name: str) -> None:
        if is_library(function.__globals__):
            return
        known = _classify.EXACT_BY_TYPE
        self._pending += [
            (x, capture.name, False)
            for capture, x in what_is_captured(function)
            if type(x) not in known
        ]
        names = names_in(function.__code__)
        if names.rebound:
            self._add(_CELLS, function)
        if names.stored:
            self._add(_GLOBALS, function)
        own = function.__dict__
        self._add(_DICT, own, function.__qualname__)
        if "__wrapped__" in own:
            self._pending.append((own["__wrapped__"], name, False))

    def _class(self, cls: Any) -> None:
        if not cls.__flags__ & _module.IS_HEAP_TYPE or _library_of(cls.__module__) in _FOREIGN:
            return
        self._add(_CLASS, cls)
        name, pending, known = cls.__qualname__, self._pending, _classify.EXACT_BY_TYPE
        pending += [(base, "", False) for base in cls.__bases__]
        for key, x in _attributes_of_class(cls).items():
            if type(x) in known:
                continue
            if isinstance(x, (staticmethod, classmethod)):
                x = x.__func__
            elif isinstance(x, property):
                x = x.fget
            pending.append((x, f"{name}.{key}", True))

    def _other(self, x: Any, rule: Any, name: str, hidden: bool) -> None:
        pending, cls = self._pending, type(x)
        if not isinstance(rule, Kind):
            if rule is _classify.LEAF or rule is _classify.NUMBER or rule is _classify.REF:
                return
            if isinstance(x, threading.local):
                self._add(_DICT, x.__dict__, name)  # that of this thread
            elif _library_of(cls.__module__) in _CLOSED:
                pending.append((getattr(x, "__wrapped__", None), name, hidden))
            else:
                self._instance(x, name)
        elif rule.is_object:
            if not rule.is_variable:
                pending.append((cls, "", False))
                if hidden:
                    self._instance(x, name)
        elif rule is _kinds.METHOD:
            pending += [(x.__func__, name, False), (x.__self__, name, hidden)]
        elif rule is _kinds.PARTIAL:
            pending += [(y, name, hidden) for y in (x.func, *x.args, *x.keywords.values())]
        elif rule is _kinds.DICT:
            items = itertools.islice([*x.items()], _LONG)
            pending += [(y, f"{name}[{_shown(key)}]", hidden) for key, y in items]
        elif rule in _SEQUENCES:
            elements = itertools.islice([*x], _LONG)
            pending += [(y, f"{name}[{i}]", hidden) for i, y in enumerate(elements)]

    def _instance(self, x: Any, name: str) -> None:
        cls: Any = type(x)
        if not issubclass(cls, _module.Module):  # that refuses such writes by itself
            own: Any = getattr(x, "__dict__", None)
            if type(own) is dict:
                self._add(_DICT, own, name)
            if _module.slot_names(cls):
                self._add(_SLOTS, x, name)
        rule = _classify.rule_of(x)
        _, keys, values = (rule if isinstance(rule, Kind) else _kinds.OBJECT).open(x)
        self._pending.append((cls, "", False))
        self._pending += [(y, f"{name}.{k}", True) for k, y in zip(keys, values, strict=True)]


def _reaches_inside(value: Any, scope: Scope) -> bool:
    """Tell whether something is reached from a value that means nothing outside of a scope."""
    pending, seen = [value], dict[int, Any]()
    while pending and len(seen) < _MOST:
        x = pending.pop()
        if type(x) in _classify.EXACT_BY_TYPE or id(x) in seen:
            continue
        seen[id(x)] = x
        rule = _classify.rule_of(x)
        if rule is SPENT or scope.is_inside(x):
            return True
        if isinstance(rule, Kind) and rule.knows_owners:
            if scope.owns_what_it_makes and rule.is_owned(x):
                return True
            continue  # it was made outside
        if isinstance(x, types.FunctionType):
            cells = [cell.cell_contents for cell in x.__closure__ or () if is_filled(cell)]
            pending += [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        elif isinstance(rule, Kind):
            pending += rule.open(x)[2]
        elif rule is _classify.UNKNOWN or rule is _classify.OPAQUE:
            pending += _kinds.OBJECT.open(x)[2]
    return False


def refuse_leaks(names: list[str]) -> None:
    """Raise `CapturedWriteError` for places in which something was left, if there are any."""
    if names:
        raise CapturedWriteError(
            "the function has left a tracer, or an object that exists only while it is traced, "
            f"in:\n{first_few(names)}\nwhere it would mean nothing, and where later calls would "
            "leave nothing; it was put back. Return the value, or hold it in a Variable or in an "
            "attribute of a Module"
        )


def _shown(key: Any) -> str:
    return repr(key) if type(key) in (str, int) else "..."  # no code of the user is run


def _library_of(module: Any) -> str:
    return _first_name(str(module))


@functools.lru_cache(maxsize=4096)
def _first_name(module: str) -> str:
    return module.partition(".")[0]
