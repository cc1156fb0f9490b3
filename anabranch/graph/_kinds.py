"""How each kind of object is opened and put together again.

A kind says what an object contains (its keys and the values under them), makes an empty one, and
fills it. **Nodes** are mutable and have identity: they are made empty, filled, and rewritten in
place. **Values** are immutable and have none: they are made at once from their children, which is
all that anybody ever does with them.

Objects are read through their attribute dictionary and slots only, never through properties or
descriptors, and made without running any code of the user.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anabranch.errors import NodeTypeError
from anabranch.graph import _module, _static, _variable
from anabranch.graph._kind import Cell, Kind, Opened, items_of, key_value
from anabranch.graph._module import ABSENT, read_slot
from anabranch.graph._pytrees import PytreeKind
from anabranch.graph._tokens import check_owned, current_token, owns
from anabranch.graph._watchers import write_value

_set: Callable[[Any, str, Any], None] = object.__setattr__


# -- nodes ---------------------------------------------------------------------------------------


class _VariableKind(Kind):
    """The value under the key `value`; the metadata are extra, in the order they were set."""

    __slots__ = ()
    is_variable = True
    is_object = True
    cell = Cell(
        "_value",
        operator.attrgetter("_value"),
        vars(_variable.Variable)["_value"].__set__,
        operator.attrgetter("_metadata"),
        operator.attrgetter("_token"),
    )

    def open(self, obj: Any) -> Opened:
        metadata = obj._metadata
        if not metadata:
            return None, ("value",), (obj._value,)
        encoded = tuple([(name, _static.encode(value)) for name, value in metadata.items()])
        return encoded, ("value",), (obj._value,)

    def holds(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> bool:
        if obj._metadata or extra:
            return super().holds(obj, extra, keys, values)
        return obj._value is values[0]

    def create(self, cls: Any, extra: Any) -> Any:
        variable = object.__new__(cls)
        _set(variable, "_token", current_token())
        _set(variable, "_memories", None)
        return variable

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        current = getattr(obj, "_metadata", None)
        fresh = current is None
        if fresh or ((current or extra) and self.open(obj)[0] != extra):
            old = {} if fresh else dict(self.open(obj)[0] or ())
            metadata = {
                name: obj._metadata[name] if old.get(name) == value else _static.decode(value)
                for name, value in extra or ()
            }
            view = types.MappingProxyType(metadata) if metadata else _variable.NO_METADATA
            if fresh:  # nobody knows it
                _set(obj, "_metadata", view)
            else:
                _variable.write_metadata(obj, view)
        write_value(obj, values[0])

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        metadata = {name: _static.decode(value) for name, value in extra} if extra else {}
        return _variable.stand_in(cls, values[0], metadata)

    def check_writable(self, obj: Any) -> None:
        check_owned(obj, obj._token, "write the value")

    def is_owned(self, obj: Any) -> bool:
        return owns(obj._token)

    def read(self, obj: Any) -> Any:
        return obj._value

    def token(self, obj: Any) -> Any:
        return obj._token

    def copy_for(self, obj: Any, token: Any) -> Any:
        copy = object.__new__(type(obj))
        for name, content in (
            ("_value", obj._value),
            ("_metadata", obj._metadata),
            ("_token", token),
            ("_memories", None),
        ):
            _set(copy, name, content)
        return copy

    def empty(self, obj: Any) -> None:
        _set(obj, "_value", None)

    def show_key(self, key: Any) -> str:
        return ""


class _AttributeKind(Kind):
    """Attributes from `__dict__` and slots, in the order in which they were set."""

    __slots__ = ("_slots",)
    is_object = True
    numbers = False

    def open(self, obj: Any) -> Opened:
        attributes = self._attributes(obj)
        slots = _module.slot_names(type(obj))
        keys, values = items_of(attributes)
        for name in slots:
            value = read_slot(obj, name)
            if value is not ABSENT:
                keys, values = (*keys, name), (*values, value)
        return None, keys, values

    def _attributes(self, obj: Any) -> dict[str, Any]:
        try:
            return object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return {}

    def create(self, cls: Any, extra: Any) -> Any:
        return object.__new__(cls)

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        attributes = self._attributes(obj)
        slots = _module.slot_names(type(obj))
        new = dict(zip(keys, values, strict=True))
        for name in slots:
            value = new.pop(name, ABSENT)
            old = read_slot(obj, name)
            if value is not ABSENT:
                if value is not old:
                    _set(obj, name, value)
            elif old is not ABSENT:
                object.__delattr__(obj, name)
        rewrite_dict(attributes, new)

    def complete(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if (storage := self.storage(type(obj))) is None:
            _AttributeKind.fill(self, obj, extra, keys, values)  # there is nobody to be told
        else:
            storage(obj).update(zip(keys, values, strict=True))

    def storage(self, cls: Any) -> Callable[[Any], dict[Any, Any]] | None:
        return None if _module.slot_names(cls) else self._attributes

    def empty(self, obj: Any) -> None:
        self.fill(obj, None, (), ())

    def show_key(self, key: Any) -> str:
        return f".{key}"


_PLANS: Any = vars(_module._Identity)["_ab_plans"]


class _ModuleKind(_AttributeKind):
    __slots__ = ()
    is_root = True

    def holds(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> bool:
        attributes = _module.attributes_of(obj)
        if _module.slot_names(type(obj)) or len(attributes) != len(values):
            return super().holds(obj, extra, keys, values)
        return all(map(operator.is_, attributes.values(), values)) and (*attributes,) == keys

    def _attributes(self, obj: Any) -> dict[str, Any]:
        return _module.attributes_of(obj)

    def storage(self, cls: Any) -> Callable[[Any], dict[Any, Any]] | None:
        return None if _module.slot_names(cls) else _module.attributes_of

    def kept_plans(self, obj: Any) -> Any:
        try:
            return _PLANS.__get__(obj)
        except AttributeError:
            _PLANS.__set__(obj, weakref.WeakKeyDictionary[Any, Any]())
            return _PLANS.__get__(obj)

    def create(self, cls: Any, extra: Any) -> Any:
        return _module.empty_modules((cls,))[0]

    def create_all(self, classes: Sequence[Any], extras: Sequence[Any]) -> Iterable[Any]:
        return _module.empty_modules(classes)

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        structural = not _module.replaces_arrays(obj, keys, values)
        if structural:
            _module.tell_of_write(obj)
        super().fill(obj, extra, keys, values)
        if structural:
            _module.tell_of_write(obj)

    def check_writable(self, obj: Any) -> None:
        check_owned(obj, object.__getattribute__(obj, "_ab_token"), "write the attributes")

    def is_owned(self, obj: Any) -> bool:
        return owns(object.__getattribute__(obj, "_ab_token"))

    def empty(self, obj: Any) -> None:
        self._attributes(obj).clear()


def rewrite_dict(old: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Make a dictionary equal to another one, order included, writing only what differs."""
    kept = [key for key in old if key in new]
    if len(kept) < len(old):
        for key in [key for key in old if key not in new]:
            del old[key]
    if kept != list(new)[: len(kept)]:
        old.clear()
    for key, value in new.items():
        if old.get(key, ABSENT) is not value:
            old[key] = value


class _ListKind(Kind):
    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        return None, range(len(obj)), tuple(obj)

    def create(self, cls: Any, extra: Any) -> Any:
        return []

    def empty(self, obj: Any) -> None:
        obj.clear()

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        obj[:] = values

    def show_key(self, key: Any) -> str:
        return f"[{key}]"


class _DequeKind(_ListKind):
    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        return obj.maxlen, range(len(obj)), tuple(obj)

    def create(self, cls: Any, extra: Any) -> Any:
        return deque(maxlen=extra)

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        obj.clear()
        obj.extend(values)


class _DictKind(Kind):
    """dict and its exact kin; keys other than str are kept in comparable form."""

    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        keys, values = items_of(obj)
        if not all([type(key) is str for key in keys]):  # noqa: C419 - a generator is slower
            keys = tuple([key if type(key) is str else _encode_key(key) for key in keys])
        extra = _static.encode(obj.default_factory) if type(obj) is defaultdict else None
        return extra, keys, values

    def create(self, cls: Any, extra: Any) -> Any:
        return cls()

    def empty(self, obj: Any) -> None:
        obj.clear()

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if type(obj) is defaultdict:
            obj.default_factory = _static.decode(extra)
        # Python takes 1 and True for one key: keys are compared in their comparable form
        own = {key if type(key) is str else _static.encode(key): key for key in obj}
        if tuple(own) != tuple(keys):
            obj.clear()
        named = [own[k] if k in own else key_value(k) for k in keys]
        rewrite_dict(obj, dict(zip(named, values, strict=True)))

    def storage(self, cls: Any) -> Callable[[Any], dict[Any, Any]] | None:
        return None if cls is defaultdict else _itself

    def path_key(self, key: Any) -> Any:
        return key_value(key)


def _itself(obj: dict[Any, Any]) -> dict[Any, Any]:
    return obj


def _encode_key(key: Any) -> Any:
    if isinstance(key, tuple(_static.HOLDERS)):
        raise NodeTypeError(
            f"a {type(key).__name__} is a key of this dict; nodes can be values of a dict, "
            "never keys: use a name or a number as the key"
        )
    return _static.encode(key)


class _SetKind(Kind):
    """A set of static values; its order is not stable, so it cannot hold nodes or arrays."""

    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        for element in obj:
            if isinstance(element, tuple(_static.HOLDERS)):
                raise NodeTypeError(
                    f"this set holds a {type(element).__name__}; the order of a set is not "
                    "stable: use a list or a dict"
                )
        return _static.encode(frozenset(obj)), (), ()

    def create(self, cls: Any, extra: Any) -> Any:
        return set()

    def empty(self, obj: Any) -> None:
        obj.clear()

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        new = _static.decode(extra)
        obj.intersection_update(new)  # elements that stay are the same objects
        obj.update(new)


# -- values --------------------------------------------------------------------------------------


class _TupleKind(Kind):
    __slots__ = ()
    identity = False

    def open(self, obj: Any) -> Opened:
        return None, getattr(obj, "_fields", None) or range(len(obj)), obj

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        return tuple.__new__(cls, values)

    def show_key(self, key: Any) -> str:
        return f".{key}" if type(key) is str else f"[{key}]"


class _MethodKind(Kind):
    """A bound method: a function, and the object that it is bound to."""

    __slots__ = ()
    identity = False

    def open(self, obj: Any) -> Opened:
        return None, ("__func__", "__self__"), (obj.__func__, obj.__self__)

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        return cls(*values)

    def show_key(self, key: Any) -> str:
        return f".{key}"

    def show_below(self, text: str, key: Any) -> str:
        return "self" if key == "__self__" else text


class _PartialKind(Kind):
    __slots__ = ()
    identity = False
    numbers = False

    def open(self, obj: Any) -> Opened:
        names = tuple(obj.keywords)
        keys = ("func", *range(len(obj.args)), *names)
        return names, keys, (obj.func, *obj.args, *obj.keywords.values())

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        split = len(values) - len(extra)
        return cls(*values[:split], **dict(zip(extra, values[split:], strict=True)))

    def show_key(self, key: Any) -> str:
        return ".func" if key == "func" else f".args[{key}]" if type(key) is int else f".{key}"


class _FrozenKind(_AttributeKind):
    """A frozen dataclass: a value, read and made like an object with attributes."""

    __slots__ = ()
    identity = False
    is_object = False
    numbers = None

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        obj = object.__new__(cls)
        self.fill(obj, extra, keys, values)
        return obj


VARIABLE = _VariableKind("variable")
MODULE = _ModuleKind("module")
OBJECT = _AttributeKind("object")
LIST = _ListKind("list")
DEQUE = _DequeKind("deque")
DICT = _DictKind("dict")
SET = _SetKind("set")
TUPLE = _TupleKind("tuple")
METHOD = _MethodKind("method")
PARTIAL = _PartialKind("partial")
FROZEN = _FrozenKind("frozen dataclass")
PYTREE = PytreeKind("pytree")

EXACT: dict[type, Kind] = {
    list: LIST,
    dict: DICT,
    OrderedDict: DICT,
    defaultdict: DICT,
    Counter: DICT,
    deque: DEQUE,
    set: SET,
    tuple: TUPLE,
    types.MethodType: METHOD,
    functools.partial: PARTIAL,
}
