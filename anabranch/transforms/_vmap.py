"""`vmap`: every lane runs on its own copy of the world.

What is mapped comes back along the axis that it came in along; what is broadcast must end up equal
in all lanes, which is checked before JAX would complain in its own words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from anabranch._boundary import boundary
from anabranch.errors import BroadcastWriteError, bounded, first_few
from anabranch.transforms._arguments import ArgumentSpecs
from anabranch.transforms._box import array_outputs, as_array, finish, run_inside
from anabranch.transforms._call import flatten_call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._lanes import Lanes
from anabranch.transforms._options import VmapOptions
from anabranch.transforms._specs import ABSENT, Found, show
from anabranch.transforms._streams import Policy, check_policy
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def vmap(function: Callable[P, R], /, **options: Unpack[VmapOptions]) -> Callable[P, R]: ...
@overload
def vmap(**options: Unpack[VmapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("vmap")
@checks_options("vmap")
def vmap(
    function: Any = None,
    /,
    *,
    in_axes: Any = 0,
    out_axes: Any = ABSENT,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    rngs: Policy = None,
    sharding_name: str | None = None,
) -> Any:
    """Map a function that may read and write objects over lanes, as `jax.vmap` does.

    Equal to running each lane on its own copy of the objects. An object comes back along the axes
    that it was given; what is broadcast must be left equal in all lanes.

    Arguments:
        function: a function, method or callable object; without it, `vmap` is a decorator. What
            it holds itself (a bound `self`) is broadcast.
        in_axes: an axis (int) or None (broadcast) for all positional arguments, or one for each;
            containers of axes for containers, `StateAxes` for objects. A dict gives them by
            argument name; an argument that it leaves out, and a keyword argument that nothing
            is said about, is mapped along axis 0.
        out_axes: the same for what is returned, 0 if not given. A returned argument needs none.
        axis_name: a name for collectives.
        axis_size: the number of lanes; needed only if nothing is mapped.
        spmd_axis_name: see `jax.vmap`.
        rngs: what it means to draw from a random stream that is broadcast: "split" (each lane
            draws numbers of its own; the stream advances by one), "share" (all lanes draw the
            same), or None (it raises).
        sharding_name: what the new axis of new Variables is called in their metadata `sharding`.

    Raises:
        AliasError: one object is given two axes; both paths are named.
        BroadcastWriteError: a broadcast Variable was left different in different lanes.
        SharedStreamError: a key was drawn from a random stream that is broadcast, without `rngs`.
        StructureError: an axis does not exist, sizes differ, or nothing is mapped.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> v = ab.Param(jnp.arange(3.0))
    >>> def double(v):
    ...     v.value = v * 2
    >>> ab.vmap(double)(v)
    >>> v.value.tolist()
    [0.0, 2.0, 4.0]
    """
    options: Any = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
    remake = functools.partial(
        vmap,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_size=axis_size,
        rngs=rngs,
        sharding_name=sharding_name,
        **options,
    )
    if function is None:
        return remake
    check_policy(rngs)
    axes = ArgumentSpecs(function, in_axes, "in_axes", 0)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, args, kwargs)
        lanes = Lanes(flat, *axes.match(args, kwargs), axis_size, rngs)
        mapped = next((i for i, axis in enumerate(lanes.axes) if axis is not None), None)
        lane = jnp.arange(lanes.size) if mapped is None else None

        def run(leaves: list[Any], lane: Any) -> Any:
            sentinel = lane if mapped is None else leaves[mapped]
            groups = lanes.groups(out_axes, unbatched(sentinel), sharding_name)
            inside = run_inside(lanes.graphdef, leaves, groups)
            return inside.report, inside.groups

        fed = lanes.feed(flat)
        report, outputs = jax.vmap(
            run,
            in_axes=(lanes.axes, 0),
            out_axes=(None, tuple(lanes.groups(out_axes, None).axes)),
            axis_size=lanes.size,
            **options,
        )(fed, lane)
        return finish(flat, report, array_outputs(outputs), lanes.forwarded(flat, fed))

    return wrap(call, function, remake, name="vmap")


def unbatched(sentinel: Any) -> Callable[[list[Any], list[Found]], list[Any]]:
    """Return a check that raises if an output without axis differs from lane to lane.

    A `custom_vmap` identity is told which of its operands are batched. The sentinel, which is
    batched by this very vmap, tells its rule from that of an outer one. Results are dropped, so
    that no equation stays behind.
    """

    def check(values: list[Any], specs: list[Found]) -> list[Any]:
        chosen = [i for i, spec in enumerate(specs) if spec.value is None]
        if not chosen:
            return values
        names = [f"{show(specs[i].name, specs[i].step)}" for i in chosen]

        @jax.custom_batching.custom_vmap
        def identity(sentinel: Any, *operands: Any) -> Any:
            return (sentinel, *operands)

        @identity.def_vmap
        def _rule(axis_size: int, in_batched: list[bool], *operands: Any) -> Any:
            if in_batched[0]:
                _raise_if_any(in_batched[1:], names)
            return operands, tuple(in_batched)

        operands = [jax.lax.stop_gradient(as_array(values[i])) for i in chosen]
        identity(jax.lax.stop_gradient(sentinel), *operands)
        return values

    return check


def _raise_if_any(batched: Sequence[bool], names: Sequence[str]) -> None:
    bad = [name for flag, name in zip(batched, names, strict=True) if flag]
    if bad:
        raise BroadcastWriteError(
            bounded(
                "these are broadcast, but the lanes leave different values there:\n"
                f"{first_few(bad)}\n"
                "give them an axis (`StateAxes` chooses by kind), or reduce over the lanes "
                "before writing"
            )
        )
