"""What can be differentiated, or mapped linearly: arrays in plain containers, no objects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from anabranch.errors import StructureError, bounded
from anabranch.graph import _classify
from anabranch.graph._classify import LEAF, NUMBER
from anabranch.graph._kinds import Kind


def without_aux(result: Any, *, has_aux: bool) -> Any:
    """Return the output proper of what a function returned.

    Raises:
        StructureError: it is no pair, though `has_aux` says so.
    """
    if not has_aux:
        return result
    if not (isinstance(result, tuple) and len(result) == 2):
        raise StructureError(
            "with has_aux=True the function returns a pair (output, aux), but it returned a "
            f"{type(result).__name__}"
        )
    return result[0]


def output_arrays(result: Any, *, has_aux: bool) -> Any:
    """Return the output proper as a pytree of arrays.

    Raises:
        StructureError: the output holds an object, or something that is no array.
    """
    output = without_aux(result, has_aux=has_aux)
    _check(output, "the return value", ())
    return jax.tree.map(jnp.asarray, output)


def _check(x: Any, where: str, above: tuple[int, ...]) -> None:
    rule = _classify.rule_of(x)
    if rule is LEAF or rule is NUMBER or x is None:
        return
    if not isinstance(rule, Kind) or rule.is_object:
        raise StructureError(
            bounded(
                f"{where}: this is a {type(x).__name__}, but what is differentiated is made of "
                "arrays in plain containers; return the value of a Variable, or return "
                "(output, aux) with has_aux=True: aux can hold anything"
            )
        )
    if id(x) in above:
        raise StructureError(bounded(f"{where}: this {type(x).__name__} contains itself"))
    _, keys, values = rule.open(x)
    for key, value in zip(keys, values, strict=True):
        _check(value, f"{where}{rule.show_key(key)}", (*above, id(x)))
