"""`Module.sow` and `Module.perturb` of flax record where a `capture` of ours has marked a module.

They look for `__captures__` on the module: Variables that hold dictionaries by name, one for each
kind that is captured. What they find are Variables that hold a view of the Records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from anabranch.errors import CapturedWriteError, StructureError
from anabranch.graph._classify import value_of
from anabranch.graph._counterparts import counterparts, is_kind
from anabranch.graph._module import attributes_of
from anabranch.graph._recording import Records, check_name, collects
from anabranch.graph._tokens import owns
from anabranch.graph._variable import Perturbation
from anabranch.interop import _layout


class NNXRecords(Records):
    """Records that read like what flax has in the same place."""

    ATTRIBUTE = "__captures__"

    def __iter__(self) -> Iterator[Any]:
        for kind in _concrete(self.kinds):
            variable = _layout.new_variable(kind)
            _layout.set_metadata(variable, {})
            _layout.set_value(variable, _Recorded(self, kind))
            yield variable
        yield from self.outer or ()


def _concrete(kinds: tuple[type, ...]) -> list[type]:
    """Return all classes of flax that are captured: it looks for the very class."""
    pending = [k for kind in kinds for k in (kind, *counterparts(kind))]
    found: dict[type, None] = {}
    while pending:
        kind = pending.pop()
        if issubclass(kind, nnx.Variable) and collects(kinds, kind):
            found[kind] = None
        pending += kind.__subclasses__()
    return list(found)


class _Recorded:
    """What is recorded of one kind, by name."""

    def __init__(self, records: Records, kind: Any) -> None:
        self._records, self._kind = records, kind
        self._is_perturbation = is_kind(kind, Perturbation)
        self._unused: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        check_name(name, f"recording of {self._kind.__name__}")
        return name in self._unused or bool(self._sown(name)) or self._single(name) is not None

    def __getitem__(self, name: str) -> Any:
        single = self._single(name)
        if single is not None:
            return value_of(single)
        if name in self._unused:
            return self._unused[name]
        return tuple([value_of(variable) for variable in self._sown(name)])

    def __setitem__(self, name: str, value: Any) -> None:
        if self._is_perturbation and self._records.given:
            self._unused[name] = value  # others are given, and this one is not asked for
            return
        if not owns(object.__getattribute__(self._records, "_ab_token")):
            raise CapturedWriteError(
                f"{name!r} is recorded inside of a transform that cannot bring it out, one of JAX "
                "or of flax: use that of anabranch"
            )
        sown = [value_of(variable) for variable in self._sown(name)]
        if (
            type(value) is tuple
            and self._single(name) is None
            and len(value) >= len(sown)
            and all(map(_is_same, value, sown))
        ):
            for new in value[len(sown) :]:
                self._records.record(name, self._kind, new)
            return
        for key in [key for key, _ in self._all(name) if key != self._key(name)]:
            delattr(self._records, key)
        setattr(self._records, self._key(name), self._kind(value))

    def _key(self, name: str) -> str:
        return f"{name}/" if self._is_perturbation else f"{name}/="

    def _single(self, name: str) -> Any:
        variable = attributes_of(self._records).get(self._key(name))
        known = variable is None or self._is_perturbation or type(variable) is self._kind
        if not known:
            raise StructureError(
                f"{name!r} is recorded as {type(variable).__name__} and as {self._kind.__name__}: "
                "use two names"
            )
        return variable

    def _all(self, name: str) -> list[tuple[str, Any]]:
        recorded = self._records.recorded()
        return [(key, v) for key, v in recorded if key.rpartition("/")[0] == name]

    def _sown(self, name: str) -> list[Any]:
        """Return the values that were recorded one beside the other."""
        return [v for key, v in self._all(name) if type(v) is self._kind and key[-1].isdigit()]


def _is_same(x: Any, y: Any) -> bool:
    # flax copies containers whenever it reads or writes a Variable
    (xs, structure), (ys, other) = jax.tree.flatten(x), jax.tree.flatten(y)
    return structure == other and all(map(lambda a, b: a is b, xs, ys))
