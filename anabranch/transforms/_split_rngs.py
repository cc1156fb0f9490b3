"""`split_rngs` and `fork_rngs`: random streams for lanes, by hand.

While a call or a block runs, each stream has other keys, made from its next one; it has its own
key again afterwards, and has advanced by one, as if it had been drawn from once.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp

from anabranch._boundary import boundary
from anabranch.errors import FilterError, StructureError, bounded, first_few
from anabranch.graph import _classify
from anabranch.graph._classify import is_object, value_of
from anabranch.graph._delta import Write, commit
from anabranch.graph._filters import Filter, to_predicates
from anabranch.graph._flatten import flatten, namer
from anabranch.graph._merge import clone
from anabranch.transforms._call import Call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._streams import batch_shape, find_streams, split_key
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Size: TypeAlias = "int | tuple[int, ...]"


class _Sizes(NamedTuple):
    """The shapes of the keys that take the place of the single ones; None leaves a stream alone."""

    by_filter: list[tuple[Any, tuple[int, ...]]]  # the first filter that matches the key decides
    others: tuple[int, ...] | None


class _Chosen(NamedTuple):
    """A stream that is to have other keys."""

    key: Any  # the Variables
    count: Any
    shape: tuple[int, ...]

    def new(self) -> tuple[Any, Any]:
        """Return keys made from the next one, and as many counts."""
        key, count = value_of(self.key), value_of(self.count)
        single = self.shape == ()
        keys = jax.random.fold_in(key, count) if single else split_key(key, count, self.shape)
        return keys, jnp.zeros(self.shape, jnp.asarray(count).dtype)


class SplitStreams:
    """Give the random streams of an object other keys while a block runs; see `split_rngs`.

    >>> import anabranch as ab
    >>> rngs = ab.Rngs(0)
    >>> with ab.split_rngs(rngs, splits=3):
    ...     rngs.default.key.shape
    (3,)
    """

    def __init__(self, node: Any, sizes: _Sizes, action: str) -> None:
        self._node, self._sizes, self._action = node, sizes, action
        self._open: list[list[tuple[Any, Any, Any]]] = []  # Variables, what was put in, before

    def __enter__(self) -> None:
        split: list[tuple[Any, Any, Any]] = []
        for chosen in _choose(self._node, self._sizes, self._action):
            for variable, new in zip((chosen.key, chosen.count), chosen.new(), strict=True):
                split.append((variable, new, value_of(variable)))
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
                f"{self._action}: {len(moved)} keys of random streams were written while they had "
                "been replaced; the streams have the keys again that they had before"
            )


def _write(values: list[tuple[Any, Any]]) -> None:
    """Write values to Variables, all or none."""
    writes: list[Write] = []
    for variable, value in values:
        kind: Any = _classify.rule_of(variable)
        extra, keys, _ = kind.open(variable)
        writes.append(Write(variable, type(variable), (extra, keys, (value,))))
    commit(writes)


def _choose(node: Any, sizes: _Sizes, action: str) -> list[_Chosen]:
    """Return the streams that are to have other keys."""
    flat = flatten(node)
    infos, name = flat.graphdef.infos, namer(flat.graphdef)
    predicates = to_predicates([f for f, _ in sizes.by_filter])
    unused = set(range(len(predicates)))
    chosen: list[_Chosen] = []
    other: list[str] = []
    for stream in find_streams(flat.graphdef):
        key: Any = flat.objects[stream.key_variable]
        path = infos[stream.key_leaf].path
        matches = [i for i, predicate in enumerate(predicates) if predicate(path, key)]
        size = sizes.by_filter[matches[0]][1] if matches else sizes.others
        unused.difference_update(matches)
        if size is None:
            other.append(name(stream.key_variable))
            continue
        if shape := batch_shape(value_of(key)):
            raise StructureError(
                f"{action}: {name(stream.key_variable)} already holds several keys, of shape "
                f"{shape}; a stream is split once: leave it out with `only`, give all sizes at "
                "once, as in (2, 3), or do it inside of the lanes"
            )
        chosen.append(_Chosen(key, flat.objects[stream.count_variable], size))
    if chosen and unused:
        known = [name(stream.key_variable) for stream in find_streams(flat.graphdef)]
        raise StructureError(
            bounded(
                f"{action}: there is no stream {sizes.by_filter[min(unused)][0]!r} among these:\n"
                f"{first_few(known)}"
            )
        )
    if not chosen:
        found = f"these were found:\n{first_few(other)}" if other else "there are none"
        raise FilterError(
            bounded(
                f"{action}: no random stream is selected; {found}\nStreams are looked for in the "
                "arguments of a decorated function (and in what it is bound to), or in the object "
                "that is given"
            )
        )
    return chosen


def _shape(size: Size | None) -> tuple[int, ...]:
    return () if size is None else (size,) if isinstance(size, int) else tuple(size)


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
@checks_options("split_rngs")
def split_rngs(target: Any = None, /, *, splits: int | tuple[int, ...], only: Filter = ...) -> Any:
    """Split random streams for lanes while a function or a block runs.

    Each stream has `splits` keys, split from its next key, and as many counts of zero, to be
    mapped along axis 0. Afterwards it has its own key again and has advanced by one; after an
    exception it is as it was.

    Arguments:
        target: a node: the result is a context manager that splits the streams in it. Or a
            function: the streams that its arguments or itself reach are split while it runs.
            Without it, `split_rngs` is a decorator. A Module that can be called is a node.
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
    return _for_a_while(target, _Sizes([(only, _shape(splits))], None), "split_rngs")


def _for_a_while(target: Any, sizes: _Sizes, action: str) -> Any:
    """Return a decorator, a decorated function, or a context manager."""
    if target is None:
        return functools.partial(_decorated, sizes=sizes, action=action)
    if _is_function(target):
        return _decorated(target, sizes, action)
    return SplitStreams(target, sizes, action)


def _is_function(target: Any) -> bool:
    return callable(target) and not is_object(target)


def _decorated(function: Any, sizes: _Sizes, action: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with SplitStreams(Call(function, args, kwargs), sizes, action):
            return function(*args, **kwargs)

    remake = functools.partial(_decorated, sizes=sizes, action=action)
    return wrap(call, function, remake, name=action)


Splits: TypeAlias = "Size | Mapping[Any, Size | None] | None"


@overload
def fork_rngs(target: Callable[P, R], /, *, split: Splits = None) -> Callable[P, R]: ...
@overload
def fork_rngs(target: T, /, *, split: Splits = None) -> T: ...
@overload
def fork_rngs(*, split: Splits = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("fork_rngs")
def fork_rngs(target: Any = None, /, *, split: Splits = None) -> Any:
    """Make new random streams from the next key of each stream, which advances by one.

    Arguments:
        target: an object with streams, `Rngs` say: the result is a copy of it with new streams.
            Or a function: the streams that its arguments or itself reach are replaced by new ones
            while it runs. Without it, `fork_rngs` is a decorator. A Module that can be called is an
            object.
        split: how many keys each new stream has, or how many by the name of the stream, or by any
            other filter for its key; those that are not named have one.

    Returns:
        The copy, or the decorated function.

    Raises:
        FilterError: there are no streams.
        StructureError: `split` names a stream that there is not, or a stream is split already.

    >>> import anabranch as ab
    >>> rngs = ab.Rngs(0, dropout=1)
    >>> forked = ab.fork_rngs(rngs, split={"dropout": 4})
    >>> forked.dropout.key.shape, forked.default.key.shape, int(rngs.dropout.count)
    ((4,), (), 1)
    """
    if isinstance(split, Mapping):
        sizes = _Sizes([(k, _shape(size)) for k, size in split.items()], ())
    else:
        sizes = _Sizes([], _shape(split))
    if target is None or _is_function(target):
        return _for_a_while(target, sizes, "fork_rngs")
    streams, copy = _choose(target, sizes, "fork_rngs"), clone(target)
    copies = _choose(copy, sizes, "fork_rngs")
    for old, new in zip(streams, copies, strict=True):
        _write(list(zip((new.key, new.count), old.new(), strict=True)))
    _write([(old.count, value_of(old.count) + 1) for old in streams])
    return copy
