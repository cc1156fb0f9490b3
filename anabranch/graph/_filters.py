"""Filters: which leaves are meant.

A filter is written as whatever names a set of leaves best: a class, a tag, a function, `...`.
`to_predicate` turns each of these into a function `(path, variable) -> bool`, the only form that
the rest of the package works with. The second argument is a `Variable`, or the array itself where
an object holds an array as a plain attribute.

The combinators normalise their parts when they are made, so that a wrong filter fails where it is
written, and `Any(Param)` equals `Any(OfType(Param))`. This file knows Variables by their
`get_metadata` method only; it imports none of the package's classes, and so serves Variables of
other libraries too.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax

from anabranch.errors import FilterError
from anabranch.graph._counterparts import counterparts

Path: typing.TypeAlias = tuple[Hashable, ...]
"""Where a leaf is: attribute names, list positions and dict keys, outermost first."""

Predicate: typing.TypeAlias = Callable[[Path, typing.Any], bool]
"""What a filter becomes: a function of a path and of the Variable (or plain array) found there."""

Filter: typing.TypeAlias = (
    "types.EllipsisType | bool | str | enum.Enum | type | Predicate | Sequence[Filter] | None"
)
"""Anything that `to_predicate` accepts."""

_WHAT_FILTERS_ARE = (
    "A filter is `...` or True (everything), None or False (nothing), a class such as Param, "
    "a tag (a string or an enum member), a function (path, variable) -> bool, a list or tuple of "
    "filters (any of them), or one of All, Any, Not, OfType, PathContains, WithTag, Everything, "
    "Nothing. A tag of another type is written WithTag(tag)."
)


def _metadata(variable: typing.Any) -> dict[str, typing.Any] | None:
    """Return the metadata of a Variable, None for a plain array."""
    get = getattr(variable, "get_metadata", None)
    return None if get is None else get()


@dataclasses.dataclass(frozen=True, slots=True)
class Everything:
    """Match every leaf; `...` and True are short for it.

    Returns:
      A filter.

    >>> import anabranch as ab
    >>> ab.Everything()(("layers", 0, "w"), ab.Param(1.0))
    True
    """

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing:
    """Match no leaf; None and False are short for it.

    Returns:
      A filter.

    >>> import anabranch as ab
    >>> ab.Nothing()(("layers", 0, "w"), ab.Param(1.0))
    False
    """

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class OfType:
    """Match the Variables of a class and of its subclasses; the bare class is short for it.

    Kinds of other libraries count as ours: `Param` also matches `flax.nnx.Param`.

    `OfType(jax.Array)` matches what an object holds as a plain array attribute: arrays of JAX and
    of NumPy and tracers alike, since a transform turns each of them into another.

    Arguments:
      type: the class.

    Returns:
      A filter.

    >>> import anabranch as ab
    >>> ab.OfType(ab.Variable)(("w",), ab.Param(1.0))
    True
    >>> ab.OfType(ab.BatchStat)(("w",), ab.Param(1.0))
    False
    """

    type: type

    def __post_init__(self) -> None:
        if not isinstance(self.type, type):
            raise FilterError(
                f"OfType takes a class, not {_name(self.type)}; a tag is written WithTag(tag)"
            )

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        if isinstance(variable, (self.type, *counterparts(self.type))):
            return True
        return self.type is jax.Array and not hasattr(variable, "get_metadata")

    def __repr__(self) -> str:
        return f"OfType({self.type.__qualname__})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class WithTag:
    """Match the Variables that carry a tag; a bare string is short for it.

    The tag of a Variable is the value of its metadata `tag`; more than one go into `tags`, as a
    tuple or a frozenset.

    Arguments:
      tag: any hashable value.

    Returns:
      A filter.

    >>> import anabranch as ab
    >>> ab.WithTag("frozen")(("w",), ab.Param(1.0, tag="frozen"))
    True
    >>> ab.WithTag("frozen")(("w",), ab.Param(1.0, tags=("encoder", "frozen")))
    True
    >>> ab.WithTag("frozen")(("w",), ab.Param(1.0))
    False
    """

    tag: Hashable

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        metadata = _metadata(variable)
        if not metadata:
            return False
        if "tag" in metadata and metadata["tag"] == self.tag:
            return True
        tags = metadata.get("tags", ())
        # A lone string is one tag: looking for a member of it would find substrings.
        return self.tag in ((tags,) if isinstance(tags, str) else tags)

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PathContains:
    """Match the leaves whose path contains a key.

    Arguments:
      key: an attribute name, a list position or a dict key. Keys of a path are compared whole.

    Returns:
      A filter.

    >>> import anabranch as ab
    >>> ab.PathContains("decoder")(("decoder", 0, "w"), ab.Param(1.0))
    True
    >>> ab.PathContains("code")(("decoder", 0, "w"), ab.Param(1.0))
    False
    """

    key: Hashable

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return self.key in path

    def __repr__(self) -> str:
        return f"PathContains({self.key!r})"


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class All:
    """Match the leaves that every one of the filters matches.

    Arguments:
      *filters: filters; without any, every leaf matches.

    Returns:
      A filter.

    Raises:
      FilterError: one of the arguments is no filter.

    >>> import anabranch as ab
    >>> frozen = ab.All(ab.Param, "frozen")
    >>> frozen
    All(OfType(Param), WithTag('frozen'))
    >>> frozen(("w",), ab.Param(1.0, tag="frozen")), frozen(("w",), ab.Param(1.0))
    (True, False)
    """

    filters: tuple[Predicate, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "filters", tuple(map(to_predicate, filters)))

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return all(predicate(path, variable) for predicate in self.filters)

    def __repr__(self) -> str:
        return f"All({', '.join(map(_name, self.filters))})"


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class Any:
    """Match the leaves that at least one of the filters matches; a list of them is short for it.

    Arguments:
      *filters: filters; without any, no leaf matches.

    Returns:
      A filter.

    Raises:
      FilterError: one of the arguments is no filter.

    >>> import anabranch as ab
    >>> state_like = ab.Any(ab.BatchStat, ab.Cache)
    >>> state_like
    Any(OfType(BatchStat), OfType(Cache))
    >>> state_like(("mean",), ab.BatchStat(0.0)), state_like(("w",), ab.Param(1.0))
    (True, False)
    """

    filters: tuple[Predicate, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "filters", tuple(map(to_predicate, filters)))

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return any(predicate(path, variable) for predicate in self.filters)

    def __repr__(self) -> str:
        return f"Any({', '.join(map(_name, self.filters))})"


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class Not:
    """Match the leaves that a filter does not match.

    Arguments:
      filter: a filter.

    Returns:
      A filter.

    Raises:
      FilterError: the argument is no filter.

    >>> import anabranch as ab
    >>> ab.Not(ab.Param)
    Not(OfType(Param))
    >>> ab.Not(ab.Param)(("mean",), ab.BatchStat(0.0))
    True
    """

    filter: Predicate

    def __init__(self, filter: Filter) -> None:
        object.__setattr__(self, "filter", to_predicate(filter))

    def __call__(self, path: Path, variable: typing.Any) -> bool:
        return not self.filter(path, variable)

    def __repr__(self) -> str:
        return f"Not({_name(self.filter)})"


_CLASSES = (Everything, Nothing, OfType, WithTag, PathContains, All, Any, Not)


def _name(filter: object) -> str:
    """Show a filter as it is written, in at most 200 characters."""
    if filter is ...:
        return "..."
    if isinstance(filter, (type, types.FunctionType)):
        return filter.__qualname__
    text = repr(filter)
    return text if len(text) <= 200 else f"{text[:197]}..."


def to_predicate(filter: Filter) -> Predicate:
    """Turn a filter into the function that decides which leaves it means.

    Arguments:
      filter: any form of filter.

    Returns:
      A function of a path and a Variable (or plain array). Equal filters give equal functions.

    Raises:
      FilterError: the argument is no filter.

    >>> import anabranch as ab
    >>> ab.to_predicate([ab.Param, "frozen"])
    Any(OfType(Param), WithTag('frozen'))
    >>> ab.to_predicate(...)
    Everything()
    """
    # By identity: 1 == True, and an array compares elementwise.
    if filter is ... or filter is True:
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if isinstance(filter, (str, enum.Enum)):
        return WithTag(filter)
    if isinstance(filter, type):
        # OfType(Everything) would be valid and match nothing, silently.
        if issubclass(filter, _CLASSES):
            raise FilterError(
                f"expected a filter, found the class {_name(filter)}. "
                f"Write {filter.__name__}(...) with its arguments. {_WHAT_FILTERS_ARE}"
            )
        return OfType(filter)
    if isinstance(filter, (list, tuple)):
        return Any(*filter)
    if callable(filter) and typing.get_origin(filter) is None:  # `list[int]` is callable
        _check_takes_two(filter)
        return filter
    raise FilterError(
        f"expected a filter, found {_name(filter)} of type {type(filter).__name__}. "
        f"{_WHAT_FILTERS_ARE}"
    )


def _check_takes_two(filter: Predicate) -> None:
    """Raise for a function that cannot be called with a path and a Variable."""
    if isinstance(filter, types.FunctionType):
        code, given = filter.__code__, len(filter.__defaults__ or ())
        most = 2 if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        if not code.co_argcount - given <= 2 <= most:
            raise FilterError(
                f"a function that is a filter is called with two arguments, a path and a Variable, "
                f"but {filter.__qualname__} takes {code.co_argcount}"
            )


def depends_on_path(filter: Filter) -> bool:
    """Tell whether the path of a leaf, and not only the leaf, may decide if it matches.

    Of a function that is not one of this module's filters nothing is known, so it may.
    """
    predicate = to_predicate(filter)
    if isinstance(predicate, (All, Any)):
        return any(depends_on_path(part) for part in predicate.filters)
    if isinstance(predicate, Not):
        return depends_on_path(predicate.filter)
    # A subclass may override what decides.
    return type(predicate) not in {OfType, WithTag, Everything, Nothing}


def first_match(predicates: Iterable[Predicate], path: Path, variable: typing.Any) -> int | None:
    """Return the position of the first predicate that matches, None if there is none."""
    for position, predicate in enumerate(predicates):
        if predicate(path, variable):
            return position
    return None


def check_ellipsis_last(filters: Sequence[Filter]) -> None:
    """Refuse a filter that takes everything (`...`, say) in front of one that does not.

    Several of them at the end are fine: those after the first get nothing.
    """
    first: int | None = None
    for position, filter in enumerate(filters):
        if isinstance(to_predicate(filter), Everything):
            first = position if first is None else first
        elif first is not None:
            raise FilterError(
                f"filter {first} is {_name(filters[first])} and takes every leaf that is left, so "
                f"filter {position}, {_name(filter)}, can never match. Put "
                f"{_name(filters[first])} last."
            )


def to_predicates(filters: Sequence[Filter]) -> tuple[Predicate, ...]:
    """Turn filters, of which the first match wins, into functions; `...` may only be last."""
    check_ellipsis_last(filters)
    return tuple(map(to_predicate, filters))
