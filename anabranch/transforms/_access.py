"""How Variables are read and written that a call writes together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, starmap
from typing import Any

from anabranch.graph import _kinds
from anabranch.graph._kind import Kind
from anabranch.transforms._watch import Unplannable

_call: Callable[..., Any] = operator.call


class Access:
    """How Variables are read and written, each in its own way, but in one call in C.

    So nothing can come between two of them.

    Arguments:
        kinds: of the Variables.

    Raises:
        Unplannable: one of them is written in a way that is not known.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        cells = [kind.cell for kind in kinds if kind.cell is not None]
        if len(cells) < len(kinds):
            raise Unplannable
        self.own = [kind is _kinds.VARIABLE for kind in kinds]
        self.is_own = all(self.own)
        self.getters, self.setters = [c.read for c in cells], [c.write for c in cells]
        self.one = cells[0] if len({*map(id, cells)}) == 1 else None
        """How all of them are, if that is in one way."""

    def read(self, variables: Sequence[Any]) -> Iterable[Any]:
        """Return the values."""
        one = self.one
        return map(_call, self.getters, variables) if one is None else map(one.read, variables)

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Write them."""
        any(self.writing(variables, values))  # each returns None

    def replacing(
        self, variables: Sequence[Any], old: Sequence[Any], new: Sequence[Any]
    ) -> tuple[Iterable[bool], Iterable[None]]:
        """Return what tells of each whether it holds what it held, and what writes one each time.

        If one is used up right after the other, by `in`, nothing comes between: even a finaliser
        runs only where something is made, or where a function of Python is called.
        """
        return map(operator.is_, self.read(variables), old), self.writing(variables, new)

    def writing(self, variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
        """Return what writes one each time that it is asked for the next."""
        if self.one is None:
            return starmap(_call, [*zip(self.setters, variables, values, strict=False)])
        return starmap(self.one.write, [*zip(variables, values, strict=False)])

    def watched(self, variables: Sequence[Any]) -> Iterable[Any]:
        """Return those that tell of writes."""
        return variables if self.is_own else compress(variables, self.own)
