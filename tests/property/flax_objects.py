"""The classes of random programs as classes of flax nnx, for programs on objects of flax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from flax import nnx

from tests.property import contents
from tests.property.objects import VOCABULARY


class Block(nnx.Module, pytree=False):
    """A Module that may hold anything in any attribute, as flax allows it."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def bump(self) -> None:
        self.hits = getattr(self, "hits", 0) + 1


class Strict(nnx.Module, pytree=False):
    def __init__(self, a: Any, /) -> None:
        self.a = a


class _Cell:
    """What programs write of a Variable, in words that flax has not given up."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        return self.get_raw_value()  # type: ignore[attr-defined]

    @value.setter
    def value(self, value: Any) -> None:
        self.set_raw_value(value.value if isinstance(value, _Cell) else value)  # type: ignore[attr-defined]

    def __iadd__(self, other: Any) -> Any:
        self.value = self.value + other
        return self

    def __isub__(self, other: Any) -> Any:
        self.value = self.value - other
        return self

    __hash__ = object.__hash__


class Variable(_Cell, nnx.Variable[Any]):
    pass


class Param(_Cell, nnx.Param[Any]):
    pass


class BatchStat(_Cell, nnx.BatchStat[Any]):
    pass


class Own(Variable):
    pass


class OwnParam(Param):
    pass


_CLASSES = (Block, Strict, Variable, Param, BatchStat, Own, OwnParam)
contents.VARIABLES.append(nnx.Variable)
contents.HOLDERS.append(nnx.Pytree)


@contextlib.contextmanager
def objects_of_flax() -> Iterator[None]:
    """Let the names in programs mean classes of flax."""
    with mock.patch.dict(VOCABULARY, {cls.__name__: cls for cls in _CLASSES}):
        yield
