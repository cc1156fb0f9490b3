"""Compare what devices say about outputs that have to be the same on all of them.

JAX takes what one device says, silently. So such outputs come back from every device, stacked, and
are compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch import _jax
from anabranch.errors import BroadcastWriteError, bounded, first_few
from anabranch.transforms._specs import Found, show


class OutputNames:
    """What outputs that have to be equal are called: static data on the way out, like a report."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    def remember(self, values: list[Any], specs: list[Found]) -> list[Any]:
        """Remember the outputs that have no axis; a check of `LaneGroups`."""
        unmapped = [spec for spec in specs if spec.value is None]
        self.names = tuple([name_of(spec) for spec in unmapped])
        return values

    def __hash__(self) -> int:
        return hash(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputNames) and other.names == self.names


jax.tree_util.register_static(OutputNames)


def name_of(spec: Found) -> str:
    """Return how an output is called."""
    return f"{show(spec.name, spec.step)}"


def equal_lanes(stacked: Sequence[Any], names: Sequence[str], remedy: str) -> list[Any]:
    """Return what the devices agree on; raise if they do not.

    Arguments:
        stacked: outputs, with what each device says along axis 0.
        names: how they are called.
        remedy: what to do inside another transform, where values cannot be compared.
    """
    if any(map(_jax.is_tracer, stacked)):
        raise BroadcastWriteError(
            bounded(
                f"these are broadcast to the devices:\n{first_few(names)}\n"
                "Whether all devices leave the same value there cannot be checked inside another "
                f"transform: {remedy}"
            )
        )
    bad = [n for n, x in zip(names, stacked, strict=True) if not _all_equal(x)]
    if bad:
        raise BroadcastWriteError(different_lanes(bad))
    return [x[0] for x in stacked]


def different_lanes(names: Sequence[str]) -> str:
    """Return what is said about outputs that are different on different devices."""
    return bounded(
        "these are broadcast, but the devices leave different values there:\n"
        f"{first_few(names)}\n"
        "give them an axis (`StateAxes` or `StateSharding` chooses by kind), or reduce over the "
        "devices (`jax.lax.pmean`) before writing"
    )


def _all_equal(x: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _all_equal(x.real) and _all_equal(x.imag)
    if jnp.issubdtype(x.dtype, jnp.floating):  # by bits: 0.0 and -0.0 differ, NaN equals itself
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return bool((x == x[:1]).all())
