"""What the options of the transforms have to be: said at once, by name, in one place.

An option that JAX does not like fails inside of JAX, at the first call, and the message is about
something that the caller never wrote. What is given for each leaf (axes, specs, shardings) is
checked where it is matched with the arguments.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from anabranch.errors import ArgumentError, StructureError
from anabranch.transforms._specs import ABSENT, as_ours

P = ParamSpec("P")
R = TypeVar("R")


class _Expected(NamedTuple):
    check: Callable[[Any], bool]
    text: str


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_name(x: Any) -> bool:
    return isinstance(x, str)


def _one_or_many(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_one_or_many(x: Any) -> bool:
        if x is None or check(x):
            return True
        if isinstance(x, Iterator):
            return True  # it can be read only once
        plain = isinstance(x, Iterable) and not isinstance(x, (str, Mapping, jax.Array))
        return plain and all(map(check, x))

    return is_one_or_many


def _optional(*types: type) -> Callable[[Any], bool]:
    return lambda x: x is None or isinstance(x, types)


def _is_flag(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_)) or (_is_int(x) and x in (0, 1))


def _are_devices(x: Any) -> bool:
    return x is None or (
        isinstance(x, Sequence) and all(isinstance(device, jax.Device) for device in x)
    )


_FLAG = _Expected(_is_flag, "True or False")
_NUMBERS = _Expected(
    _one_or_many(_is_int), "an integer, or several of them: positions of arguments"
)
_NAMES = _Expected(_one_or_many(_is_name), "a string, or several of them: names of arguments")
_UNROLL = _Expected(
    lambda x: x is None or isinstance(x, bool) or (_is_int(x) and x > 0),
    "a positive integer, True or False",
)

_EXPECTED: dict[str, _Expected] = {
    **dict.fromkeys(("static_argnums", "donate_argnums", "nondiff_argnums"), _NUMBERS),
    **dict.fromkeys(("static_argnames", "donate_argnames", "nondiff_argnames"), _NAMES),
    **dict.fromkeys(("has_aux", "holomorphic", "allow_int", "reverse", "check_vma"), _FLAG),
    **dict.fromkeys(("keep_unused", "inline", "return_shape"), _FLAG),
    "static_broadcasted_argnums": _NUMBERS,
    "unroll": _UNROLL,
    "axis_name": _Expected(lambda x: isinstance(x, Hashable), "a name: a string, for one"),
    "axis_names": _Expected(_optional(Set), "a set of names of axes of the mesh"),
    "mesh": _Expected(_optional(Mesh, AbstractMesh), "a jax.sharding.Mesh"),
    "devices": _Expected(_are_devices, "a list of devices, such as `jax.devices()`"),
    "backend": _Expected(_optional(str), 'the name of a platform: "cpu", for one'),
    "compiler_options": _Expected(_optional(dict), "a dict of names and values"),
    "policy": _Expected(
        lambda x: x is None or callable(x),
        "a function, one of `jax.checkpoint_policies` for instance",
    ),
    "errors": _Expected(
        _optional(Set),
        "a set of errors, one of those in `jax.experimental.checkify`: `float_checks`, for one",
    ),
    "splits": _Expected(
        lambda x: _one_or_many(lambda n: _is_int(n) and n > 0)(x) and x is not None,
        "a positive integer, the number of lanes; or a tuple of them, for several axes",
    ),
}
_SPECIFICATIONS = frozenset(
    "in_axes out_axes in_specs out_specs in_shardings out_shardings argnums".split()
)
"""Options that may hold specifications of another library."""

_OF_TRANSFORMS: dict[tuple[str, str], _Expected] = {
    ("pmap", "axis_name"): _Expected(_optional(str), "a string"),
}


def checks_options(transform: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a transform one whose options are checked when they are given.

    Arguments:
        transform: what error messages call it.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(call).parameters.items()
        # read-only: so it is plain that the function which captures it will never reach an object
        known = types.MappingProxyType(
            {
                name: _OF_TRANSFORMS.get((transform, name), _EXPECTED.get(name))
                for name, parameter in parameters
                if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            }
        )

        @functools.wraps(call)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name in _SPECIFICATIONS:
                    kwargs[name] = as_ours(value)
                expected = known.get(name)
                if expected is not None and not expected.check(value):
                    raise ArgumentError(
                        f"{transform}: {name} is {expected.text}; found {_shown(value)}"
                    )
            return call(*args, **kwargs)

        return checked

    return decorate


def check_sharding(value: Any) -> Any:
    """Return what is given as a sharding; raise if it is none."""
    known = value is None or value is ABSENT or isinstance(value, (PartitionSpec, Sharding))
    if not known and not hasattr(value, "sharding"):  # a layout in memory, with a sharding
        raise StructureError(
            f"a sharding is a jax.sharding.Sharding, a PartitionSpec or None, not {value!r}; "
            "in_shardings and out_shardings are one of them, containers of them, or StateSharding"
        )
    return value


def as_sharding(value: Any, leaf: Any) -> Any:
    """Return the sharding of an array; raise if it is none, or does not fit."""
    if isinstance(check_sharding(value), Sharding):
        value.shard_shape(np.shape(leaf))
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return f"{text} of type {type(value).__name__}"
