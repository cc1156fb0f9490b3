"""Stateful nodes: immutable pytrees whose state lives in a dictionary in a context variable.

A node knows only its id, which is static and survives every tree operation. The dictionary from id
to state is an ordinary pytree that goes through transforms as an input and an output, while the
methods of the nodes read and write it without being handed it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast

import jax

from anabranch import _jax
from anabranch.contextvars_ext._node_id import NodeId, next_node_id
from anabranch.contextvars_ext._set_on_enter import SetOnEnter
from anabranch.contextvars_ext._stack import find_entry
from anabranch.contextvars_ext._var import JitAwareContextVar
from anabranch.errors import ArgumentError, MissingStateError, TraceLevelError, bounded, first_few

StateT = TypeVar("StateT")

_state_dict_var: Final[JitAwareContextVar[MutableMapping[NodeId, Any]]] = JitAwareContextVar(
    "state_dict"
)

_NO_STATE = """\
The current state dictionary has no state for {node}. Put an initial one in before:

    state_dict[node.unique_id] = initial_state

{known}"""

_ESCAPE = """\
The new state of {node} belongs to {trace}, but the state dictionary was set outside of it and \
outlives it: the value would leak. Take the dictionary through the transform as an input and an \
output, and open set_state_dict_on_enter inside."""

_SLOTS = """\
{cls} declares __slots__ {slots}. A StatefulNode keeps its attributes in its __dict__, where tree \
operations find them."""


def set_state_dict_on_enter(
    state_dict: MutableMapping[NodeId, Any],
) -> SetOnEnter[MutableMapping[NodeId, Any]]:
    """Make a context manager inside which stateful nodes keep their state in a dictionary.

    Arguments:
        state_dict: from `StatefulNode.unique_id` to state. It is changed in place.

    Returns:
        A context manager that is re-usable and a decorator, as those of
        `JitAwareContextVar.set_on_enter`.

    Raises:
        TypeError: `state_dict` is no mutable mapping.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> with cx.set_state_dict_on_enter({}) as states:
        ...     cx.get_state_dict() is states
        True
    """
    if not isinstance(state_dict, MutableMapping):
        raise ArgumentError(f"A state dictionary is a mutable mapping, not {state_dict!r:.200}.")
    return _state_dict_var.set_on_enter(state_dict)


def get_state_dict() -> MutableMapping[NodeId, Any]:
    """Return the current state dictionary itself.

    Returns:
        The dictionary that was given to `set_state_dict_on_enter`.

    Raises:
        ContextValueNotSetError: there is none.
        BehindBoundaryError: it was set outside of a jit-like boundary.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> with cx.set_state_dict_on_enter({}):
        ...     cx.get_state_dict()
        {}
    """
    return _state_dict_var.get()


class StatefulNode(Generic[StateT]):
    """Base class of pytree nodes with a state; every subclass is registered with JAX.

    The attributes of an instance are the children of the pytree node, but for those named in the
    class argument `static`: they are part of the tree's structure, have to be hashable, and are
    compared with `==`. Static is also `unique_id`, which every instance gets when it is made and
    keeps in flatten, unflatten, `jax.tree.map`, copy, deepcopy and pickle. `__init__` is the
    subclass's own (it need not call ours), and does not run in unflatten.

    Class arguments:
        static: names of attributes that are no children. Subclasses inherit them.
        register: give False to register the class with JAX by hand, or not at all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from anabranch import contextvars_ext as cx
        >>> class Counter(cx.StatefulNode[jax.Array], static=("step",)):
        ...     def __init__(self, step):
        ...         self.step = step
        ...
        ...     def tick(self):
        ...         self.update_state(self.get_cur_state() + self.step)
        >>> counter = Counter(2)
        >>> @jax.jit
        ... def two_ticks(counter, states):
        ...     with cx.set_state_dict_on_enter(states):
        ...         counter.tick()
        ...         counter.tick()
        ...         return states
        >>> states = two_ticks(counter, {counter.unique_id: jnp.array(1)})
        >>> int(states[counter.unique_id])
        5
    """

    unique_id: NodeId
    _static_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(
        cls, *, static: tuple[str, ...] = (), register: bool = True, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if slots := cls.__dict__.get("__slots__"):
            raise ArgumentError(bounded(_SLOTS.format(cls=cls.__qualname__, slots=slots)))
        if isinstance(static, str):
            raise ArgumentError(f"static is a tuple of names; write static=({static!r},).")
        cls._static_names = cls._static_names | frozenset(static)
        if register:
            jax.tree_util.register_pytree_with_keys(
                cls, _flatten_with_keys, cls._unflatten, flatten_func=_flatten
            )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Here, not in __init__, which dataclasses and forgetful subclasses do not call. It is an
        # instance attribute like any other, so that copy and pickle carry it along.
        self = super().__new__(cls)
        object.__setattr__(self, "unique_id", next_node_id())
        return self

    def get_cur_state(self) -> StateT:
        """Return the state of this node in the current state dictionary.

        Raises:
            MissingStateError: the dictionary has no state for this node.
            ContextValueNotSetError: there is no state dictionary.
            BehindBoundaryError: it was set outside of a jit-like boundary.
        """
        states = _state_dict_var.get()
        if self.unique_id not in states:
            known = f"It has states for {len(states)} nodes:\n{first_few(map(repr, states))}"
            text = _NO_STATE.format(
                node=self._describe(), known=known if states else "It is empty."
            )
            raise MissingStateError(bounded(text))
        return states[self.unique_id]

    def update_state(self, new_state: StateT) -> None:
        """Replace the state of this node in the current state dictionary.

        Arguments:
            new_state: any pytree.

        Raises:
            TraceLevelError: the state depends on a vmap, grad or other transform inside which the
                dictionary does not live.
            ContextValueNotSetError: there is no state dictionary.
            BehindBoundaryError: it was set outside of a jit-like boundary.
        """
        states = _state_dict_var.get()
        entry = find_entry(_state_dict_var)
        assert entry is not None  # `get` found it, and it has no default
        home = [ref() for ref in entry.chain]
        for leaf in jax.tree.leaves(new_state):
            if _jax.is_tracer(leaf):
                trace = _jax.tracer_trace(leaf)
                if trace is not None and all(trace is not level for level in home):
                    what = _jax.describe_boundary(trace)
                    raise TraceLevelError(_ESCAPE.format(node=self._describe(), trace=what))
        states[self.unique_id] = new_state

    def _describe(self) -> str:
        return f"a {type(self).__qualname__} ({self.unique_id!r})"

    @classmethod
    def _unflatten(cls, aux: Hashable, children: Iterable[Any]) -> Self:
        names, static = cast("tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]", aux)
        self = object.__new__(cls)
        # Past the __setattr__ of the class, which in a frozen dataclass raises.
        vars(self).update(zip(names, children, strict=True))
        vars(self).update(static)
        return self


def _split_attributes(
    node: StatefulNode[Any],
) -> tuple[dict[str, Any], tuple[tuple[str, Hashable], ...]]:
    dynamic: dict[str, Any] = {}
    static: list[tuple[str, Hashable]] = []
    attributes = vars(node)
    static_names = type(node)._static_names
    # By name: the order in which attributes were set must not matter to jit.
    for name in sorted(attributes):
        if name == "unique_id" or name in static_names:
            static.append((name, attributes[name]))
        else:
            dynamic[name] = attributes[name]
    return dynamic, tuple(static)


def _flatten(node: StatefulNode[Any]) -> tuple[tuple[Any, ...], Hashable]:
    dynamic, static = _split_attributes(node)
    return tuple(dynamic.values()), (tuple(dynamic), static)


def _flatten_with_keys(node: StatefulNode[Any]) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
    dynamic, static = _split_attributes(node)
    keyed = tuple((jax.tree_util.GetAttrKey(name), value) for name, value in dynamic.items())
    return keyed, (tuple(dynamic), static)
