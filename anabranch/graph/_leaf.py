"""What a State asks of one leaf: is it an array, does it equal another, how is it shown."""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import ArgumentError
from anabranch.graph._filters import Path
from anabranch.graph._leaf_info import path_text

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def check_is_array(path: Path, leaf: typing.Any) -> None:
    """Raise `TypeError` unless the leaf is an array or a Python number."""
    if hasattr(leaf, "get_metadata"):
        wrong = "a Variable: give its value, and its class as the kind"
    elif isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype"):
        return
    else:
        wrong = f"a {type(leaf).__name__}"
    raise ArgumentError(f"{path_text(path)}: expected an array or a number, found {wrong}")


def leaf_text(leaf: typing.Any) -> str:
    """Show dtype and shape, never values: a leaf may be a tracer, or huge."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def are_same(a: typing.Any, b: typing.Any) -> bool:
    """Compare two leaves: arrays by dtype, shape and bits, so that NaN equals itself."""
    if a is b:
        return True
    if not isinstance(a, _ARRAYS) or not isinstance(b, _ARRAYS):
        return type(a) is type(b) and bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return _bits(a) == _bits(b)


def _bits(array: typing.Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
