"""How a call runs on the shards of a mesh: specs, random streams, groups of what comes out.

What comes in with a spec goes out with it. An output that does not name an axis of the mesh must be
the same along it: JAX knows that from types (`check_vma=True`); without, each device reports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from anabranch import _jax
from anabranch.errors import BroadcastWriteError, StructureError
from anabranch.graph._build import Built
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import Entry, GraphDef
from anabranch.graph._recording import Records
from anabranch.transforms._box import Assignment, array_leaves
from anabranch.transforms._equal_lanes import OutputNames, different_lanes, name_of
from anabranch.transforms._lanes import given_perturbations
from anabranch.transforms._specs import ABSENT, Found, values_of
from anabranch.transforms._streams import Policy, SharedStreams
from anabranch.transforms._worlds import input_values, resolve_inputs, resolve_outputs

_NEVER = object()


class _Stacked:
    def __repr__(self) -> str:
        return "<one for each device>"


_STACKED = _Stacked()


def as_spec(value: Any) -> PartitionSpec:
    """Return a spec in the form in which specs are compared: no None at its end.

    Raises:
        StructureError: it is no spec.
    """
    if value is None:
        return PartitionSpec()
    if not isinstance(value, PartitionSpec):
        raise StructureError(
            f"a spec is a PartitionSpec or None, not {value!r}; in_specs and out_specs are one "
            "spec, containers of specs, or StateSharding"
        )
    parts = list(value)
    while parts and parts[-1] in (None, ()):
        parts.pop()
    return PartitionSpec(*parts)


def names_in(spec: PartitionSpec) -> set[Any]:
    """Return the mesh axes that a spec names."""
    names: set[Any] = set()
    for part in spec:
        names |= set(part) if isinstance(part, tuple) else {part}
    return names - {None}


class Shards:
    """How a call runs on shards; it keeps no array and no object of the caller.

    Arguments:
        flat: the call.
        args: the specs of the positional arguments.
        kwargs: the specs of the keyword arguments.
        sizes: the sizes of the manual axes of the mesh, by name.
        rngs: what a draw from a broadcast stream means.

    Attributes:
        graphdef: of the call.
        specs: of each leaf that goes in (see `feed`).

    Raises:
        StructureError: a spec does not fit its array, or names no axis of the mesh.
        AliasError: one object is given two specs.
    """

    def __init__(
        self, flat: Flat, args: Any, kwargs: Any, sizes: dict[Any, int], rngs: Policy
    ) -> None:
        self.graphdef = flat.graphdef
        self.sizes = sizes
        self.lanes = math.prod(sizes.values())
        self.all = PartitionSpec(tuple(sizes))
        inputs = resolve_inputs(flat, args, kwargs, PartitionSpec(), self._fit, _broadcast_records)
        self.inputs = inputs
        own = input_values(flat, inputs)
        self.streams = SharedStreams(
            flat.graphdef, flat.leaves, [not names_in(s) for s in own], rngs
        )
        self.specs = [*own, *[PartitionSpec()] * len(self.streams.split)]
        self._forward: list[Any] = list(self.specs)
        self._stacked = {stream.key_leaf for stream in self.streams.split}
        for leaf in given_perturbations(flat.graphdef):
            if np.shape(flat.leaves[leaf])[:1] == (self.lanes,):
                self._stacked.add(leaf)
        for leaf in (*self._stacked, *[stream.count_leaf for stream in self.streams.split]):
            self._forward[leaf] = _NEVER

    def _fit(self, value: Any, leaf: Any) -> PartitionSpec:
        """Return the spec of an argument, checked against its shape."""
        if value is ABSENT:  # what the array itself says
            value = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
            value = None if value is None else as_spec(value)
        spec, shape = self.check_axes(as_spec(value)), np.shape(leaf)
        if len(spec) > len(shape):
            raise StructureError(f"{spec} has more entries than an array of rank {len(shape)} axes")
        for axis, part in enumerate(spec):
            count = math.prod(self.sizes[name] for name in names_in(PartitionSpec(part)))
            if shape[axis] % count:
                raise StructureError(
                    f"axis {axis} has {shape[axis]} elements, which {count} devices along "
                    f"{part!r} cannot share evenly"
                )
        return spec

    def check_axes(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec; raise if it names something else than axes of the mesh."""
        unknown = names_in(spec) - set(self.sizes)
        if unknown:
            raise StructureError(
                f"{spec} names {sorted(map(str, unknown))}, but the axes of the mesh are "
                f"{list(self.sizes)}"
            )
        return spec

    def missing(self, spec: PartitionSpec) -> tuple[Any, ...]:
        """Return the axes along which an output with this spec has to be the same."""
        named = names_in(spec)
        return tuple([name for name in self.sizes if name not in named])

    def feed(self, flat: Flat) -> list[Any]:
        """Return the leaves that go in."""
        return self.streams.feed(array_leaves(flat.leaves), self.lanes)

    def local(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves as the function sees them, with its own of what is one for each.

        Those come in whole: where axes are explicit, JAX refuses to shard an array as it comes in.
        """
        if not self._stacked:
            return list(leaves)
        device = jax.lax.axis_index(tuple(self.sizes))
        return [x[device] if i in self._stacked else x for i, x in enumerate(leaves)]

    def forwarded(self, flat: Flat, fed: Sequence[Any]) -> list[Any]:
        """Return what leaves stand for that come out as they went in."""
        return [*flat.leaves, *fed[len(flat.leaves) :]]

    def may_forward(self, leaf: int, spec: Any) -> bool:
        """A leaf can stand for an output of its own spec."""
        return self._forward[leaf] == spec


class ShardGroups:
    """Group what comes out by spec.

    Arguments:
        shards: the call.
        result: the specs of the result.
        names: where outputs are named that have to be compared, or None if types are checked.
    """

    lanes = True

    def __init__(self, shards: Shards, result: Any, names: OutputNames | None) -> None:
        self._call, self._result, self._names = shards, result, names
        self.specs: list[Any] = [PartitionSpec()]
        given = [shards.check_axes(as_spec(spec)) for spec in values_of(result)]
        for spec in (*shards.specs, *given):
            if spec not in self.specs:
                self.specs.append(spec)
        self.specs.append(_STACKED)
        self.count = len(self.specs)

    def outside(self) -> tuple[PartitionSpec, ...]:
        """Return the spec of each group for JAX."""
        return tuple([self._outside(spec) for spec in self.specs])

    def _outside(self, spec: Any) -> PartitionSpec:
        if spec is _STACKED:
            return self._call.all
        return PartitionSpec(self._call.missing(spec), *spec) if self.compared(spec) else spec

    def compared(self, spec: Any) -> bool:
        """Tell whether outputs of a group come from every device, to be compared."""
        return self._names is not None and spec is not _STACKED and bool(self._call.missing(spec))

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of the spec of each slot."""
        self._call.streams.settle(graphdef, found, leaves)
        specs = resolve_outputs(
            graphdef,
            twins,
            found,
            self._call.inputs,
            self._result,
            PartitionSpec(),
            self._fit,
            _stack_records,
        )
        specs = self._inferred(graphdef, found, specs)
        # a number that is not stacked is itself
        single = {i for i in found.numbers if specs[i].value == PartitionSpec()}
        specs = [spec for i, spec in enumerate(specs) if i not in single]
        found = found.without(single)
        groups = [self.specs.index(spec.value) for spec in specs]

        def check(values: list[Any], slots: list[int]) -> list[Any]:
            return self._check(values, slots, specs)

        return Assignment(groups, check, found.delta, found.slots)

    def _inferred(self, graphdef: GraphDef, found: Diff, specs: list[Found]) -> list[Found]:
        """Return specs, those that were not given being those of the arrays that came in."""
        before: dict[int, Any] = {}
        for index, entry in found.delta.changed:
            old = dict(
                zip(graphdef.entries[index].keys, graphdef.entries[index].edges, strict=True)
            )
            for key, edge in zip(entry.keys, entry.edges, strict=True):
                leaf = old.get(key)
                if isinstance(edge, int) and isinstance(leaf, int) and edge < 0 and leaf < 0:
                    before[~edge] = self._call.specs[~leaf]
        given: list[Found] = []
        for slot, spec in enumerate(specs):
            if spec.value is ABSENT:
                if slot not in before:
                    raise StructureError(
                        f"{name_of(spec)}: this is new, and in_specs do not say how it is sharded"
                    )
                spec = spec._replace(value=before[slot])
            given.append(spec)
        return given

    def _fit(self, value: Any, leaf: Any) -> Any:
        if value is _STACKED or value is ABSENT:
            return value
        spec, rank = self._call.check_axes(as_spec(value)), np.ndim(leaf)
        if len(spec) > rank:
            raise StructureError(f"{spec} has more entries than an output of rank {rank} axes")
        return spec

    def _check(self, values: list[Any], slots: list[int], specs: list[Found]) -> list[Any]:
        """Return the outputs as they leave a device; raise if types say that devices differ."""
        different: list[str] = []
        names: list[tuple[int, str]] = []
        out: list[Any] = []
        for value, slot in zip(values, slots, strict=True):
            spec = specs[slot].value
            if spec is _STACKED:
                value = jnp.expand_dims(value, 0)
            elif self.compared(spec):
                value = jnp.expand_dims(value, 0)
                names.append((self.specs.index(spec), name_of(specs[slot])))
            elif _jax.varying_axes(value) & set(self._call.missing(spec)):
                different.append(name_of(specs[slot]))
            out.append(value)
        if different:
            raise BroadcastWriteError(different_lanes(different))
        if self._names is not None:
            self._names.names = tuple([name for _, name in sorted(names, key=lambda n: n[0])])
        return out

    def may_forward(self, leaf: int, group: int) -> bool:
        """A leaf can stand for an output of its own spec."""
        return self._call.may_forward(leaf, self.specs[group])


def _broadcast_records(entry: Entry, spec: Any) -> Any:
    return PartitionSpec() if issubclass(entry.cls, Records) else spec


def _stack_records(entry: Entry, spec: Any) -> Any:
    return _STACKED if issubclass(entry.cls, Records) else spec
