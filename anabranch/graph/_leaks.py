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
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from anabranch.errors import CapturedWriteError, first_few
from anabranch.graph import _classify, _kinds, _module
from anabranch.graph._code import names_in
from anabranch.graph._function import LIBRARIES, is_filled, is_library, what_is_captured
from anabranch.graph._kinds import ABSENT, Kind, read_slot
from anabranch.graph._scope import Scope
from anabranch.graph._spend import SPENT

_MOST = 1024  # things that are followed, nearest first
_LONG = 64  # elements of a container that are followed
_SEQUENCES = frozenset({_kinds.LIST, _kinds.DEQUE, _kinds.TUPLE})
_FOREIGN = LIBRARIES | sys.stdlib_module_names
# instances of these are locks, loggers and the like, from which everything can be reached
_CLOSED = LIBRARIES | {"builtins", "functools", "logging", "threading", "weakref", "_thread"}
_attributes_of_class = vars(type)["__dict__"].__get__


class _Place(NamedTuple):
    """Something that has names for what it holds."""

    name: tuple[str, str]  # what is written before, and after, the name of what it holds
    read: Callable[[], Iterable[tuple[str, Any]]]
    put: Callable[[str, Any], None]
    delete: Callable[[str], None]
    before: dict[str, Any]


class Places:
    """The places that functions reach, and what they hold now.

    Arguments:
        functions: functions, methods, partials and callable objects.
        classes: of the objects that they work on.
    """

    __slots__ = ("_pending", "_places", "_seen")

    def __init__(self, functions: Iterable[Any], classes: Iterable[type]) -> None:
        self._places: list[_Place] = []
        self._seen: dict[int, Any] = {}  # by id; with the things, so that ids stay valid
        # a thing, what it is called, and whether it is reached in a way of which no twin is made
        self._pending = deque([(x, "", False) for x in (*functions, *classes)])
        pending, seen = self._pending, self._seen
        while pending and len(seen) < _MOST:
            x, name, hidden = pending.popleft()
            if type(x) not in _classify.EXACT_BY_TYPE and id(x) not in seen:
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
        for (start, end), read, put, delete, before in self._places:
            for key, x in read():
                old = before.get(key, ABSENT)
                if old is not x and _reaches_inside(x, scope):
                    if old is ABSENT:
                        delete(key)
                    else:
                        put(key, old)
                    found.append(f"{start}{key}{end}")
        return found

    def _add(
        self,
        name: tuple[str, str],
        read: Callable[[], Iterable[tuple[str, Any]]],
        put: Callable[[str, Any], None],
        delete: Callable[[str], None],
    ) -> None:
        self._places.append(_Place(name, read, put, delete, dict(read())))

    def _add_dict(self, name: str, held: dict[str, Any]) -> None:
        self._add((f"{name}.", ""), lambda: [*held.items()], held.__setitem__, held.__delitem__)

    def _follow(self, x: Any, name: str, hidden: bool) -> None:
        cls: Any = type(x)
        if cls is types.FunctionType:
            self._function(x, name)
        elif cls in _classify.LOOK:  # a transformed function
            self._add_dict(name, vars(x))
            self._pending.append((getattr(x, "__wrapped__", None), name, hidden))
        elif issubclass(cls, type):
            self._class(x)
        elif cls is types.ModuleType:
            if _library_of(x.__name__) not in _FOREIGN:
                self._add_dict(name, vars(x))
        else:
            self._other(x, _classify.rule_of(x), name, hidden)

    def _function(self, function: types.FunctionType, name: str) -> None:
        scope, called = function.__globals__, function.__qualname__
        if is_library(scope):
            return
        self._pending += [(x, capture.name, False) for capture, x in what_is_captured(function)]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            self._add(
                ("", f" (a variable of {called.rpartition('.<locals>.')[0]})"),
                lambda: [(key, c.cell_contents) for key, c in cells.items() if is_filled(c)],
                lambda key, x: setattr(cells[key], "cell_contents", x),
                lambda key: delattr(cells[key], "cell_contents"),
            )
        stored = names_in(function.__code__).stored
        if stored:
            self._add(
                ("", f" (a global of {scope.get('__name__')})"),
                lambda: [(key, scope[key]) for key in stored if key in scope],
                scope.__setitem__,
                scope.__delitem__,
            )
        own = function.__dict__
        self._add_dict(called, own)
        self._pending.append((own.get("__wrapped__"), name, False))

    def _class(self, cls: Any) -> None:
        if not cls.__flags__ & _module.IS_HEAP_TYPE or _library_of(cls.__module__) in _FOREIGN:
            return
        name, attributes = cls.__qualname__, _attributes_of_class(cls)
        self._add(
            (f"{name}.", " (an attribute of the class)"),
            lambda: [*attributes.items()],
            functools.partial(type.__setattr__, cls),
            functools.partial(type.__delattr__, cls),
        )
        pending = self._pending
        pending += [(base, "", False) for base in cls.__bases__]
        for key, x in attributes.items():
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
                self._add_dict(name, x.__dict__)  # that of this thread
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
                self._add_dict(name, own)
            slots = _module.slot_names(cls)
            if slots:
                self._add(
                    (f"{name}.", ""),
                    lambda: [(k, y) for k in slots if (y := read_slot(x, k)) is not ABSENT],
                    functools.partial(object.__setattr__, x),
                    functools.partial(object.__delattr__, x),
                )
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
    return str(module).partition(".")[0]
