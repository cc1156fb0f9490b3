"""`Carry`, and the parts of arguments and results that specifications speak of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from anabranch.errors import StructureError, bounded
from anabranch.graph._graphdef import Edge, Entry
from anabranch.transforms._specs import Step, is_container, show, specs_below


class _Carry:
    """What a step returns in the place of `Carry` is what the next step gets in its place."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Carry"

    def __reduce__(self) -> str:
        return "Carry"


Carry = _Carry()


class Part(NamedTuple):
    """A part of the arguments or of the result that has one specification."""

    edge: Edge
    spec: Any
    name: str
    step: Step | None
    parent: int  # the entry that holds it, -1 for the whole
    position: int


def parts(at: Callable[[int], Entry], edge: Edge, spec: Any, name: str) -> Iterator[Part]:
    """Yield the parts below an edge that a specification tells apart.

    Raises:
        StructureError: containers of the specification match none.
    """
    pending = [Part(edge, spec, name, None, -1, 0)]
    while pending:
        part = pending.pop()
        if not is_container(part.spec):
            yield part
            continue
        if type(part.edge) is not int or part.edge < 0:
            what = "an array" if type(part.edge) is int else "a static value"
            raise StructureError(
                bounded(f"{show(name, part.step)} is {what}, but its axes are {part.spec!r}")
            )
        entry = at(part.edge)
        specs = specs_below(entry, part.spec, part.step, name)
        below = [
            Part(e, s, name, Step(part.step, entry, i), part.edge, i)
            for i, (e, s) in enumerate(zip(entry.edges, specs, strict=True))
        ]
        pending += reversed(below)
