"""`Variable`: a mutable cell with identity that holds an array or a pytree of arrays.

Its class is its **kind** (what filters select by), its metadata are hashable and static.
Arithmetic acts on the value; `==` is elementwise while `hash` is identity, so a Variable can be a
key of a dictionary but must never be searched for with `in`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anabranch import _jax
from anabranch.errors import (
    ArgumentError,
    StaticValueError,
    TraceLevelError,
    VariableAttributeError,
)
from anabranch.graph import _static
from anabranch.graph._arithmetic import Arithmetic, raw
from anabranch.graph._conform import conform, write_at
from anabranch.graph._scope import OPEN, here
from anabranch.graph._tokens import NOBODY, STRUCTURE, check_owned, current_token
from anabranch.graph._watchers import Memories, write_value

V = TypeVar("V", bound="Variable")
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Variable(Arithmetic):
    """Hold an array that can be replaced in place.

    Arguments:
        value: an array of any shape and dtype, a Python number, or a pytree of them.
        metadata: hashable static values by name; they are part of the structure.

    Raises:
        TypeError: if the value is itself a Variable.
        StaticValueError: if a metadata value cannot be hashed.

    >>> import anabranch as ab
    >>> v = ab.Variable(2.0, unit="m")
    >>> v.value = v + 1
    >>> v.value, v.unit
    (3.0, 'm')
    """

    # `__dict__` is listed so that all kinds have one layout; nothing is ever stored there.
    __slots__ = ("__dict__", "__weakref__", "_memories", "_metadata", "_token", "_value")

    _value: Any
    _metadata: Mapping[str, Any]  # None before it is initialised
    _token: Any
    _memories: Memories | None  # that remember the value

    # numpy must leave `array + variable` to us
    __array_priority__ = 1000
    __array_ufunc__ = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("__slots__"):
            raise ArgumentError(
                f"{cls.__name__} declares slots, but a Variable holds its value and metadata "
                "only: use metadata, or hold the Variable in a Module"
            )
        _register_with_jax(cls)

    def __new__(cls, *args: Any, **metadata: Any) -> Self:
        variable = object.__new__(cls)
        _set(variable, "_memories", None)
        _set(variable, "_metadata", None)  # until it is initialised
        return variable

    def __init__(self, value: Any, **metadata: Any) -> None:
        if isinstance(value, Variable):
            raise ArgumentError(
                f"{type(self).__name__}(...) was given a {type(value).__name__}; a Variable "
                "holds arrays: pass `variable.value`"
            )
        view = MappingProxyType(_checked(metadata)) if metadata else NO_METADATA
        if self._metadata is None:
            _set(self, "_token", current_token())
            _set(self, "_metadata", view)
        else:  # it was initialised before: this is a write
            check_owned(self, self._token, "initialise")
            write_metadata(self, view)
        write_value(self, value)

    @property
    def value(self) -> Any:
        """The array, or pytree of arrays, that the Variable holds now."""
        return here(self, self._token)._value if OPEN else self._value

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(value, Variable):
            value = value.value
        cell = here(self, self._token) if OPEN else self
        check_owned(cell, cell._token, "write the value")
        write_value(cell, value)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata as a new dictionary.

        >>> import anabranch as ab
        >>> ab.Param(0.0, tag="bias").get_metadata()
        {'tag': 'bias'}
        """
        return dict(self._metadata)

    def set_metadata(self, **metadata: Any) -> None:
        """Set metadata by name; this changes the structure, so compiled calls trace again.

        Raises:
            StaticValueError: if a value cannot be hashed.

        >>> import anabranch as ab
        >>> v = ab.Param(0.0)
        >>> v.set_metadata(tag="bias")
        >>> v.tag
        'bias'
        """
        check_owned(self, self._token, "set the metadata")
        write_metadata(self, MappingProxyType({**self._metadata, **_checked(metadata)}))

    def replace(self: V, value: Any, **metadata: Any) -> V:
        """Return a new Variable of the same kind with another value, and metadata added.

        >>> import anabranch as ab
        >>> ab.Param(1.0, tag="w").replace(2.0)
        Param(2.0, tag='w')
        """
        return stand_in(type(self), value, {**self._metadata, **_checked(metadata)})

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup failed: metadata first, then the array's own attributes.
        if name.startswith("__") or name in Variable.__slots__:
            raise AttributeError(name)
        metadata = self._metadata
        if name in metadata:
            return metadata[name]
        try:
            return getattr(self.value, name)
        except AttributeError:
            raise VariableAttributeError(
                f"{type(self).__name__} has neither metadata nor an array attribute {name!r}; "
                f"metadata: {sorted(metadata)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value":
            object.__setattr__(self, name, value)
            return
        raise VariableAttributeError(
            f"Cannot set {name!r} on a {type(self).__name__}: write `variable.value = ...`, or "
            f"`variable.set_metadata({name}=...)` for metadata"
        )

    def __delattr__(self, name: str) -> None:
        raise VariableAttributeError(
            f"Cannot delete {name!r} of a {type(self).__name__}: take the Variable itself out of "
            "what holds it"
        )

    # -- reading and writing parts ---------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        value = here(self, self._token)._value if OPEN else self._value
        return value if index is ... else value[raw(index)]

    def __setitem__(self, index: Any, new: Any) -> None:
        if isinstance(new, Variable):
            new = new.value
        cell = here(self, self._token) if OPEN else self
        check_owned(cell, cell._token, "write the value")
        old = cell._value
        if isinstance(old, (dict, list)):
            old[index] = new
        elif index is ...:
            write_value(cell, conform(type(self), old, new))
        else:
            write_value(cell, write_at(type(self), jnp.asarray(old), raw(index), new))

    # -- the array protocol ----------------------------------------------------------------------

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        # NumPy does not copy again what it has asked us to copy
        return np.array(self.value, dtype=dtype, copy=copy)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value) if digits is None else round(self.value, digits)

    def __repr__(self) -> str:
        parts = [_describe(self._value)] if hasattr(self, "_value") else ["<empty>"]
        parts += [f"{name}={value!r}" for name, value in getattr(self, "_metadata", {}).items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    # -- copies ----------------------------------------------------------------------------------

    def __copy__(self: V) -> V:
        return stand_in(type(self), self.value, self._metadata)

    def __deepcopy__(self: V, memo: dict[int, Any]) -> V:
        return stand_in(type(self), copy.deepcopy(self.value, memo), self._metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        if any(_jax.is_tracer(x) for x in jax.tree.leaves(self.value)):
            raise TraceLevelError(
                f"Cannot pickle a {type(self).__name__} that holds a tracer; pickle it outside "
                "of the transformed function"
            )
        return (stand_in, (type(self), self.value, dict(self._metadata)))


_set: Callable[[Any, str, Any], None] = object.__setattr__


def stand_in(kind: type[V], value: Any, metadata: Mapping[str, Any]) -> V:
    """Make a Variable of a kind without running its `__init__`."""
    variable = object.__new__(kind)
    _set(variable, "_value", value)
    _set(variable, "_metadata", MappingProxyType(dict(metadata)) if metadata else NO_METADATA)
    _set(variable, "_token", current_token())
    _set(variable, "_memories", None)
    return variable


def write_metadata(variable: Variable, metadata: Mapping[str, Any]) -> None:
    """Write the metadata of a Variable that somebody may know."""
    STRUCTURE.renew_variables()  # first, so that no interrupt can prevent it
    _set(variable, "_metadata", metadata)
    STRUCTURE.renew_variables()  # and again, for those who have looked in between


def _checked(metadata: dict[str, Any]) -> dict[str, Any]:
    for name, value in metadata.items():
        try:
            _static.encode(value)
        except StaticValueError as error:
            raise StaticValueError(f"metadata {name!r}: {error}") from None
    return metadata


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array) and not _jax.is_tracer(value) and value.is_deleted():
        return f"<deleted {value.dtype}[{','.join(map(str, value.shape))}]>"
    if isinstance(value, (jax.Array, np.ndarray)) and (value.size > 8 or _jax.is_tracer(value)):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


# Compiled functions of jax.numpy take Variables as they take arrays: JAX asks for a pytree there.
# A Variable that JAX builds inside a trace is a copy that nobody will look at again, so it belongs
# to no trace and refuses to be written.


def _register_with_jax(cls: type[Variable]) -> None:
    def flatten(variable: Variable) -> tuple[tuple[Any], Any]:
        metadata = variable._metadata
        return (variable.value,), tuple([(k, _static.encode(v)) for k, v in metadata.items()])

    def unflatten(metadata: Any, children: Any) -> Variable:
        variable = stand_in(cls, children[0], {k: _static.decode(v) for k, v in metadata})
        if not _jax.is_root(_jax.current_trace()):
            _set(variable, "_token", NOBODY)
        return variable

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


_register_with_jax(Variable)


class Param(Variable):
    """A Variable that is trained: what `grad` differentiates by default.

    >>> import anabranch as ab
    >>> ab.Param(1.0) * 2
    2.0
    """

    __slots__ = ()


class BatchStat(Variable):
    """A Variable that holds running statistics.

    >>> import anabranch as ab
    >>> ab.BatchStat(0.5)
    BatchStat(0.5)
    """

    __slots__ = ()


class Cache(Variable):
    """A Variable that holds values to be used again, such as keys of an attention layer.

    >>> import anabranch as ab
    >>> ab.Cache(0)
    Cache(0)
    """

    __slots__ = ()


class Intermediate(Variable):
    """A Variable that holds a recorded intermediate value.

    >>> import anabranch as ab
    >>> ab.Intermediate(0)
    Intermediate(0)
    """

    __slots__ = ()


class Perturbation(Variable):
    """A Variable added to an intermediate value, to take gradients with respect to it.

    >>> import anabranch as ab
    >>> ab.Perturbation(0.0)
    Perturbation(0.0)
    """

    __slots__ = ()


class RngKey(Variable):
    """A Variable that holds the key of a random stream.

    >>> import anabranch as ab, jax
    >>> ab.RngKey(jax.random.key(0)).shape
    ()
    """

    __slots__ = ()


class RngCount(Variable):
    """A Variable that holds how many keys a random stream has given out.

    >>> import anabranch as ab
    >>> ab.RngCount(0) + 1
    1
    """

    __slots__ = ()
