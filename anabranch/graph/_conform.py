"""Fit what is written into a Variable by index to the value that is there.

Only `variable.value = x` may change dtype and shape.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import IndexWriteError


def cast_to_dtype(kind: type, dtype: Any, new: Any) -> Any:
    """Cast to the dtype of the value if JAX's promotion allows it without loss of kind."""
    # Python numbers are weak: 1.5 fits any float dtype, but no integer one
    if jnp.promote_types(dtype, jnp.result_type(dtype, new)) != dtype:
        found = getattr(new, "dtype", type(new).__name__)
        raise IndexWriteError(
            f"Cannot write {found} into a {kind.__name__} of dtype {dtype} by index: "
            f"the write would be rounded. Cast it (`x.astype({dtype})`), or replace the whole "
            "value with `variable.value = x`"
        )
    return jnp.asarray(new, dtype=dtype)


def write_at(kind: type, old: Any, index: Any, new: Any) -> Any:
    """Return an array with something else at an index."""
    new = cast_to_dtype(kind, old.dtype, new)
    _check_in_range(kind, old.shape, index)
    return old.at[index].set(new)


def _check_in_range(kind: type, shape: tuple[int, ...], index: Any) -> None:
    """Raise if an integer of an index is out of range: JAX would write nothing."""
    parts: tuple[Any, ...] = index if type(index) is tuple else (index,)
    for axis, (part, size) in enumerate(zip(parts, shape, strict=False)):
        if isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            if not -size <= part < size:
                raise IndexWriteError(
                    f"Cannot write at index {part} of axis {axis} of a {kind.__name__} of shape "
                    f"{shape}: it is out of range, and nothing would be written"
                )
        elif not isinstance(part, slice):
            break  # what follows may be about any axis


def conform(kind: type, old: Any, new: Any) -> Any:
    """Give a new whole value the dtype and the shape of the old one."""
    if not isinstance(old, (jax.Array, np.ndarray)):
        if isinstance(old, (bool, int, float, complex)):
            cast_to_dtype(kind, jnp.result_type(old), new)
        return new
    array = isinstance(new, (jax.Array, np.ndarray))  # a trace cannot tell one from the other
    if array and new.dtype == old.dtype and new.shape == old.shape:
        return new
    number = isinstance(new, (bool, int, float, complex))
    new = cast_to_dtype(kind, old.dtype, new)
    if number and getattr(old, "weak_type", False):  # stays weak, as with `.at[...].set`
        return jax.lax.full_like(old, new)
    try:
        return jnp.broadcast_to(new, old.shape)
    except ValueError:
        raise IndexWriteError(
            f"Cannot write shape {new.shape} into a {kind.__name__} of shape "
            f"{old.shape}; to change the shape write `variable.value = x`"
        ) from None
