"""`State`: the arrays of an object, as one flat pytree node.

What is static about the leaves is JAX's aux data, the arrays are the children. Flat, because a
nested node costs JAX a Python call per level and the paths are known anyway; the nested reading
(`state["layers"][0]["w"]`) is computed when it is asked for, and kept.

JAX builds States around anything at all (tracers, None, its own placeholders), so the constructor
looks at nothing but the number of leaves.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax

from anabranch.errors import ArgumentError, FilterError, MissingPathError, bounded, first_few
from anabranch.graph import _classify, _kinds
from anabranch.graph._filters import Filter, Path, first_match, to_predicates
from anabranch.graph._leaf import are_same, check_is_array, leaf_text
from anabranch.graph._leaf_info import (
    DeferredInfos,
    LeafInfo,
    LeafInfos,
    LeafKey,
    check_paths_are_disjoint,
    path_text,
)
from anabranch.graph._nested import NestedReading

_SHOWN_ROWS = 8


class State(NestedReading):
    """Hold the arrays of an object, by path.

    A State is a snapshot: writes to the object do not show in it, and it cannot be written itself
    (`replace` and `map` make new ones). It is a pytree, so `jax.tree.map`, `jax.jit`, `jax.grad`
    and optax take it as it is. It reads like nested dicts; a tuple reads a whole path. A key
    that is itself a tuple comes before a path.

    `==` compares infos, dtypes, shapes and bits of the leaves, in order, and returns a bool.

    Arguments:
      infos: the static part of each leaf. Not validated; `from_flat` and `from_dict` do that.
      leaves: as many arrays, of any shape and dtype.

    Raises:
      ValueError: the numbers of infos and leaves differ.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import anabranch as ab
    >>> state = ab.State.from_dict({"layers": [{"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}]})
    >>> state
    State(
      ['layers'][0]['w']  Array  float32[3,4]
      ['layers'][0]['b']  Array  float32[4]
    )
    >>> state["layers"][0]["b"] is state["layers", 0, "b"]
    True
    >>> doubled = jax.tree.map(lambda x: 2 * x, state)
    >>> float(doubled["layers", 0, "w"].sum())
    24.0
    """

    __slots__ = ()

    # Making one

    @staticmethod
    def from_flat(
        flat: Mapping[Path, typing.Any], *, kinds: type | Mapping[Path, type] = jax.Array
    ) -> State:
        """Make a State of arrays by path. The arrays are taken as they are, not copied.

        Arguments:
          flat: path -> array.
          kinds: the kind of every leaf, or path -> kind.

        Returns:
          A State whose leaves have no metadata.

        Raises:
          TypeError: a path is no tuple, or a leaf is no array.
          KeyError: `kinds` lacks a path.
          StructureError: a path continues another one, at which there is a leaf.

        >>> import anabranch as ab
        >>> ab.State.from_flat({("w",): np.ones(2), ("n",): np.zeros(())}, kinds=ab.Param)
        State(
          ['w']  Param  float64[2]
          ['n']  Param  float64[]
        )
        """
        infos: list[LeafInfo] = []
        for path, leaf in flat.items():
            if not isinstance(path, tuple):
                raise ArgumentError(f"expected paths, which are tuples, found the key {path!r}")
            check_is_array(path, leaf)
            if isinstance(kinds, Mapping) and path not in kinds:
                raise MissingPathError(f"kinds has no entry for the leaf at {path_text(path)}")
            infos.append(LeafInfo(path, kinds[path] if isinstance(kinds, Mapping) else kinds))
        check_paths_are_disjoint(infos)
        return State(LeafInfos(infos), tuple(flat.values()))

    @staticmethod
    def from_dict(nested: Mapping[typing.Any, typing.Any], *, kind: type = jax.Array) -> State:
        """Make a State of nested dicts of arrays. The arrays are taken as they are, not copied.

        Arguments:
          nested: dicts of dicts of arrays; lists and tuples stand for dicts keyed by position.
          kind: the kind of every leaf.

        Returns:
          A State whose leaves have no metadata, in the order of the dicts.

        Raises:
          TypeError: a leaf is no array.

        >>> import anabranch as ab
        >>> ab.State.from_dict({"a": [np.ones(2), np.zeros(3)]}, kind=ab.Param).paths
        (('a', 0), ('a', 1))
        """
        flat: dict[Path, typing.Any] = {}
        pending: list[tuple[Path, typing.Any]] = [((), nested)]
        while pending:
            path, value = pending.pop()
            if isinstance(value, (list, tuple)):
                value = dict(enumerate(typing.cast("list[typing.Any]", value)))
            if isinstance(value, Mapping):
                below = typing.cast("Mapping[Hashable, typing.Any]", value)
                # A root leaf of a State has the key ().
                ahead = [((*path, key) if key != () else path, x) for key, x in below.items()]
                pending.extend(reversed(ahead))
            else:
                flat[path] = value
        return State.from_flat(flat, kinds=kind)

    @staticmethod
    def union(*states: State) -> State:
        """Join States that have no path in common.

        The leaves of the first come first. To put the parts of one State back in the order that
        they had, write `state.replace(part)`.

        Arguments:
          *states: States.

        Returns:
          One State with all leaves.

        Raises:
          StructureError: two leaves have the same path, or one path continues another.

        >>> import anabranch as ab
        >>> state = ab.State.from_dict({"a": np.ones(1), "b": np.ones(2)})
        >>> a, b = state.split(ab.PathContains("a"), ...)
        >>> ab.State.union(b, a).paths
        (('b',), ('a',))
        """
        infos = LeafInfos(info for state in states for info in state._infos)
        check_paths_are_disjoint(infos)
        return State(infos, tuple(leaf for state in states for leaf in state._leaves))

    # Selecting

    @typing.overload
    def filter(self, only: Filter = ..., /) -> State: ...
    @typing.overload
    def filter(self, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
    def filter(self, *filters: Filter) -> State | tuple[State, ...]:
        """Select leaves; those that no filter matches are left out.

        Arguments:
          *filters: filters; a leaf goes to the first that matches it.

        Returns:
          One State, or a tuple of States if there are several filters. Paths stay whole.

        Raises:
          FilterError: an argument is no filter, or follows one that takes everything.

        >>> import anabranch as ab
        >>> state = ab.State.from_dict({"a": np.ones(1), "b": np.ones(2)})
        >>> state.filter(ab.PathContains("b")).paths
        (('b',),)
        """
        if not filters:
            return self
        parts, _ = self._assign(filters)
        return parts[0] if len(parts) == 1 else parts

    @typing.overload
    def split(self, only: Filter = ..., /) -> State: ...
    @typing.overload
    def split(self, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
    def split(self, *filters: Filter) -> State | tuple[State, ...]:
        """Distribute all leaves over the filters.

        Arguments:
          *filters: filters; a leaf goes to the first that matches it. `...` takes the rest.

        Returns:
          One State, or a tuple of States if there are several filters. Paths stay whole.

        Raises:
          FilterError: an argument is no filter, follows one that takes everything, or no filter
            matches some leaf.

        >>> import anabranch as ab
        >>> state = ab.State.from_dict({"a": np.ones(1), "b": np.ones(2)})
        >>> b, rest = state.split(ab.PathContains("b"), ...)
        >>> rest.paths
        (('a',),)
        """
        if not filters:
            return self
        parts, left = self._assign(filters)
        if left:
            rows = (f"{path_text(info.path)}  {info.kind_text}" for info in left)
            raise FilterError(
                bounded(
                    f"State.split: no filter matches\n{first_few(rows)}\n"
                    "Add ... as the last filter to take the rest, or use State.filter to drop it."
                )
            )
        return parts[0] if len(parts) == 1 else parts

    def _assign(self, filters: tuple[Filter, ...]) -> tuple[tuple[State, ...], list[LeafInfo]]:
        """Return a State for each filter, and the infos that none of them matches."""
        predicates = to_predicates(filters)
        groups: list[list[tuple[LeafInfo, typing.Any]]] = [[] for _ in predicates]
        left: list[LeafInfo] = []
        for info, leaf in zip(self._infos, self._leaves, strict=True):
            match = first_match(predicates, info.path, _as_variable(info, leaf))
            if match is None:
                left.append(info)
            else:
                groups[match].append((info, leaf))
        return tuple(map(State._of_pairs, groups)), left

    # Changing

    def map(self, f: Callable[[Path, typing.Any], typing.Any]) -> State:
        """Return a State with `f(path, leaf)` in the place of each leaf.

        Arguments:
          f: a function of the path and the array. `jax.tree.map` does without the path.

        Returns:
          A State with the same infos.

        >>> import anabranch as ab
        >>> state = ab.State.from_dict({"a": np.ones(1), "b": np.ones(2)})
        >>> state.map(lambda path, x: x if path == ("a",) else x + 1)["b"]
        array([2., 2.])
        """
        pairs = zip(self._infos, self._leaves, strict=True)
        return State(self._infos, tuple(f(info.path, leaf) for info, leaf in pairs))

    def replace(self, new: Mapping[typing.Any, typing.Any]) -> State:
        """Return a State with other arrays at some paths, in the same order.

        Arguments:
          new: path -> array, or a State. A key that is no tuple stands for a path of one key.
            Shapes and dtypes may differ from those that are replaced.

        Returns:
          A State with the same infos.

        Raises:
          KeyError: there is no leaf at a path.

        >>> import anabranch as ab
        >>> state = ab.State.from_dict({"a": np.ones(1), "b": np.ones(2)})
        >>> state.replace({("b",): np.zeros(3)})["b"]
        array([0., 0., 0.])
        """
        leaves = list(self._leaves)
        for key, leaf in (new.flat() if isinstance(new, State) else new).items():
            position = self._position_of(key)
            if position is None:
                raise MissingPathError(
                    self._missing_text(key if isinstance(key, tuple) else (key,), "no leaf")
                )
            leaves[position] = leaf
        return State(self._infos, tuple(leaves))

    # What Python asks of a value

    def numbers_in(self, graphdef: object) -> Sequence[int] | None:
        """Return the numbers that the leaves have in a graphdef, without finding their paths.

        Returns:
          The numbers, in order; None if these are not known to be leaves of the graphdef.

        >>> import anabranch as ab
        >>> graphdef, _, rest = ab.split([ab.Param(1.0), ab.BatchStat(0.0)], ab.Param, ...)
        >>> rest.numbers_in(graphdef)
        (1,)
        """
        source = self._source
        return source.numbers_in(graphdef) if isinstance(source, DeferredInfos) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        return self is other or (
            self._source == other._source and all(map(are_same, self._leaves, other._leaves))
        )

    __hash__ = None

    def __repr__(self) -> str:
        rows = [
            f"  {path_text(info.path)}  {info.kind_text}  {leaf_text(leaf)}"
            for info, leaf in zip(self._infos[:_SHOWN_ROWS], self._leaves, strict=False)
        ]
        if len(self._infos) > _SHOWN_ROWS:
            rows.append(f"  ... and {len(self._infos) - _SHOWN_ROWS:,} more leaves")
        return "\n".join(["State(", *rows, ")"]) if rows else "State()"

    def __copy__(self) -> State:
        return self

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> State:
        # metadata is static: a copy of it might compare unequal
        return State(self._source, copy.deepcopy(self._leaves, memo))

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return State, (self._source, self._leaves)


_new: Callable[[type[State]], State] = object.__new__


def state_of(infos: LeafInfos | DeferredInfos, leaves: tuple[typing.Any, ...]) -> State:
    """Return a State of as many leaves as infos, which is not checked."""
    state = _new(State)
    state._source, state._leaves, state._children, state._positions = infos, leaves, None, None
    return state


def _as_variable(info: LeafInfo, leaf: typing.Any) -> typing.Any:
    """Return what a filter looks at: a Variable, or the array that was a plain attribute."""
    if info.kind is jax.Array:
        return leaf
    kind = _classify.kind_of_variables(info.kind) or _kinds.VARIABLE
    return kind.build(info.kind, info.metadata, ("value",), (leaf,))


def _flatten(
    state: State,
) -> tuple[tuple[typing.Any, ...], LeafInfos | DeferredInfos]:
    return state.leaves, state._source


def _flatten_with_keys(
    state: State,
) -> tuple[list[tuple[LeafKey, typing.Any]], LeafInfos | DeferredInfos]:
    keys = (LeafKey(info.path) for info in state.infos)
    return list(zip(keys, state.leaves, strict=True)), state._source


def _unflatten(infos: LeafInfos | DeferredInfos, leaves: Iterable[typing.Any]) -> State:
    return state_of(infos, tuple(leaves))


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
