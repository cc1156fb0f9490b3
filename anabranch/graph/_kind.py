"""`Kind`: how one kind of object is opened and put together again."""

from __future__ import annotations

import importlib
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from anabranch.graph import _static

Opened: TypeAlias = "tuple[Any, Sequence[Any], Sequence[Any]]"
"""`(extra, keys, values)`: extra is static and compared, keys name the values."""


def is_same(a: Opened, b: Opened) -> bool:
    """Compare contents: keys and static extras by value, everything else by identity."""
    (extra, keys, values), (old_extra, old_keys, old_values) = a, b
    return (
        len(values) == len(old_values)
        and all(map(operator.is_, values, old_values))
        and keys == old_keys
        and (extra is old_extra or extra == old_extra)
    )


class Cell(NamedTuple):
    """How the value of a Variable of one kind is read and written, in C."""

    name: str  # of the slot
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    metadata: Callable[[Any], Any]  # the dictionary, or what stands for it
    owner: Callable[[Any], Any]  # what tells the trace that it belongs to


class Kind:
    """How one kind of object is opened; instances compare by identity."""

    __slots__ = ("name",)
    identity = True  # nodes; values are walked through without identity
    is_variable = False  # one value under one key, metadata as extra; paths do not show it
    is_object = False  # a Variable, or something with attributes: no container, no value
    numbers: bool | None = None  # are numbers inside arrays? None: as in the place around it
    is_root = False  # an object that can keep what plans know of it
    bookkeeping: frozenset[str] = frozenset()  # attributes that say nothing about the structure
    cell: Cell | None = None  # how Variables are read and written in bulk

    def __init__(self, name: str) -> None:
        self.name = name
        _BY_NAME[name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return (kind_named, (type(self).__module__, self.name))

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def open(self, obj: Any) -> Opened:
        """Return extra, keys and values of an object."""
        raise NotImplementedError

    def create(self, cls: Any, extra: Any) -> Any:
        """Return an empty node."""
        raise NotImplementedError

    def create_all(self, classes: Sequence[Any], extras: Sequence[Any]) -> Iterable[Any]:
        """Return as many empty nodes, which belong together."""
        return map(self.create, classes, extras)

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Give a node exactly these contents, whatever it held before."""
        raise NotImplementedError

    def complete(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Fill a node that `create` has just made with the same extra."""
        self.fill(obj, extra, keys, values)

    def storage(self, cls: Any) -> Callable[[Any], dict[Any, Any]] | None:
        """Return what finds the dictionary that a node of a class stores its contents in, by key.

        None if there is no such dictionary, or more to be done to `complete` a node.
        """

    def extra_without(self, extra: Any, removed: Sequence[Any]) -> Any:
        """Return the extra of a node from which some keys have been removed."""
        return extra

    def holds(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> bool:
        """Tell whether `open` would return exactly these contents, in the sense of `is_same`."""
        return is_same(self.open(obj), (extra, keys, values))

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        """Return a value made of these contents."""
        raise NotImplementedError

    def check_writable(self, obj: Any) -> None:
        """Raise if the current trace must not write this node."""

    @property
    def knows_owners(self) -> bool:
        """Whether its objects know the trace that has made them."""
        return type(self).is_owned is not Kind.is_owned

    def is_owned(self, obj: Any) -> bool:
        """Tell whether the current trace has made this node; True if that cannot be known."""
        return True

    def read(self, obj: Any) -> Any:
        """Return the value of a Variable."""
        raise NotImplementedError

    def token(self, obj: Any) -> Any:
        """Return the token of the trace that a Variable was made in."""
        raise NotImplementedError

    def copy_for(self, obj: Any, token: Any) -> Any:
        """Return a copy of a Variable that belongs to another trace."""
        raise NotImplementedError

    def reference(self, obj: Any) -> Callable[[], Any]:
        """Return what returns a node as long as it is alive, and does not keep it alive."""
        return weakref.ref(obj)

    def empty(self, obj: Any) -> None:
        """Let an object hold nothing."""
        raise NotImplementedError

    def attributes(self, obj: Any) -> dict[str, Any] | None:
        """Return the dictionary with all that is read of an object, if there is one."""
        return None

    def records_names(self, obj: Any) -> bool:
        """Tell whether something that an object refers to is replaced when names change."""
        return False

    def kept_plans(self, obj: Any) -> Any:
        """Return where a root keeps what plans know of it, by plan."""
        raise NotImplementedError

    def show_key(self, key: Any) -> str:
        """Return how a key is written after an expression for the object."""
        return f"[{key_value(key)!r}]"

    def show_below(self, text: str, key: Any) -> str:
        """Return how what is under a key is written, given how the holder is."""
        return f"{text}{self.show_key(key)}"

    def path_key(self, key: Any) -> Any:
        """Return the element of a path for a key."""
        return key

    def visiting_order(self, keys: Sequence[Any]) -> Iterable[int]:
        """Return the positions of keys in the order in which paths are looked for.

        What is shared has the path that is found first.
        """
        return range(len(keys))


_BY_NAME: dict[str, Kind] = {}


def kind_named(module: str, name: str) -> Kind:
    """Return a kind by its module and name; pickled graphdefs refer to kinds this way."""
    importlib.import_module(module)
    return _BY_NAME[name]


def items_of(stored: dict[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return keys and values of a dictionary at one moment, whatever other threads do to it."""
    copy = stored.copy() if type(stored) is OrderedDict else dict.copy(stored)  # in C
    return (*copy,), (*copy.values(),)


def key_value(key: Any) -> Any:
    """Return the key of a dictionary from its comparable form."""
    return key if type(key) is str else _static.decode(key)
