"""Between a State and arrays by name, which is what files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph._leaf_info import path_name
from anabranch.graph._state import State


def to_named_arrays(state: State) -> dict[str, Any]:
    """Return the leaves of a State by names such as `layers/0/w`, to be saved.

    Arguments:
        state: a State. Random keys become their bits, as no file knows them.

    Returns:
        A dict in the order of the State: for `np.savez` or safetensors. Orbax saves a State as it
        is, by the same names.

    Raises:
        StructureError: two keys that are neither strings nor integers have one `repr`.

    >>> import anabranch as ab
    >>> list(ab.interop.to_named_arrays(ab.state({"layers": [ab.Param(1.0), ab.Param(2.0)]})))
    ['layers/0', 'layers/1']
    """
    named: dict[str, Any] = {}
    for path, leaf in state.flat().items():
        name = path_name(path)
        if name in named:
            raise StructureError(
                f"two leaves are called {name!r}: keys that have one `repr` cannot be told apart "
                "in a file"
            )
        named[name] = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return named


def from_named_arrays(named: Mapping[str, Any], like: State) -> State:
    """Return the State whose leaves are found by name.

    To restore a part, filter the result: `ab.update(model, state.filter(ab.Param))`.

    Arguments:
        named: what `to_named_arrays` gave, as a file brings it back.
        like: the State of the object that is restored: it has the paths, kinds and dtypes. Its
            leaves may be `jax.ShapeDtypeStruct`.

    Raises:
        StructureError: a name is missing, or there is one that `like` does not have.

    >>> import anabranch as ab
    >>> model = {"layers": [ab.Param(1.0), ab.Param(2.0)]}
    >>> named = {"layers/0": np.ones(()), "layers/1": np.zeros(())}
    >>> ab.update(model, ab.interop.from_named_arrays(named, like=ab.state(model)))
    >>> model["layers"][1]
    Param(array(0.))
    """
    names = to_named_arrays(like.map(lambda path, leaf: None))
    missing = [f"{name} is missing" for name in names if name not in named]
    unknown = [f"{name} belongs to no leaf" for name in named if name not in names]
    if missing or unknown:
        raise StructureError(
            bounded(
                "the named arrays do not fit the State:\n"
                f"{first_few([*missing, *unknown])}\nto restore a part, filter the arrays"
            )
        )
    return like.map(lambda path, leaf: _as(leaf, named[path_name(path)]))


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _as(like: Any, found: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(like))
    if getattr(found, "dtype", like) is not like and found.dtype.kind == "V":
        return np.asarray(found).view(like.dtype)  # numpy writes bfloat16 as bytes
    return found
