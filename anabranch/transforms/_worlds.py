"""Resolve specifications on what goes into a call and on what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.graph._build import Built
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import Entry, GraphDef
from anabranch.transforms._specs import ABSENT, Found, Resolved, Resolver, World

Normalise = Callable[[Any, Any], Any]
Override = Callable[[Entry, Any], Any]


def resolve_inputs(
    flat: Flat,
    args: Any,
    kwargs: Any,
    function: Any,
    normalise: Normalise,
    override: Override | None = None,
) -> Resolved:
    """Resolve specifications for a flattened `Call`.

    Arguments:
        flat: the call.
        args: a specification for the positional arguments: one for all, or a sequence.
        kwargs: one for each keyword argument: one for all, or a mapping.
        function: one for what the function itself holds.
        normalise: see `Resolver`.
        override: see `Resolver`.
    """
    entries = flat.graphdef.entries
    world = World(
        entry=lambda i: (entries[i], False),
        variable=flat.objects.__getitem__,
        leaf=lambda i, _: flat.leaves[i],
    )
    resolver = Resolver(world, normalise, override)
    call: Any = flat.graphdef.root
    function_edge, args_edge, kwargs_edge = entries[call].edges
    if isinstance(args, list):
        args = tuple(args)
    resolver.resolve(args_edge, args, "args")
    resolver.resolve(kwargs_edge, kwargs, "kwargs")
    resolver.resolve(function_edge, function, "the function")
    return resolver.found


def input_values(flat: Flat, inputs: Resolved) -> list[Any]:
    """Return the value of each leaf."""
    return [inputs.leaves[i, False].value for i in range(len(flat.leaves))]


def resolve_outputs(
    graphdef: GraphDef,
    twins: Built,
    found: Diff,
    inputs: Resolved,
    result: Any,
    default: Any,
    normalise: Normalise,
    override: Override | None = None,
    *,
    identity: bool = False,
) -> list[Found]:
    """Return what is found for each slot.

    What hangs on an argument has the specification of the argument; what is returned has that of
    the result. A returned argument needs none, and if it is given one, it must be its own.

    Arguments:
        graphdef: of the call.
        twins: its objects inside.
        found: what changed.
        inputs: the resolved inputs.
        result: the specification of the result, or `ABSENT`.
        default: the specification of what is new in the result if none was given.
        normalise: see `Resolver`.
        override: see `Resolver`.
        identity: returned arguments are themselves, whatever the specification of the result is.
    """
    changed = dict(found.delta.changed)
    known = len(graphdef.entries)
    new = found.delta.new
    objects = [*twins.objects, *found.new]

    def entry(index: int) -> tuple[Any, bool]:
        if index >= known:
            return new[index - known], True
        return (changed[index], True) if index in changed else (graphdef.entries[index], False)

    world = World(
        entry=entry,
        variable=objects.__getitem__,
        leaf=lambda i, slot: found.slots[i] if slot else twins.resolve(~i),
    )
    resolver = Resolver(world, normalise, override)
    resolver.found.leaves.update(inputs.leaves)
    resolver.found.nodes.update(inputs.nodes)
    for index in changed:
        for spec, step, name, path in (inputs.nodes[index], *inputs.again.get(index, ())):
            resolver.resolve(index, spec, name, step=step, path=path, skip_known=True, forced=True)
    absent = result is ABSENT
    resolver.resolve(
        found.delta.root,
        default if absent else result,
        "the return value",
        slot=True,
        skip_known=absent or identity,
    )
    unreached = Found(default, None, "the return value")
    return [resolver.found.leaves.get((i, True), unreached) for i in range(len(found.slots))]
