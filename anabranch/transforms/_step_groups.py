"""Which group each array that a step of a loop leaves belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph._build import Built
from anabranch.graph._delta import Diff
from anabranch.graph._graphdef import Entry, GraphDef
from anabranch.graph._recording import Records
from anabranch.transforms._box import Assignment
from anabranch.transforms._carry import Carry, Part, parts
from anabranch.transforms._lanes import output_axis, stack_records
from anabranch.transforms._prologue import FirstStep
from anabranch.transforms._specs import Found, show
from anabranch.transforms._stacked import Out, Separation
from anabranch.transforms._steady import Place, Steady, Written, steady
from anabranch.transforms._worlds import resolve_outputs

if TYPE_CHECKING:
    from anabranch.transforms._loop import Loop

RANKS = 32
"""More axes than an array has."""


class StepGroups:
    """Groups: one for each carried leaf, one for each axis, and one for what is fixed."""

    lanes = True

    def __init__(self, loop: Loop, result: Any, *, steps: bool, first: FirstStep | None) -> None:
        self._loop, self._result, self._steps, self._first = loop, result, steps, first
        self._carried = len(loop.carried)
        self.count = self._carried + RANKS + 1

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of each slot."""
        loop, delta = self._loop, found.delta
        changed = dict(delta.changed)
        known = len(graphdef.entries)

        def at(index: int) -> Entry:
            if index >= known:
                return delta.new[index - known]
            return changed.get(index, graphdef.entries[index])

        returned = [*parts(at, delta.root, self._result, "the return value")]
        carries = [part for part in returned if part.spec is Carry]
        places = loop.places(carries)
        match = steady(graphdef, delta, places, loop.name)
        additions = match.additions(found.slots, leaves)
        if additions is not None and self._steps:
            if self._first is None:
                raise StructureError(match.text)
            self._first.note(known, additions, delta, found.slots)
            return Assignment([self.count - 1] * delta.num_slots)
        _check_types(loop, leaves, found.slots, match.written)
        separation = Separation(graphdef, found, leaves, match.objects)
        for part in returned:
            if part.spec is not Carry:
                separation.stack(Out(part.edge, part.parent, part.position))
        for index, entry in changed.items():
            if index not in match.objects or issubclass(entry.cls, Records):
                separation.own(index)
        if not self._steps:
            self._undo(separation, carries, places)
        found = separation.diff(written=self._steps)
        specs = resolve_outputs(
            graphdef,
            twins,
            found,
            loop.inputs,
            self._result,
            0,
            _output_axis,
            stack_records,
            identity=True,
        )
        groups = self._groups(match, found, specs, leaves)
        stacked = [g - self._carried if g >= self._carried else None for g in groups]
        return Assignment(groups, None, loop.outside(found, stacked), found.slots)

    def _undo(
        self, separation: Separation, carries: Sequence[Part], places: Sequence[Place]
    ) -> None:
        """Let the result be what was given, in the place of each carry."""
        given = [place for place in places if place.in_result]
        for place, part in zip(given, carries, strict=True):
            edge = place.before
            if type(edge) is int:
                edge = separation.leaf(~edge) if edge < 0 else edge
                separation.put(Out(part.edge, part.parent, part.position), edge)

    def _groups(
        self, match: Steady, found: Diff, specs: Sequence[Found], leaves: Sequence[Any]
    ) -> list[int]:
        loop = self._loop
        carried: dict[int, int] = {written.slot: leaf for leaf, written in match.written.items()}
        by_id = {id(leaf): i for i, leaf in enumerate(leaves)}
        groups: list[int] = []
        for number, spec in enumerate(specs):
            leaf = carried.get(number)
            if leaf is None and not isinstance(spec.value, int):
                leaf = by_id.get(id(found.slots[number]))  # it comes out as it went in
                if leaf is None or (self._steps and leaf not in loop.fixed(leaves)):
                    raise StructureError(
                        bounded(
                            f"{loop.name}: {show(spec.name, spec.step)} is an array that a step "
                            "makes, so it is stacked along an axis; its axis is None"
                        )
                    )
            groups.append(self._group_of(leaf, spec.value))
        return groups

    def _group_of(self, leaf: int | None, axis: Any) -> int:
        loop = self._loop
        if leaf is None:
            return self._carried + axis
        if leaf in loop.position:
            return loop.position[leaf]
        own = loop.axes[leaf]
        return self.count - 1 if own is None else self._carried + own

    def may_forward(self, leaf: int, group: int) -> bool:
        """A leaf stands for itself only: another one may have other values in the next step."""
        if self._group_of(leaf, None) != group:
            return False
        config: Any = jax.config
        # then steps run one by one, and a number may be the same object by chance in one of them
        return not config.jax_disable_jit or group == self.count - 1


def _output_axis(axis: Any, leaf: Any) -> int | None:
    return None if axis is Carry else output_axis(axis, leaf)


def _check_types(
    loop: Loop, leaves: Sequence[Any], slots: Sequence[Any], written: dict[int, Written]
) -> None:
    """Raise if a carried array changes its type; a weak type may become a strong one."""
    different: list[str] = []
    for leaf, place in written.items():
        if leaf in loop.position:
            old, new = jax.typeof(leaves[leaf]), jax.typeof(slots[place.slot])
            if (old.shape, old.dtype) == (new.shape, new.dtype):
                continue
            settled = jnp.result_type(leaves[leaf], slots[place.slot])
            if old.shape == new.shape and old.weak_type and settled == new.dtype:
                continue  # JAX gives the input the other type, and traces again
            before, after = type_text(old), type_text(new)
            different.append(f"{place} is {before} before the step and {after} after it")
    if different:
        raise StructureError(
            bounded(
                f"{loop.name}: what is carried must keep its shape and dtype, but\n"
                f"{first_few(different)}\n"
                "convert one of them (`astype`), or give it the other type before the loop"
            )
        )


def type_text(aval: Any) -> str:
    """Return how a type is written."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
