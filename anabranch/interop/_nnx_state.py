"""Between `State` and `nnx.State`: the same leaves, by the same paths."""

from __future__ import annotations

from typing import Any

import jax

from anabranch.graph._flatten import flatten
from anabranch.graph._leaf_info import LeafInfos
from anabranch.graph._state import State


def to_nnx_state(state: State) -> Any:
    """Return the `nnx.State` with the leaves of a State.

    Arguments:
        state: a State, of objects of flax, of anabranch, or of both. What is a Variable of
            anabranch there becomes the Variable of flax that it counts as.

    Returns:
        An `nnx.State`: nested by the keys of the paths, with a Variable for each leaf, or an array
        where the object has a plain array. It shares the arrays. The State of a Variable becomes
        a Variable, as flax has it. Of a Variable that holds a pytree, each leaf is a Variable.

    >>> import anabranch as ab
    >>> from flax import nnx
    >>> graphdef, state = ab.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx_state = ab.interop.to_nnx_state(state)
    >>> type(nnx_state["kernel"]) is nnx.Param
    True
    >>> ab.interop.from_nnx_state(nnx_state) == state
    True
    """
    from flax import nnx

    from anabranch.interop import _nnx

    nested: dict[Any, Any] = {}
    for info, leaf in zip(state.infos, state.leaves, strict=True):
        variable = leaf if info.kind is jax.Array else _nnx.as_variable(info, leaf)
        if not info.path:
            return variable
        level = nested
        for key in info.path[:-1]:
            level = level.setdefault(key, {})
        level[info.path[-1]] = variable
    return nnx.State(nested)


def from_nnx_state(nnx_state: Any) -> State:
    """Return the State with the leaves of an `nnx.State`.

    Arguments:
        nnx_state: what `nnx.state` or `nnx.split` returned, or gradients of `nnx.grad`.

    Returns:
        A State: the kinds are the classes of the Variables, `jax.Array` for plain arrays.

    >>> import anabranch as ab
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> ab.interop.from_nnx_state(nnx.state(model, nnx.Param)).paths
    (('bias',), ('kernel',))
    """
    flat = flatten(nnx_state, numbers=True)
    return State(LeafInfos(flat.graphdef.infos), tuple(flat.leaves))
