"""What a thing is: leaf, number, static, node or value; the first match decides.

1. Variables, Modules and registered classes are nodes (or opaque statics, if so registered).
2. Classes that a resolver of `add_resolver` knows (objects of other libraries).
3. Exact lists, dicts and their kin are nodes; subclasses of them are refused.
4. Instances of unfrozen dataclasses are nodes.
5. Immutable containers are values: tuples, bound methods, partials, types registered with JAX,
   frozen dataclasses.
6. Other instances that have state and hash by identity are refused.
7. Everything else that can be hashed is static.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from anabranch import _jax
from anabranch.errors import ArgumentError, NodeTypeError, StaticValueError
from anabranch.graph import _kinds, _module
from anabranch.graph._code import names_in
from anabranch.graph._kinds import Kind
from anabranch.graph._module import Module
from anabranch.graph._static import EXACT_BY_TYPE, HOLDERS
from anabranch.graph._variable import Variable

C = TypeVar("C", bound=type)


class Leaf:
    """An array: what is traced."""


class Mutable:
    """A `jax.Ref`: traced too, but passed once, however often it is reached."""


class Number:
    """A Python number or numpy scalar: traced in some places, static in others."""


class Static:
    """A hashable value, compared by type and value."""


class Opaque:
    """A registered object that is static although it hashes by identity."""


class Unknown:
    """An instance that has to be looked at, one by one."""


HOLDERS.extend([Variable, Module])
LEAF: Final = Leaf()
REF: Final = Mutable()
NUMBER: Final = Number()
STATIC: Final = Static()
OPAQUE: Final = Opaque()
UNKNOWN: Final = Unknown()
Rule: TypeAlias = "Kind | Leaf | Mutable | Number | Static | Opaque | Unknown"

RULES: dict[type, Rule] = {
    **_kinds.EXACT,
    **dict.fromkeys((bool, int, float, complex), NUMBER),
    **dict.fromkeys(EXACT_BY_TYPE - {bool, int}, STATIC),
    slice: STATIC,  # hashable from Python 3.12 on
    np.ndarray: LEAF,
    jax.ShapeDtypeStruct: LEAF,
}
"""Per type, found once."""

READERS: dict[type, Any] = {}
"""Per type, what reads its objects fast: see `_readers`. All are forgotten if a rule changes."""

LOOK: dict[type, Callable[[Any], Rule]] = {}
"""Types whose instances differ: functions, which may reach objects."""

_REGISTERED: dict[type, Rule] = {}
_RESOLVERS: list[Callable[[type], Rule | None]] = []

_LEAF_DTYPES = frozenset("biufcV")
_FUNCTIONS = (
    types.FunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ModuleType,
    type,
)
# Objects of these libraries that hash by identity are functions, locks and loggers.
_STATIC_LIBRARIES = frozenset(
    {"jax", "jaxlib", "numpy", "optax", "functools", "logging", "threading"}
)


def rule_of(obj: Any) -> Rule:
    """Return what an object is: by its type, but for functions."""
    cls: type = type(obj)
    rule = RULES.get(cls)
    if rule is None:
        look = LOOK.get(cls)
        if look is not None:
            return look(obj)
        if _jax.is_tracer(obj):  # one class for arrays and Refs: not kept
            return REF if _jax.is_ref_tracer(obj) else LEAF
        rule = RULES[cls] = _classify(cls, obj)
    return rule


def is_traceable(x: np.ndarray[Any, Any]) -> bool:
    """Tell whether JAX traces numpy arrays of the dtype of this one."""
    return x.dtype.kind in _LEAF_DTYPES and x.dtype.type is not np.void  # bfloat16 is of kind V


def is_object(x: Any) -> bool:
    """Tell whether something is a Variable, or a node that has attributes."""
    if type(x) in LOOK:
        return False
    rule = rule_of(x)
    return isinstance(rule, Kind) and rule.is_object


def value_of(x: Any) -> Any:
    """Return what a Variable of any library holds; everything else is returned as it is."""
    rule = rule_of(x)
    return rule.read(x) if isinstance(rule, Kind) and rule.is_variable else x


def kind_of_variables(cls: type) -> Kind | None:
    """Return how instances of a class are opened if they are Variables, of any library."""
    rule = RULES.get(cls)
    if rule is None:
        rule = RULES[cls] = _classify(cls, None)
    return rule if isinstance(rule, Kind) and rule.is_variable else None


def _classify(cls: type, obj: Any) -> Rule:
    if cls in _REGISTERED:
        return _REGISTERED[cls]
    known = _known(cls)
    if known is not None:
        return known
    if _is_ref(obj):
        return REF
    if isinstance(obj, jax.Array):
        return LEAF
    if issubclass(cls, np.generic):
        # those of ml_dtypes, bfloat16 and such, derive from no class of numbers
        is_number = issubclass(cls, np.bool_) or jnp.issubdtype(cls, np.number)
        return NUMBER if is_number else STATIC
    dataclass = dataclasses.is_dataclass(cls)
    if dataclass and not cls.__dataclass_params__.frozen:
        return _kinds.OBJECT
    if issubclass(cls, functools.partial):
        return _kinds.PARTIAL
    if _is_static_type(cls):
        return STATIC
    if _registered_with_jax(obj):
        return _kinds.PYTREE
    if dataclass:
        return _kinds.FROZEN
    if issubclass(cls, tuple):
        return _kinds.TUPLE if hasattr(cls, "_fields") else STATIC
    return UNKNOWN


def _known(cls: type) -> Rule | None:
    """Return what objects of our own classes are, and of those that a resolver knows."""
    if issubclass(cls, Variable):
        return _kinds.VARIABLE
    if issubclass(cls, Module):
        return _kinds.MODULE
    return next(filter(None, (resolve(cls) for resolve in _RESOLVERS)), None)


def _is_ref(obj: Any) -> bool:
    ref: Any = getattr(jax, "Ref", None)
    return ref is not None and isinstance(obj, ref)


def _is_static_type(cls: type) -> bool:
    from anabranch.graph._graphdef import GraphDef  # it needs the walk, which needs this file

    return cls is GraphDef or issubclass(cls, _FUNCTIONS)


def _registered_with_jax(obj: Any) -> bool:
    # (flattening obj itself would warn about iterators)
    return jtu.default_registry.flatten_one_level(obj) is not None


def check_static(obj: Any) -> None:
    """Raise `NodeTypeError` unless an instance of an unknown type may be static."""
    cls: type = type(obj)
    name = cls.__qualname__
    for base in (list, dict, set, deque, np.ndarray):
        if issubclass(cls, base):
            raise NodeTypeError(
                f"{name} is a subclass of {base.__name__}, whose own behaviour cannot be seen: "
                f"use an exact {base.__name__}, or a Module that holds one"
            )
    hidden = _hidden_node(obj)
    if hidden is not None:
        can_be_decorated = not isinstance(obj, (weakref.ref, types.BuiltinMethodType))
        remedy = (
            "decorate the class with `@graph.node`, or hold it in a Module, a list, a dict or a "
            "tuple"
            if can_be_decorated
            else "put the object itself here, or keep this outside of what is split"
        )
        raise NodeTypeError(
            f"this {name} holds a {type(hidden).__name__} where it cannot be tracked: {remedy}"
        )
    if cls.__hash__ is None:
        raise NodeTypeError(
            f"{name} is neither a node nor hashable: decorate its class with `@graph.node` to "
            "have its attributes tracked, or make it hashable to have it static"
        )
    if cls.__hash__ is not object.__hash__:
        return
    if hasattr(cls, "__next__"):
        raise NodeTypeError(f"{name} is an iterator, whose state cannot be seen: use a list")
    if issubclass(cls, _STATEFUL) or (
        cls.__module__.partition(".")[0] not in _STATIC_LIBRARIES and _has_state(obj)
    ):
        raise NodeTypeError(
            f"{name} has state, hashes by identity and is not registered, so changes of it would "
            f"be lost: decorate the class with `@graph.node` to have its attributes tracked, or "
            "with `@graph.node(static=True)` if it never changes inside a transformed function"
        )


def _hidden_node(obj: Any) -> Any:
    """Return a node that an object refers to in a way that a split cannot follow, or None."""
    if isinstance(obj, weakref.ref):
        held: Any = obj()
    elif isinstance(obj, types.BuiltinMethodType):
        held = obj.__self__  # `{...}.get`
    elif isinstance(obj, BaseException):
        held = next((x for x in obj.args if isinstance(rule_of(x), Kind)), None)
    else:
        attributes = getattr(obj, "__dict__", None) or {}
        held = next((x for x in attributes.values() if isinstance(x, tuple(HOLDERS))), None)
    rule = STATIC if held is None else rule_of(held)
    return held if isinstance(rule, Kind) and rule.identity else None


def check_shareable(obj: Any) -> None:
    """Raise `StaticValueError` for an object that later calls of a trace must not share.

    A static value that a traced function leaves behind is the same object for every later call.
    """
    cls: type = type(obj)
    if isinstance(obj, types.FunctionType):
        held = [cell.cell_contents for cell in obj.__closure__ or () if cell != _EMPTY_CELL]
        held += obj.__defaults__ or ()
        held += (obj.__kwdefaults__ or {}).values()
        if _has_tracer(held):
            raise StaticValueError(
                f"a function ({obj.__qualname__}) that closes over a traced array is left behind "
                "by the traced function; return the array, or keep it in an attribute"
            )
        state = _own_state(obj)
        if state is not None:
            raise StaticValueError(
                f"a function ({obj.__qualname__}) that binds a variable around it ({state}) anew "
                "is left behind by the traced function; it would be one function for all later "
                "calls, which would go on with the same variable: hold what changes in a Module "
                "or in a Variable"
            )
    if cls.__hash__ is not object.__hash__ or isinstance(obj, _FUNCTIONS):
        return
    library = cls.__module__.partition(".")[0]
    if library == "jax" or (library in _STATIC_LIBRARIES and callable(obj)):
        return  # what a pullback holds (a jaxpr, say) is never written
    raise StaticValueError(
        f"a {cls.__qualname__} is left behind by the traced function; it would be one object for "
        "all later calls, and it may be mutable: make it outside and pass it as part of an "
        "argument, or decorate its class with `@graph.node`"
    )


def _own_state(function: types.FunctionType) -> str | None:
    """Return the name of a variable that a function may change, and that holds no object."""
    rebound = names_in(function.__code__).rebound
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        filled = name in rebound and cell != _EMPTY_CELL
        if filled and not isinstance(rule_of(cell.cell_contents), Kind):
            return name
    return None


def _has_tracer(held: Any) -> bool:
    pending, seen = [held], set[int]()
    while pending:
        x = pending.pop()
        if isinstance(x, (tuple, list, dict)) and id(x) not in seen:
            seen.add(id(x))
            pending += x.values() if isinstance(x, dict) else x
        elif _jax.is_tracer(x):
            return True
    return False


_EMPTY_CELL = types.CellType()
_STATEFUL: tuple[type, ...] = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    BaseException,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
"""Classes whose state lives in C, so that nothing of it can be seen."""


def _has_state(obj: Any) -> bool:
    if getattr(obj, "__dict__", None):
        return True
    return any(hasattr(obj, name) for name in _module.slot_names(type(obj)))


def register_node(cls: type, *, static: bool = False) -> None:
    """Declare instances of a class to be nodes, or opaque statics.

    Arguments:
        cls: a class whose state is in `__dict__` and slots.
        static: the objects are no nodes; their attributes are static, compared before and after
            a trace, and never written.

    Raises:
        NodeTypeError: if instances keep state in C, like subclasses of dict.

    >>> import anabranch as ab
    >>> class Point:
    ...     def __init__(self, x):
    ...         self.x = x
    >>> ab.graph.register_node(Point)
    >>> p = Point(ab.Param(1.0))
    >>> len(ab.state(p).leaves)
    1
    """
    if not isinstance(cls, type):
        raise ArgumentError(
            f"a class is registered to be a node, not a {type(cls).__name__}: write `@graph.node`, "
            "or `@graph.node(static=True)`, before a class"
        )
    known: Any = _known(cls)
    if known is not None:
        if static and known.identity:
            raise NodeTypeError(f"{cls.__qualname__} is always a node and cannot be static")
        return
    layout: Any = next(b for b in cls.__mro__ if not b.__flags__ & _module.IS_HEAP_TYPE)
    if layout is not object:
        raise NodeTypeError(
            f"{cls.__qualname__} derives from {layout.__name__}, whose state lives in C and "
            f"cannot be split: hold a {layout.__name__} as an attribute instead"
        )
    declare(cls, OPAQUE if static else _kinds.OBJECT)


@overload
def node(cls: C, /) -> C: ...
@overload
def node(*, static: bool = False) -> Callable[[C], C]: ...
def node(cls: Any = None, /, *, static: bool = False) -> Any:
    """Declare a class, as a decorator, to be a node: see `register_node`.

    >>> import anabranch as ab
    >>> @ab.graph.node
    ... class Walker:
    ...     def __init__(self):
    ...         self.at = ab.Variable(0)
    ...
    ...     @ab.jit
    ...     def step(self):
    ...         self.at.value += 1
    >>> w = Walker()
    >>> w.step()
    >>> int(w.at)
    1
    """

    def decorate(cls: C) -> C:
        register_node(cls, static=static)
        return cls

    return decorate if cls is None else decorate(cls)


def declare(cls: type, rule: Rule) -> None:
    """Declare what instances of a class are."""
    _REGISTERED[cls] = RULES[cls] = rule
    READERS.clear()


def declare_look(cls: type, look: Callable[[Any], Rule]) -> None:
    """Declare that the instances of a class are not all the same, and how to tell."""
    LOOK[cls] = look


def add_resolver(resolve: Callable[[type], Rule | None]) -> None:
    """Let another library's classes be known: the resolver returns their kind, or None."""
    _RESOLVERS.append(resolve)
    for cls in [c for c in RULES if resolve(c) is not None]:
        del RULES[cls]
    READERS.clear()
