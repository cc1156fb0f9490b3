"""`pmap`: every device runs on its own copy of the world.

What is broadcast must be left equal on all of them; see `_equal_lanes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from anabranch import _jax
from anabranch._boundary import boundary
from anabranch.errors import StructureError, first_few
from anabranch.transforms._arguments import ArgumentSpecs
from anabranch.transforms._box import Report, finish, run_inside
from anabranch.transforms._call import Selection, flatten_call, with_static
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._equal_lanes import OutputNames, equal_lanes
from anabranch.transforms._lanes import Lanes
from anabranch.transforms._names import leaf_name, number_leaves
from anabranch.transforms._options import PmapOptions
from anabranch.transforms._runners import Owned
from anabranch.transforms._specs import ABSENT
from anabranch.transforms._streams import Policy, check_policy
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def pmap(function: Callable[P, R], /, **options: Unpack[PmapOptions]) -> Callable[P, R]: ...
@overload
def pmap(**options: Unpack[PmapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("pmap")
@checks_options("pmap")
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
    rngs: Policy = None,
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
            containers of axes for containers, `StateAxes` for objects. A dict gives them by
            argument name; an argument that it leaves out, and a keyword argument that nothing
            is said about, is mapped along axis 0.
        out_axes: the same for what is returned, 0 if not given. A returned argument needs none.
        static_broadcasted_argnums: positions of arguments that are static.
        devices: the devices to use.
        backend: the backend to use.
        axis_size: the number of lanes; needed only if nothing is mapped.
        rngs: what it means to draw from a random stream that is broadcast: "split" (each device
            draws numbers of its own; the stream advances by one), "share" (all devices draw the
            same), or None (it raises).

    Raises:
        AliasError: one object is given two axes; both paths are named.
        BroadcastWriteError: a broadcast Variable was left different on different devices.
        SharedStreamError: a key was drawn from a random stream that is broadcast, without `rngs`.
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
    remake = functools.partial(
        pmap,
        axis_name=axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static_broadcasted_argnums=static_broadcasted_argnums,
        devices=devices,
        backend=backend,
        axis_size=axis_size,
        rngs=rngs,
    )
    if function is None:
        return remake
    check_policy(rngs)
    nums = static_broadcasted_argnums
    static = Selection(function, nums if isinstance(nums, int) else tuple(nums), None)
    options: dict[str, Any] = {"axis_name": axis_name, "devices": devices, "backend": backend}
    axes = ArgumentSpecs(function, in_axes, "in_axes", 0)
    owned = Owned(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        specs = axes.match(args, kwargs)
        flat = flatten_call(function, *with_static(static, args, kwargs))
        lanes = Lanes(flat, *specs, axis_size, rngs)
        fed = lanes.feed(flat)
        # the groups of what comes out depend on ranks, which are no part of the graphdef
        key = (flat.graphdef, tuple(lanes.axes), lanes.size, tuple([jnp.ndim(x) for x in fed]))

        def make() -> Any:
            return _compile(lanes, out_axes, {**options, "axis_size": lanes.size})

        lane = jnp.arange(lanes.size) if all(axis is None for axis in lanes.axes) else None
        _check_devices(lanes.size, devices, backend)
        try:
            report, names, groups = owned.call(key, make, fed, lane)
        except ValueError as error:
            if str(error).startswith("Sharding passed to jit does not match"):
                raise StructureError(_placed_elsewhere(lanes, fed)) from error
            raise
        groups = [equal_lanes(groups[0], names.names, _REMEDY), *groups[1:]]
        return finish(flat, report, groups, lanes.forwarded(flat, fed))

    return wrap(call, function, remake, name="pmap")


def _check_devices(lanes: int, devices: Sequence[Any] | None, backend: str | None) -> None:
    """Raise if there are more lanes than devices; in a trace, JAX may make something of them."""
    count = jax.device_count(backend) if devices is None else len(devices)
    if lanes > count and _jax.is_root(_jax.current_trace()):
        raise StructureError(
            f"pmap: there are {lanes} lanes, but {count} devices: use `vmap`, or `vmap` inside of "
            "`pmap` with the lanes divided"
        )


def _placed_elsewhere(lanes: Lanes, fed: Sequence[Any]) -> str:
    """Say which of the mapped arrays are laid out over several devices."""
    rows = [
        f"{leaf_name(info)}: {leaf.sharding}"
        for info, axis, leaf in zip(lanes.graphdef.infos, lanes.axes, fed, strict=False)
        if axis is not None and len(leaf.sharding.device_set) > 1
    ]
    return (
        "pmap: these are laid out over devices in another way than pmap maps them:\n"
        f"{first_few(rows)}\n"
        'bring them to one device (`jax.device_put(x, jax.devices()[0])`; for `rngs="split"` it '
        "is the key of the stream), or use `shard_map`"
    )


def _compile(lanes: Lanes, out_axes: Any, options: dict[str, Any]) -> Any:
    def run(leaves: list[Any], lane: Any) -> tuple[Report, OutputNames, tuple[list[Any], ...]]:
        names = OutputNames()
        groups = lanes.groups(out_axes, names.remember)
        inside = run_inside(lanes.graphdef, leaves, groups)
        return inside.report, names, inside.groups

    axes_out = lanes.groups(out_axes, None).axes
    stacked = (0, *axes_out[1:])  # the first group has no axis: every device reports its value
    # JAX wants something mapped: the lane, if the arguments are not
    run = number_leaves(run, lanes.graphdef)
    return jax.pmap(run, in_axes=(lanes.axes, 0), out_axes=(None, None, stacked), **options)


_REMEDY = "give them an axis, or call the pmap outside"
