"""Recorded values: what `sow` and `perturb` do where somebody captures, and nothing elsewhere.

Whoever captures gives every Module an attribute that holds a `Records`. It is part of the
structure, so that a compiled function that was traced without it is not used with it; and what is
recorded is a new Variable on a known object, which every transform brings out as such.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from anabranch._boundary import boundary, rewriters
from anabranch.errors import ArgumentError, CapturedWriteError, StructureError
from anabranch.graph._module import Module, attributes_of
from anabranch.graph._tokens import owns
from anabranch.graph._variable import Intermediate, Perturbation, Variable

T = TypeVar("T")

ATTRIBUTE = "_ab_records"
"""The attribute of a Module under which its Records are."""

rewriters.append(lambda text: text.replace(f".{ATTRIBUTE}", " (its recorded values)"))


class Records(Module):
    """What is recorded on one Module: attributes `name/0`, `name/1`, ... and `name/`.

    Attributes:
        kinds: the kinds of Variables that are recorded.
        given: whether perturbations were given, so that none are made.
        outer: the Records of a capture around.
    """

    def __init__(self, kinds: tuple[type, ...], outer: Records | None, *, given: bool) -> None:
        self.kinds, self.outer, self.given = kinds, outer, given

    def recorded(self) -> list[tuple[str, Variable]]:
        """Return what was recorded, by key."""
        return [(key, v) for key, v in attributes_of(self).items() if isinstance(v, Variable)]


def records_of(module: Any) -> Records | None:
    """Return the Records of an object, None if nobody captures."""
    if isinstance(module, Module):
        return attributes_of(module).get(ATTRIBUTE)
    return getattr(module, "__dict__", {}).get(ATTRIBUTE)


_OPEN: ContextVar[tuple[tuple[type, ...], ...]] = ContextVar("captured kinds", default=())


@contextlib.contextmanager
def capturing(kinds: tuple[type, ...]) -> Generator[None]:
    """Say that some kinds of Variables are captured, for Modules that are made meanwhile."""
    token = _OPEN.set((*_OPEN.get(), kinds))
    try:
        yield
    finally:
        _OPEN.reset(token)


def set_records(module: Any, records: Records) -> None:
    """Give an object its Records."""
    if isinstance(module, Module):
        setattr(module, ATTRIBUTE, records)
    else:  # whatever the class says about setting attributes
        object.__setattr__(module, ATTRIBUTE, records)


def _recording(module: Any, kind: type) -> Records | None:
    records = records_of(module)
    if records is None and any(issubclass(kind, kinds) for kinds in _OPEN.get()):
        _check_made_here(module)
        for kinds in _OPEN.get():
            records = Records(kinds, records, given=False)
        if records is not None:
            set_records(module, records)
    elif records is not None and not owns(object.__getattribute__(records, "_ab_token")):
        raise CapturedWriteError(_none_of_the_arguments(module))
    while records is not None and not issubclass(kind, records.kinds):
        records = records.outer
    return records


def _check_made_here(module: Any) -> None:
    """Raise if a Module is neither an argument of a capture nor made inside of it."""
    if isinstance(module, Module) and not owns(object.__getattribute__(module, "_ab_token")):
        raise CapturedWriteError(_none_of_the_arguments(module))


def _none_of_the_arguments(module: Any) -> str:
    return (
        f"a value is recorded on a {type(module).__name__} that was made outside of the function "
        "that runs now, and that is none of its arguments: pass it as an argument"
    )


def _check(module: Any, name: Any, action: str) -> None:
    if not isinstance(name, str) or "/" in name:
        raise ArgumentError(f"{action}: the name is a string without '/', not {name!r}")
    if not hasattr(module, "__dict__"):
        raise ArgumentError(
            f"{action}: values are recorded on Modules and other objects with attributes, not on a "
            f"{type(module).__name__}"
        )


@boundary("sow")
def sow(module: Any, name: str, value: Any, *, kind: type[Variable] = Intermediate) -> None:
    """Record a value under a name, if somebody captures values of this kind; see `capture`.

    A name can be used again: each value is recorded.

    Arguments:
        module: the Module that the value belongs to.
        name: of the value.
        value: an array, or a pytree of arrays.
        kind: the kind of Variable that it is recorded as.

    Raises:
        TypeError: values cannot be recorded on this object.
        ValueError: the name is no string, or contains a slash.

    >>> import anabranch as ab
    >>> class Double(ab.Module):
    ...     def __call__(self, x):
    ...         ab.sow(self, "input", x)
    ...         return 2 * x
    >>> model = Double()
    >>> model(3)
    6
    >>> out, state = ab.capture(model)(3)
    >>> state.flat()
    {('input', 0): 3}
    """
    _check(module, name, "sow")
    records = _recording(module, kind)
    if records is not None:
        count = sum(key.startswith(f"{name}/") for key in attributes_of(records))
        value = value.value if isinstance(value, Variable) else value
        setattr(records, f"{name}/{count}", kind(value))


@boundary("perturb")
def perturb(module: Any, name: str, value: T, *, kind: type[Variable] = Perturbation) -> T:
    """Add a perturbation to a value, to take gradients with respect to it; see `capture`.

    Capturing the kind `Perturbation` makes the perturbations, which are zero. Where they are given
    back (`capture(f, init=...)`), they are added. Otherwise the value is returned as it is. A
    name that is used again has one perturbation, so that its gradients are summed.

    Arguments:
        module: the Module that the value belongs to.
        name: of the value.
        value: an array.
        kind: the kind of Variable of the perturbation.

    Returns:
        The value, perturbed.

    Raises:
        StructureError: the perturbation that was given has another shape.
        TypeError: values cannot be recorded on this object.
        ValueError: the name is no string, or contains a slash.

    >>> import anabranch as ab
    >>> class Square(ab.Module):
    ...     def __call__(self, x):
    ...         return ab.perturb(self, "input", x) ** 2
    >>> square = Square()
    >>> _, zeros = ab.capture(square, ab.Perturbation)(3.0)
    >>> grads = ab.grad(lambda p: ab.capture(square, init=p)(3.0)[0])(zeros)
    >>> float(grads["input"])
    6.0
    """
    _check(module, name, "perturb")
    records = _recording(module, kind)
    if records is None:
        return value
    array: Any = value.value if isinstance(value, Variable) else value
    known = attributes_of(records).get(f"{name}/")
    if known is None:
        if not records.given:
            setattr(records, f"{name}/", kind(jnp.zeros_like(array)))
        return value
    if np.shape(array) != np.shape(known.value):
        raise StructureError(
            f"perturb: the value {name!r} has the shape {np.shape(array)}, but its perturbation "
            f"{np.shape(known.value)}; perturbations are made by `capture(f, Perturbation)` for "
            "the same call"
        )
    return array + known.value
