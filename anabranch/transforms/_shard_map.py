"""`shard_map`: every device runs on its own copy of the world, and sees its shard of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Set
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from anabranch._boundary import boundary
from anabranch.errors import StructureError
from anabranch.transforms._arguments import REQUIRED, ArgumentSpecs
from anabranch.transforms._box import Report, finish, run_inside
from anabranch.transforms._call import flatten_call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._equal_lanes import OutputNames, equal_lanes
from anabranch.transforms._names import number_leaves
from anabranch.transforms._options import ShardMapOptions
from anabranch.transforms._runners import Owned
from anabranch.transforms._shards import ShardGroups, Shards
from anabranch.transforms._specs import ABSENT
from anabranch.transforms._streams import Policy, check_policy
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def shard_map(f: Callable[P, R], /, **options: Unpack[ShardMapOptions]) -> Callable[P, R]: ...
@overload
def shard_map(
    f: None = None, /, **options: Unpack[ShardMapOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("shard_map")
@checks_options("shard_map")
def shard_map(
    f: Any = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = ABSENT,
    mesh: Any = None,
    axis_names: Set[Hashable] = frozenset(),
    check_vma: bool = True,
    rngs: Policy = None,
) -> Any:
    """Map a function that may read and write objects over shards, as `jax.shard_map` does.

    Equal to running each device on its own copy of the objects, in which arrays are the local
    shards. What came in with a spec goes out with it. What is the same on several devices must be
    left equal there. The function is compiled, and traced once for each structure.

    Arguments:
        f: a function, method or callable object; without it, `shard_map` is a decorator. What it
            holds itself (a bound `self`) is broadcast.
        out_specs: a `PartitionSpec` for what is returned, or containers of them. None is
            `PartitionSpec()`. What is new on an argument has the spec of the argument.
        in_specs: one for all arguments, or one for each, by position or in a dict by name;
            containers of specs for containers, `StateSharding` for objects. Without it, specs
            are those of the arrays (on a mesh with explicit axes).
        mesh: the mesh; that of the context if it is None.
        axis_names: the axes of the mesh that the function maps over; all if it is empty.
        check_vma: whether JAX finds out from types what is equal on all devices. Otherwise
            broadcast outputs are compared, for which a call waits; inside another transform that
            is refused.
        rngs: what it means to draw from a random stream that is broadcast: "split" (each device
            draws numbers of its own; the stream advances by one), "share" (all devices draw the
            same), or None (it raises).

    Raises:
        AliasError: one object is given two specs; both paths are named.
        BroadcastWriteError: devices leave something different that is the same for them.
        SharedStreamError: a key was drawn from a random stream that is broadcast, without `rngs`.
        StructureError: a spec does not fit its array, or there is no mesh.

    >>> import anabranch as ab, jax, jax.numpy as jnp, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()), ("x",))
    >>> total = ab.Variable(jnp.zeros(()))
    >>> @ab.shard_map(mesh=mesh, in_specs=(P(), P("x")), out_specs=None)
    ... def add(total, x):
    ...     total.value = total + jax.lax.psum(x.sum(), "x")
    >>> add(total, jnp.ones(jax.device_count()))
    >>> int(total) == jax.device_count()
    True
    """
    options: Any = {"mesh": mesh, "axis_names": axis_names, "check_vma": check_vma}
    remake = functools.partial(
        shard_map, out_specs=out_specs, in_specs=in_specs, rngs=rngs, **options
    )
    if f is None:
        return remake
    check_policy(rngs)
    specs = ArgumentSpecs(f, in_specs, "in_specs", REQUIRED)
    owned = Owned(f)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(f, args, kwargs)
        sizes = _axis_sizes(mesh, axis_names)
        shards = Shards(flat, *specs.match(args, kwargs), sizes, rngs)
        fed = shards.feed(flat)
        # the groups of what comes out depend on ranks, which are no part of the graphdef
        ranks = tuple([jnp.ndim(x) for x in fed])
        key = (flat.graphdef, tuple(shards.specs), ranks, tuple(sizes.items()))

        def make() -> Any:
            return _compile(shards, out_specs, options)

        report, names, groups = owned.call(key, make, fed)
        if not check_vma:
            groups = _compared(shards, out_specs, names, groups)
        return finish(flat, report, groups, shards.forwarded(flat, fed))

    return wrap(call, f, remake, name="shard_map")


def _axis_sizes(mesh: Any, axis_names: Set[Hashable]) -> dict[Any, int]:
    """Return the sizes of the axes that are mapped over."""
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    if not sizes:
        raise StructureError(
            "shard_map needs a mesh: give `mesh=`, or call it inside `with jax.set_mesh(mesh)`"
        )
    unknown = [name for name in axis_names if name not in sizes]
    if unknown:
        raise StructureError(f"axis_names has {unknown[0]!r}; the mesh has {list(sizes)}")
    return {name: size for name, size in sizes.items() if not axis_names or name in axis_names}


def _compile(shards: Shards, out_specs: Any, options: dict[str, Any]) -> Any:
    checked = options["check_vma"]

    def run(leaves: list[Any]) -> tuple[Report, OutputNames, tuple[list[Any], ...]]:
        names = OutputNames()
        groups = ShardGroups(shards, out_specs, None if checked else names)
        inside = run_inside(shards.graphdef, shards.local(leaves), groups)
        return inside.report, names, inside.groups

    none = PartitionSpec()
    outside = ShardGroups(shards, out_specs, None if checked else OutputNames()).outside()
    return jax.jit(
        jax.shard_map(
            number_leaves(run, shards.graphdef),
            in_specs=(shards.specs,),
            out_specs=(none, none, outside),
            **options,
        )
    )


def _compared(shards: Shards, out_specs: Any, names: OutputNames, groups: Any) -> list[list[Any]]:
    """Return the groups, those that came from every device with what the devices agree on."""
    grouping = ShardGroups(shards, out_specs, names)
    given = iter(names.names)
    agreed: list[list[Any]] = []
    for spec, group in zip(grouping.specs, groups, strict=True):
        if grouping.compared(spec):
            group = equal_lanes(group, [next(given) for _ in group], _REMEDY)
        agreed.append(group)
    return agreed


_REMEDY = "leave `check_vma` on, so that types tell, or give them an axis"
