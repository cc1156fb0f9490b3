"""Read tangents, given in the form of an argument: a State for each object, None for zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import AliasError, StructureError, bounded, first_few
from anabranch.graph import _classify, _kinds
from anabranch.graph._graphdef import Edge, GraphDef
from anabranch.graph._kinds import Kind
from anabranch.graph._leaf_info import path_text
from anabranch.graph._state import State
from anabranch.transforms._differentiated import is_state_for, leaves_below

Aval = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


def avals_of(leaves: Sequence[Any]) -> tuple[Aval, ...]:
    """Return shape and dtype of each leaf."""
    return tuple([(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves])


class TangentForm(NamedTuple):
    """The form of the tangents of one argument. Static: it refers to no object or array."""

    graphdef: GraphDef
    edge: Edge  # to the argument
    name: str  # how the tangent is called
    avals: tuple[Aval, ...]  # of all leaves of the call

    def read(self, given: Any, found: dict[int, Any]) -> None:
        """Add the tangent of each leaf that has one.

        Arguments:
            given: tangents in the form of the argument.
            found: the tangent for each number of a leaf.

        Raises:
            StructureError: the form, a path, a shape or a dtype is another one.
            AliasError: one leaf is given two tangents.
        """
        seen: set[tuple[int, int]] = set()
        pending: list[tuple[Edge, Any, str]] = [(self.edge, given, self.name)]
        while pending:
            edge, tangent, where = pending.pop()
            if tangent is None or _is_float0(tangent):
                continue
            if type(edge) is not int:
                raise StructureError(
                    bounded(
                        f"{where}: what is static has no tangent, but one of type "
                        f"{type(tangent).__name__} is given; give None"
                    )
                )
            if edge < 0:
                self._add(~edge, tangent, where, found)
            elif (edge, id(tangent)) not in seen:
                seen.add((edge, id(tangent)))
                pending += reversed(self._children(edge, tangent, where))

    def _children(self, index: int, tangent: Any, where: str) -> list[tuple[Edge, Any, str]]:
        """Return the edges below an entry, with their tangents."""
        entry = self.graphdef.entries[index]
        if is_state_for(entry.kind) or issubclass(entry.cls, State):
            return self._by_path(index, tangent, where)
        kind = _classify.rule_of(tangent)
        keys: Sequence[Any] = ()
        values: Sequence[Any] = ()
        if isinstance(kind, Kind):
            _, keys, values = kind.open(tangent)
        if entry.kind is _kinds.DICT and kind is entry.kind and set(keys) == set(entry.keys):
            by_key = dict(zip(keys, values, strict=True))
            keys, values = entry.keys, [by_key[key] for key in entry.keys]
        if kind is not entry.kind or tuple(keys) != tuple(entry.keys):
            raise StructureError(
                bounded(
                    f"{where}: tangents have the form of the argument, which is a "
                    f"{entry.cls.__name__} with {len(entry.keys)} entries "
                    f"{list(entry.keys)[:8]}, but this is a {type(tangent).__name__} with "
                    f"{len(keys)} entries {list(keys)[:8]}"
                )
            )
        names = [f"{where}{entry.kind.show_key(key)}" for key in keys]
        return list(zip(entry.edges, values, names, strict=True))

    def _by_path(self, index: int, tangent: Any, where: str) -> list[tuple[Edge, Any, str]]:
        entry = self.graphdef.entries[index]
        if not isinstance(tangent, State):
            raise StructureError(
                f"{where}: the tangent of a {entry.cls.__name__} is a State with its paths, not "
                f"a {type(tangent).__name__}; `ab.state(obj, ab.Param)` and "
                "`jax.tree.map(jnp.zeros_like, ...)` make one, `None` is zero"
            )
        leaf_at = {v.path: v.edge for v in leaves_below(self.graphdef, index)}
        unknown = [path for path in tangent.paths if path not in leaf_at]
        if unknown:
            raise StructureError(
                bounded(
                    f"{where}: this {entry.cls.__name__} has no leaves at\n"
                    f"{first_few(path_text(path) for path in unknown)}\nIt has\n"
                    f"{first_few(path_text(path) for path in leaf_at)}\n"
                    "(what several paths reach has a tangent at the first of them)"
                )
            )
        return [(leaf_at[p], x, f"{where}{path_text(p)}") for p, x in tangent.flat().items()]

    def _add(self, number: int, tangent: Any, where: str, found: dict[int, Any]) -> None:
        shape, dtype = self.avals[number]
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise StructureError(
                f"{where}: an array of dtype {dtype} has no tangent; give None, or leave it out"
            )
        if not _is_array(tangent):
            raise StructureError(f"{where}: a {type(tangent).__name__} is no tangent of an array")
        number_given = isinstance(tangent, (bool, int, float, complex))
        is_real = number_given and not isinstance(tangent, complex)
        if is_real or (number_given and jnp.issubdtype(dtype, jnp.complexfloating)):
            tangent = jnp.asarray(tangent, dtype)
        if (np.shape(tangent), jnp.result_type(tangent)) != (shape, dtype):
            raise StructureError(
                f"{where}: the tangent has dtype {jnp.result_type(tangent)} and shape "
                f"{np.shape(tangent)}, but the argument has dtype {dtype} and shape {shape}"
            )
        before = found.setdefault(number, tangent)
        if before is not tangent:
            raise AliasError(
                f"{where}: this leaf is reached more than once, and has been given another "
                "tangent: give it one, and None for the rest"
            )


def _is_float0(tangent: Any) -> bool:
    return getattr(tangent, "dtype", None) == jax.dtypes.float0


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
