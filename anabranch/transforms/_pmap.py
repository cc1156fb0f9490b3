"""`pmap`: every device runs on its own copy of the world.

JAX takes what one device says for outputs without an axis, silently. So here such outputs come back
from every device, and are compared before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from anabranch import _jax
from anabranch.errors import BroadcastWriteError, bounded, first_few
from anabranch.graph._flatten import Flat
from anabranch.transforms._box import Report, finish, run_inside
from anabranch.transforms._call import Selection, flatten_call, with_static
from anabranch.transforms._lanes import LaneGroups, lane_axes
from anabranch.transforms._options import PmapOptions
from anabranch.transforms._specs import ABSENT, Found, show
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


class _Names:
    """What outputs without an axis are called; static data on the way out, like the report."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Names) and other.names == self.names


jax.tree_util.register_static(_Names)


@overload
def pmap(function: Callable[P, R], /, **options: Unpack[PmapOptions]) -> Callable[P, R]: ...
@overload
def pmap(**options: Unpack[PmapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def pmap(
    function: Any = None,
    /,
    *,
    axis_name: Hashable = None,
    in_axes: Any = 0,
    out_axes: Any = ABSENT,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
) -> Any:
    """Map a function that may read and write objects over devices, as `jax.pmap` does.

    Equal to running each lane on its own copy of the objects. An object comes back along the axes
    that it was given; what is broadcast must be left equal on all devices, bit for bit. To check
    that, calls that write broadcast arrays wait for their result.

    Arguments:
        function: a function, method or callable object; without it, `pmap` is a decorator. What
            it holds itself (a bound `self`) is broadcast.
        axis_name: a name for collectives.
        in_axes: an axis (int) or None (broadcast) for all positional arguments, or one for each;
            containers of axes for containers, `StateAxes` for objects. Keyword arguments are
            mapped along axis 0.
        out_axes: the same for what is returned, 0 if not given. A returned argument needs none.
        static_broadcasted_argnums: positions of arguments that are static.
        devices: the devices to use.
        backend: the backend to use.
        axis_size: the number of lanes; needed only if nothing is mapped.

    Raises:
        AliasError: one object is given two axes; both paths are named.
        BroadcastWriteError: a broadcast Variable was left different on different devices.
        SharedStreamError: a key was drawn from a random stream that is broadcast.
        StructureError: an axis does not exist, sizes differ, or nothing is mapped.

    >>> import anabranch as ab, jax, jax.numpy as jnp
    >>> n = jax.device_count()
    >>> v = ab.Param(jnp.arange(float(n)))
    >>> def double(v):
    ...     v.value = v * 2
    >>> ab.pmap(double)(v)
    >>> v.value.tolist() == [2.0 * i for i in range(n)]
    True
    """
    if function is None:
        return lambda f: pmap(
            f,
            axis_name=axis_name,
            in_axes=in_axes,
            out_axes=out_axes,
            static_broadcasted_argnums=static_broadcasted_argnums,
            devices=devices,
            backend=backend,
            axis_size=axis_size,
        )
    nums = static_broadcasted_argnums
    static = Selection(function, nums if isinstance(nums, int) else tuple(nums), None)
    options: dict[str, Any] = {"axis_name": axis_name, "devices": devices, "backend": backend}
    compiled: dict[Any, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, *with_static(static, args, kwargs))
        inputs, axes, size = lane_axes(flat, in_axes, axis_size)
        # the groups of what comes out depend on ranks, which are no part of the graphdef
        key = (flat.graphdef, tuple(axes), size, tuple([jnp.ndim(x) for x in flat.leaves]))
        run = compiled.get(key)
        if run is None:
            specs = (in_axes, out_axes)
            run = _compile(flat, inputs, axes, specs, {**options, "axis_size": size})
            run = compiled.setdefault(key, run)
        lane = jnp.arange(size) if all(axis is None for axis in axes) else None
        report, names, groups = run(list(flat.leaves), lane)
        groups = [_equal_lanes(groups[0], names.names), *groups[1:]]
        return finish(flat, report, groups)

    return wrap(call, function)


def _compile(
    flat: Flat, inputs: Any, axes: list[int | None], specs: tuple[Any, Any], options: dict[str, Any]
) -> Any:
    graphdef = flat.graphdef  # and no more of the call: the compiled function outlives it

    def run(leaves: list[Any], lane: Any) -> tuple[Report, _Names, tuple[list[Any], ...]]:
        names = _Names()

        def remember(values: list[Any], specs: list[Found]) -> list[Any]:
            unmapped = [spec for spec in specs if spec.value is None]
            names.names = tuple([f"{spec.name}{show(spec.step)}" for spec in unmapped])
            return values

        groups = LaneGroups(inputs, axes, *specs, remember)
        inside = run_inside(graphdef, leaves, groups)
        return inside.report, names, inside.groups

    axes_out = LaneGroups(inputs, axes, *specs, None).axes
    stacked = (0, *axes_out[1:])  # the first group has no axis: every device reports its value
    # JAX wants something mapped: the lane, if the arguments are not
    return jax.pmap(run, in_axes=(axes, 0), out_axes=(None, None, stacked), **options)


def _equal_lanes(stacked: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return what the lanes agree on; raise if they do not."""
    if stacked and _jax.is_tracer(stacked[0]):
        raise BroadcastWriteError(
            bounded(
                f"these are broadcast to the devices of a pmap:\n{first_few(names)}\n"
                "Whether all devices leave the same value there cannot be checked inside another "
                "transform: give them an axis, or call the pmap outside"
            )
        )
    bad = [n for n, x in zip(names, stacked, strict=True) if not _all_equal(x)]
    if bad:
        raise BroadcastWriteError(
            bounded(
                "these are broadcast, but the devices leave different values there:\n"
                f"{first_few(bad)}\n"
                "give them an axis (`StateAxes` chooses by kind), or reduce over the devices "
                "(`jax.lax.pmean`) before writing"
            )
        )
    return [x[0] for x in stacked]


def _all_equal(x: Any) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _all_equal(x.real) and _all_equal(x.imag)
    if jnp.issubdtype(x.dtype, jnp.floating):  # by bits: 0.0 and -0.0 differ, NaN equals itself
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return bool((x == x[:1]).all())
