"""The options of the transforms, as keyword arguments that a type checker knows.

They are explained where they are used: in the docstrings of `jit`, `vmap`, `pmap` and `grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any, Required, TypedDict

from anabranch.graph._filters import Filter
from anabranch.transforms._specs import DiffState
from anabranch.transforms._streams import Policy


class JitOptions(TypedDict, total=False):
    """Options of `jit`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    donate: Filter | None
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None


class VmapOptions(TypedDict, total=False):
    """Options of `vmap`."""

    in_axes: Any
    out_axes: Any
    axis_name: Hashable
    axis_size: int | None
    spmd_axis_name: Any
    rngs: Policy
    sharding_name: str | None


class PmapOptions(TypedDict, total=False):
    """Options of `pmap`."""

    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static_broadcasted_argnums: int | Iterable[int]
    devices: Sequence[Any] | None
    backend: str | None
    axis_size: int | None
    rngs: Policy


class ShardMapOptions(TypedDict, total=False):
    """Options of `shard_map`."""

    out_specs: Required[Any]
    in_specs: Any
    mesh: Any
    axis_names: Set[Hashable]
    check_vma: bool
    rngs: Policy


class GradOptions(TypedDict, total=False):
    """Options of `grad` and `value_and_grad`."""

    argnums: int | str | DiffState | Sequence[int | str | DiffState]
    has_aux: bool
    holomorphic: bool
    allow_int: bool


class JacobianOptions(TypedDict, total=False):
    """Options of `jacfwd` and `hessian`."""

    argnums: int | str | DiffState | Sequence[int | str | DiffState]
    has_aux: bool
    holomorphic: bool


class RematOptions(TypedDict, total=False):
    """Options of `remat`."""

    prevent_cse: bool | Sequence[bool]
    policy: Callable[..., bool] | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Iterable[str]


class ScanOptions(TypedDict, total=False):
    """Options of `scan`."""

    in_axes: Any
    out_axes: Any
    length: int | None
    reverse: bool
    unroll: int | bool
