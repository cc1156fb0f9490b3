"""How objects of flax.nnx are opened: imported when the first of them appears."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from flax import nnx

from anabranch import graph
from anabranch.errors import NodeTypeError, SpentTwinError
from anabranch.graph import _classify, _kinds, _spend, _static, _tokens
from anabranch.graph._counterparts import add_counterpart
from anabranch.graph._kind import Kind, Opened
from anabranch.graph._leaf_info import LeafInfo
from anabranch.graph._recording import RECORDERS
from anabranch.interop import _layout
from anabranch.interop._layout import NODES, OWN, STATE
from anabranch.interop._nnx_reads_states import teach_flax
from anabranch.interop._nnx_records import NNXRecords

_VARIABLE_KEYS = ("value",)


class _VariableKind(Kind):
    """The raw value; the metadata are extra, those included that flax itself keeps there."""

    __slots__ = ()
    is_variable = True
    is_object = True
    cell = _layout.CELL

    def open(self, obj: Any) -> Opened:
        metadata = _layout.metadata_of(obj)
        encoded = tuple([(name, _static.encode(value)) for name, value in metadata.items()])
        return encoded, _VARIABLE_KEYS, (_layout.raw_value(obj),)

    def create(self, cls: Any, extra: Any) -> Any:
        return _layout.new_variable(cls)

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        known = _layout.known_metadata(obj)
        old = {} if known is None else {k: _static.encode(v) for k, v in known.items()}
        if known is None or tuple(old.items()) != extra:
            metadata = {
                name: known[name] if known and old.get(name) == value else _static.decode(value)
                for name, value in extra
            }
            _layout.set_metadata(obj, metadata)
        _layout.set_value(obj, values[0])

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        variable = self.create(cls, extra)
        self.fill(variable, extra, keys, values)
        return variable

    def check_writable(self, obj: Any) -> None:
        if not _layout.variable_is_owned(obj):
            _tokens.refuse(obj, "write the value")

    def is_owned(self, obj: Any) -> bool:
        return _layout.variable_is_owned(obj)

    def token(self, obj: Any) -> Any:
        return _layout.token_of_variable(obj)

    def copy_for(self, obj: Any, token: Any) -> Any:
        copy = _layout.new_variable_of(type(obj), token)
        self.fill(copy, self.open(obj)[0], _VARIABLE_KEYS, (_layout.raw_value(obj),))
        return copy

    def reference(self, obj: Any) -> Any:
        return _layout.reference_to(obj)

    def read(self, obj: Any) -> Any:
        value = _layout.raw_value(obj)
        return value[...] if _classify.rule_of(value) is _classify.REF else value

    def empty(self, obj: Any) -> None:
        _layout.empty_variable(obj)

    def show_key(self, key: Any) -> str:
        return ""


class _ObjectKind(Kind):
    """The attributes; which of them flax takes for data, and its flags, are extra."""

    __slots__ = ()
    is_object = True
    is_root = True
    numbers = False
    bookkeeping = frozenset({STATE})

    def attributes(self, obj: Any) -> dict[str, Any] | None:
        return vars(obj)

    def records_names(self, obj: Any) -> bool:
        return _layout.records_names(obj)

    def kept_plans(self, obj: Any) -> Any:
        return _layout.plans_of(vars(obj)[STATE])

    def open(self, obj: Any) -> Opened:
        attributes = vars(obj)
        state = attributes[STATE]
        extra = (_layout.static_nodes(attributes[NODES]), state.initializing, state.is_setup)
        keys = tuple([name for name in attributes if name not in OWN])
        return extra, keys, tuple([attributes[name] for name in keys])

    def extra_without(self, extra: Any, removed: Sequence[Any]) -> Any:
        # as `del` does
        nodes, initializing, is_setup = extra
        return _layout.static_nodes_without(nodes, removed), initializing, is_setup

    def create(self, cls: Any, extra: Any) -> Any:
        obj = object.__new__(cls)
        nodes, initializing, is_setup = extra
        attributes = vars(obj)
        attributes[STATE] = _layout.new_state(initializing, is_setup)
        attributes[NODES] = _layout.nodes_of(nodes)
        return obj

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        nodes, initializing, is_setup = extra
        attributes = vars(obj)
        state = attributes[STATE]
        state._initializing, state._is_setup = initializing, is_setup
        if _layout.static_nodes(attributes[NODES]) != nodes:
            attributes[NODES] = _layout.nodes_of(nodes)
        own = {name: value for name, value in attributes.items() if name in OWN}
        _kinds.rewrite_dict(attributes, {**own, **dict(zip(keys, values, strict=True))})

    def check_writable(self, obj: Any) -> None:
        if not _layout.state_is_owned(vars(obj)[STATE]):
            _tokens.refuse(obj, "write the attributes")

    def is_owned(self, obj: Any) -> bool:
        return _layout.state_is_owned(vars(obj)[STATE])

    def empty(self, obj: Any) -> None:
        vars(obj).clear()

    def show_key(self, key: Any) -> str:
        return f".{key}"

    def visiting_order(self, keys: Sequence[Any]) -> Iterable[int]:
        # what is shared has the path that flax gives it
        return sorted(range(len(keys)), key=keys.__getitem__)


class _BridgedKind(_ObjectKind):
    """Modules around modules of linen, whose flags change."""

    __slots__ = ()
    is_root = False

    def attributes(self, obj: Any) -> dict[str, Any] | None:
        return None


class _ListKind(_ObjectKind):
    """`nnx.List`, whose elements are attributes called `0`, `1` and so on."""

    __slots__ = ()

    def show_key(self, key: Any) -> str:
        return f"[{key}]" if key.isdigit() else f".{key}"

    def path_key(self, key: Any) -> Any:
        return int(key) if key.isdigit() else key

    def visiting_order(self, keys: Sequence[Any]) -> Iterable[int]:
        def place(i: int) -> tuple[bool, int, str]:
            return not keys[i].isdigit(), int(keys[i]) if keys[i].isdigit() else 0, keys[i]

        return sorted(range(len(keys)), key=place)


class _StateKind(Kind):
    """`nnx.State`: a mapping around nested dicts, read like the outermost of them."""

    __slots__ = ()
    is_object = True

    def attributes(self, obj: Any) -> dict[str, Any] | None:
        return obj.raw_mapping

    def open(self, obj: Any) -> Opened:
        return _kinds.DICT.open(obj.raw_mapping)

    def create(self, cls: Any, extra: Any) -> Any:
        return cls({})

    def fill(self, obj: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        _kinds.DICT.fill(obj.raw_mapping, extra, keys, values)

    def empty(self, obj: Any) -> None:
        obj.raw_mapping.clear()

    def path_key(self, key: Any) -> Any:
        return _kinds.DICT.path_key(key)


class _HijaxKind(Kind):
    __slots__ = ()

    def open(self, obj: Any) -> Opened:
        raise NodeTypeError(
            "this is a hijax Variable of flax, which is itself an array to JAX and has no "
            "identity here: make the Variable with hijax=False"
        )


VARIABLE = _VariableKind("nnx variable")
OBJECT = _ObjectKind("nnx object")
MODULE = _ObjectKind("nnx module")
LIST = _ListKind("nnx list")
BRIDGED = _BridgedKind("nnx bridged object")
STATE_KIND = _StateKind("nnx state")
HIJAX = _HijaxKind("nnx hijax variable")


_HELD = """This {} is the inner twin of an argument of a transformed function, and was kept (in a
global, a list, a closure) after that function had been traced. Return it, or use the object that
was passed as the argument."""


class SpentVariable(nnx.Variable[Any]):
    """What an inner twin of a Variable becomes when its trace has ended."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise SpentTwinError(_HELD.format("Variable"))

    def __repr__(self) -> str:
        return "<spent inner twin of a Variable>"


class SpentObject(_layout.BASE):
    """What an inner twin of a Module, or of another object, becomes."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise SpentTwinError(_HELD.format("object"))

    def __repr__(self) -> str:
        return "<spent inner twin of an object>"


_spend.add_spent_class(VARIABLE, SpentVariable)
for _kind in (OBJECT, MODULE, LIST, BRIDGED):
    _spend.add_spent_class(_kind, SpentObject)


def kind_of(cls: type) -> Kind | None:
    """Return how instances of a class are opened; None if flax defines it for something else."""
    if issubclass(cls, nnx.Variable):
        return VARIABLE
    if issubclass(cls, _layout.BASE):
        if any(base.__module__.startswith("flax.nnx.bridge") for base in cls.__mro__):
            return BRIDGED
        if getattr(cls, "_pytree__has_int_keys", False):
            return LIST
        return MODULE if issubclass(cls, nnx.Module) else OBJECT
    if issubclass(cls, nnx.State):
        return STATE_KIND
    return HIJAX if cls.__name__ == "HijaxVariable" else None


def as_variable(info: LeafInfo, leaf: Any) -> Any:
    """Make a Variable of flax that holds a leaf, of the kind that it counts as."""
    if issubclass(info.kind, nnx.Variable):
        return VARIABLE.build(info.kind, info.metadata, _VARIABLE_KEYS, (leaf,))
    metadata = {name: _static.decode(cast("Any", value)) for name, value in info.metadata}
    return next(_THEIRS[cls] for cls in info.kind.__mro__ if cls in _THEIRS)(leaf, **metadata)


_THEIRS: dict[type, Any] = {}
for _name in "Variable Param BatchStat Cache Intermediate Perturbation RngKey RngCount".split():
    if hasattr(nnx, _name):
        _THEIRS[getattr(graph, _name)] = getattr(nnx, _name)
        add_counterpart(getattr(graph, _name), getattr(nnx, _name))
RECORDERS.update({MODULE: NNXRecords, BRIDGED: NNXRecords})
_static.HOLDERS.extend([nnx.Variable, _layout.BASE])
teach_flax()
