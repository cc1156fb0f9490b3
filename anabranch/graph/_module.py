"""`Module`: a base class that records structural writes, and nothing else.

There is no metaclass, and attributes need no annotation: what an attribute is, is decided by the
value that it holds when the object is split. A Module checks that it is written by the trace that
it belongs to, and tells whoever watches it when its structure changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from anabranch._jax import current_trace
from anabranch.errors import NodeTypeError, ReadOnlyError, SpentTwinError
from anabranch.graph._tokens import OPEN_LEVELS, ROOT, STRUCTURE, current_token, owns, refuse
from anabranch.graph._watchers import SWITCHES, Watchers, tell, write_switch

_set: Callable[[Any, str, Any], None] = object.__setattr__
_get: Callable[[Any, str], Any] = object.__getattribute__
_new: Callable[[type], Any] = object.__new__
ABSENT = object()
IS_HEAP_TYPE = 1 << 9


class _Identity:
    __slots__ = ("__weakref__", "_ab_plans", "_ab_token", "_ab_watchers")


_token_of: Callable[[Any], Any] = vars(_Identity)["_ab_token"].__get__
_set_token: Callable[[Any, Any], None] = vars(_Identity)["_ab_token"].__set__
_watchers_of: Callable[[Any], Watchers | None] = vars(_Identity)["_ab_watchers"].__get__
_set_watchers: Callable[[Any, Any], None] = vars(_Identity)["_ab_watchers"].__set__


class _WithDict(_Identity):
    pass


attributes_of: Callable[[Any], dict[str, Any]] = vars(_WithDict)["__dict__"].__get__
"""The real attribute dictionary of a Module, which `vars` shows read-only."""


class AttributesView(Mapping[str, Any]):
    """A read-only view of the attributes of a Module."""

    __slots__ = ("_module",)

    def __init__(self, module: Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return attributes_of(self._module)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(attributes_of(self._module))

    def __len__(self) -> int:
        return len(attributes_of(self._module))

    def __setitem__(self, name: str, value: Any) -> None:
        # `functools.cached_property` stores its result through `instance.__dict__`
        descriptor = inspect.getattr_static(type(self._module), name, None)
        if not isinstance(descriptor, functools.cached_property):
            raise ReadOnlyError(f"vars(module) is read-only: write `module.{name} = ...`")
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"AttributesView({attributes_of(self._module)!r})"


class Module(_WithDict):
    """Derive from this class to get objects with identity that own arrays.

    Attributes are free: Variables, other Modules, lists, dicts, arrays, static values. Classes
    with state in C (`class M(Module, dict)`) are refused with `NodeTypeError`.

    >>> import anabranch as ab
    >>> class Counter(ab.Module):
    ...     def __init__(self):
    ...         self.n = ab.Variable(0)
    ...
    ...     @ab.jit
    ...     def step(self):
    ...         self.n.value += 1
    >>> counter = Counter()
    >>> counter.step()
    >>> counter.step()
    >>> int(counter.n)
    2
    """

    __slots__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is not object and not base.__flags__ & IS_HEAP_TYPE:
                raise NodeTypeError(
                    f"class {cls.__qualname__} derives from Module and from {base.__name__}, "
                    f"whose state lives in C and cannot be split: hold a {base.__name__} as an "
                    "attribute instead"
                )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        module = object.__new__(cls)
        _set(module, "_ab_token", current_token())
        _set(module, "_ab_watchers", None)
        return module

    @property
    # a property over the attribute, so that `vars(module)` is a view
    def __dict__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return AttributesView(self)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *attributes_of(self)})

    def __setattr__(self, name: str, value: Any) -> None:
        token = _token_of(self)
        # what `owns` looks at first, written out: a call less
        is_usual = token is ROOT and current_trace() is ROOT and not OPEN_LEVELS
        if not (is_usual or owns(token)):
            refuse(self, f"set attribute {name!r}")
        if is_usual and _watchers_of(self) is None:
            _set(self, name, value)
        else:
            old = attributes_of(self).get(name, ABSENT)
            are_arrays = type(value) not in _NO_ARRAYS and _is_array(old) and _is_array(value)
            if are_arrays or old is value or type(token) is weakref.ref:
                _set(self, name, value)
                return
            if is_usual and type(value) in SWITCHES and type(old) in SWITCHES:
                write_switch(self, attributes_of(self), name, value)
                return
            tell_of_write(self)  # first, so that no interrupt can prevent it
            _set(self, name, value)
        # `tell_of_write`, written out: those who have begun to watch in between, too
        STRUCTURE.stamp = object()
        if (watchers := _watchers_of(self)) is not None:
            tell(watchers)

    def __delattr__(self, name: str) -> None:
        if not owns(_token_of(self)):
            refuse(self, f"delete attribute {name!r}")
        tell_of_write(self)
        object.__delattr__(self, name)
        tell_of_write(self)

    def __repr__(self) -> str:
        attributes = attributes_of(self)
        shown = [f"{name}={_brief(value)}" for name, value in list(attributes.items())[:12]]
        if len(attributes) > len(shown):
            shown.append(f"... {len(attributes) - len(shown)} more")
        return f"{type(self).__name__}({', '.join(shown)})"

    # Copies are new objects of the current trace, without plans, watchers or tokens of the old one.

    def __copy__(self) -> Any:
        fresh = Module.__new__(type(self))
        for name, value in _state_of(self).items():
            _set(fresh, name, value)
        return fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        fresh = Module.__new__(type(self))
        memo[id(self)] = fresh
        for name, value in _state_of(self).items():
            _set(fresh, name, copy.deepcopy(value, memo))
        return fresh

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (_empty, (type(self),), _state_of(self), None, None, _restore)


_ARRAYS = (jax.Array, np.ndarray)
_NO_ARRAYS = frozenset({int, float, bool, str, type(None), list, dict, tuple, object})


def _is_array(x: Any) -> bool:
    # to ask JAX takes half a microsecond
    return type(x) not in _NO_ARRAYS and isinstance(x, _ARRAYS)


def empty_modules(classes: Sequence[type[Module]]) -> list[Module]:
    """Make Modules of the current trace that hold nothing."""
    modules = [*map(_new, classes)]
    # what writes returns None, so that `any` goes on to the end
    any(map(_set_token, modules, itertools.repeat(current_token())))
    any(map(_set_watchers, modules, itertools.repeat(None)))
    return modules


def replaces_arrays(module: Module, names: Sequence[str], values: Sequence[Any]) -> bool:
    """Tell whether a Module that gets attributes keeps its own, but for arrays in their place."""
    attributes = attributes_of(module)
    if slot_names(type(module)) or (*attributes,) != (*names,):
        return False
    pairs = zip(attributes.values(), values, strict=True)
    return all([old is new or (_is_array(old) and _is_array(new)) for old, new in pairs])  # noqa: C419


def tell_of_write(module: Module, name: str | None = None) -> None:
    """Say that the structure of a Module was written.

    Arguments:
        module: the Module.
        name: of an attribute, if nothing but its value was replaced; see `tell`.
    """
    if type(_token_of(module)) is weakref.ref:
        return  # of a trace: nobody watches it, and no walk that matters meets it
    STRUCTURE.stamp = object()
    watchers = _watchers_of(module)
    if watchers is not None:
        tell(watchers, None if name is None else (id(module), name))


@functools.cache
def slot_names(cls: type) -> tuple[str, ...]:
    """Return the names of the slots that instances of a class have, own bookkeeping excluded."""
    names: list[str] = []
    for klass in reversed(cls.__mro__):
        slots: Any = vars(klass).get("__slots__", ())
        if klass is _Identity:
            continue
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot in ("__dict__", "__weakref__"):
                continue
            private = slot.startswith("__") and not slot.endswith("__")
            names.append(f"_{klass.__name__.lstrip('_')}{slot}" if private else slot)
    return tuple(names)


def read_slot(obj: Any, name: str) -> Any:
    """Return what a slot of an object holds, `ABSENT` if it is empty."""
    try:
        return _get(obj, name)
    except AttributeError:
        return ABSENT


def _state_of(module: Module) -> dict[str, Any]:
    state = dict(attributes_of(module))
    for name in slot_names(type(module)):
        value = getattr(module, name, ABSENT)
        if value is not ABSENT:
            state[name] = value
    return state


def _empty(cls: type[Module]) -> Module:
    return Module.__new__(cls)


def _restore(module: Module, state: dict[str, Any]) -> None:
    for name, value in state.items():
        _set(module, name, value)


def _brief(value: Any) -> str:
    if isinstance(value, Module):
        return f"{type(value).__name__}(...)"
    if isinstance(value, _ARRAYS):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class SpentModule(Module):
    """What an inner twin of a Module becomes when its trace has ended."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        raise SpentTwinError(
            f"Attribute {name!r} was read from the inner twin of an argument of a transformed "
            "function, which was kept (in a global, a list, a closure, a host callback) after "
            "that function had been traced. Return the object, or use the one that was passed as "
            "the argument."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self.__getattribute__(name)

    def __repr__(self) -> str:
        return "<spent inner twin of a Module>"
