"""`split_rngs` and `fork_rngs`: random streams for lanes, by hand.

`split_rngs` gives each stream a key for each lane while a call or a block runs; the stream has its
own key again afterwards, and has advanced by one, as if it had been drawn from once.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from anabranch._boundary import boundary
from anabranch.errors import FilterError, StructureError, bounded, first_few
from anabranch.graph import _classify, _kinds
from anabranch.graph._classify import value_of
from anabranch.graph._delta import Write, commit
from anabranch.graph._filters import Filter, to_predicate
from anabranch.graph._flatten import flatten, namer
from anabranch.graph._rngs import Rngs, RngStream
from anabranch.graph._variable import Variable
from anabranch.transforms._call import Call
from anabranch.transforms._streams import batch_shape, find_streams, split_key
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


class SplitStreams:
    """Split the random streams of an object while a block runs; made by `split_rngs`.

    >>> import anabranch as ab
    >>> rngs = ab.Rngs(0)
    >>> with ab.split_rngs(rngs, splits=3):
    ...     rngs.default.key.shape
    (3,)
    """

    def __init__(self, node: Any, splits: int | tuple[int, ...], only: Filter) -> None:
        self._node, self._splits, self._only = node, splits, only
        self._open: list[list[tuple[Variable, Any, Any]]] = []  # what was split, put in, before

    def __enter__(self) -> None:
        shape = (self._splits,) if isinstance(self._splits, int) else tuple(self._splits)
        split: list[tuple[Variable, Any, Any]] = []
        for key, count in _streams(self._node, self._only):
            old_key, old_count = value_of(key), value_of(count)
            zeros = jnp.zeros(shape, jnp.asarray(old_count).dtype)
            split.append((key, split_key(old_key, old_count, shape), old_key))
            split.append((count, zeros, old_count))
        _write([(variable, new) for variable, new, _ in split])
        self._open.append(split)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        split = self._open.pop()
        keys, counts = split[::2], split[1::2]
        after = [(key, old) for key, _, old in keys]
        after += [(count, old if error is not None else old + 1) for count, _, old in counts]
        moved = [key for key, new, _ in keys if value_of(key) is not new]
        _write(after)
        if moved and error is None:
            raise StructureError(
                f"split_rngs: {len(moved)} keys of random streams were written while they were "
                "split; the streams have the keys again that they had before"
            )


def _write(values: list[tuple[Variable, Any]]) -> None:
    """Write values to Variables, all or none."""
    writes: list[Write] = []
    for variable, value in values:
        kind: Any = _classify.rule_of(variable)
        extra, keys, _ = kind.open(variable)
        writes.append(Write(variable, type(variable), (extra, keys, (value,))))
    commit(writes)


def _streams(node: Any, only: Filter) -> list[tuple[Variable, Variable]]:
    """Return key and count of each stream that is to be split."""
    flat = flatten(node)
    predicate = to_predicate(only)
    infos, name = flat.graphdef.infos, namer(flat.graphdef)
    chosen: list[tuple[Variable, Variable]] = []
    other: list[str] = []
    for stream in find_streams(flat.graphdef):
        key: Any = flat.objects[stream.key_variable]
        count: Any = flat.objects[stream.count_variable]
        if not predicate(infos[stream.key_leaf].path, key):
            other.append(name(stream.key_variable))
            continue
        shape = batch_shape(value_of(key))
        if shape:
            raise StructureError(
                f"split_rngs: {name(stream.key_variable)} already holds keys of shape "
                f"{shape}; a stream is split once: leave it out with `only`, or "
                "give all sizes at once (`splits=(2, 3)`)"
            )
        chosen.append((key, count))
    if not chosen:
        found = f"these were found:\n{first_few(other)}" if other else "there are none"
        raise FilterError(
            bounded(
                f"split_rngs: no random stream is selected; {found}\nStreams are looked for in the "
                "arguments of a decorated function (and in what it is bound to), or in the object "
                "that is given"
            )
        )
    return chosen


@overload
def split_rngs(  # pyright: ignore[reportOverlappingOverload]  # what can be called is no node
    target: Callable[P, R], /, *, splits: int | tuple[int, ...], only: Filter = ...
) -> Callable[P, R]: ...
@overload
def split_rngs(
    target: object, /, *, splits: int | tuple[int, ...], only: Filter = ...
) -> SplitStreams: ...
@overload
def split_rngs(
    *, splits: int | tuple[int, ...], only: Filter = ...
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("split_rngs")
def split_rngs(target: Any = None, /, *, splits: int | tuple[int, ...], only: Filter = ...) -> Any:
    """Split random streams for lanes while a function or a block runs.

    Each stream has `splits` keys, split from its next key, and as many counts of zero, to be
    mapped along axis 0. Afterwards it has its own key again and has advanced by one; after an
    exception it is as it was.

    Arguments:
        target: a node: the result is a context manager that splits the streams in it. Or a
            function: the streams in its arguments are split while it runs. Without it,
            `split_rngs` is a decorator. A Module that can be called is a node.
        splits: how many lanes; a tuple for several axes.
        only: a filter for the keys of the streams (their tag is the name of the stream).

    Raises:
        FilterError: no stream is selected.
        StructureError: a stream is split already, or its key was written while it was split.

    >>> import anabranch as ab
    >>> import jax
    >>> @ab.split_rngs(splits=3)
    ... @ab.vmap
    ... def noise(rngs):
    ...     return jax.random.normal(rngs())
    >>> rngs = ab.Rngs(0)
    >>> noise(rngs).shape, int(rngs.default.count)
    ((3,), 1)
    """
    if target is None:
        return functools.partial(_decorated, splits=splits, only=only)
    if callable(target) and not _is_node(target):
        return _decorated(target, splits, only)
    return SplitStreams(target, splits, only)


def _is_node(target: Any) -> bool:
    rule = _classify.rule_of(target)
    return isinstance(rule, _kinds.Kind) and rule.identity


def _decorated(function: Any, splits: int | tuple[int, ...], only: Filter) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with SplitStreams(Call(function, args, kwargs), splits, only):
            return function(*args, **kwargs)

    remake = functools.partial(_decorated, splits=splits, only=only)
    return wrap(call, function, remake, name="split_rngs")


@boundary("fork_rngs")
def fork_rngs(
    rngs: Rngs,
    /,
    *,
    split: int | tuple[int, ...] | Mapping[str, int | tuple[int, ...]] | None = None,
) -> Rngs:
    """Make new random streams from the next key of each stream, which advances by one.

    Arguments:
        rngs: the streams to start from.
        split: how many keys each new stream has, or how many by the name of the stream; those
            that are not named have one.

    Returns:
        Streams of the same names.

    Raises:
        StructureError: `split` names a stream that there is not, or a stream is split already.

    >>> import anabranch as ab
    >>> rngs = ab.Rngs(0, dropout=1)
    >>> forked = ab.fork_rngs(rngs, split={"dropout": 4})
    >>> forked.dropout.key.shape, forked.default.key.shape, int(rngs.dropout.count)
    ((4,), (), 1)
    """
    names = list(rngs)
    if isinstance(split, Mapping):
        unknown = [name for name in split if name not in names]
        if unknown:
            raise StructureError(f"fork_rngs: there is no stream {unknown[0]!r}; they are {names}")
    held = [name for name in names if batch_shape(rngs[name].key.value)]
    if held:
        raise StructureError(
            f"fork_rngs: the stream {held[0]!r} already holds several keys; fork inside of the "
            "lanes, or before it is split"
        )
    forked = Rngs()
    for name in names:
        size = split.get(name) if isinstance(split, Mapping) else split
        key = rngs[name]()
        seed = key if size is None else jax.random.split(key, size)
        setattr(forked, name, RngStream(seed, name=name))
    return forked
