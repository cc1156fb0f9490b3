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
from anabranch.graph import _kinds
from anabranch.graph._classify import rule_of, value_of
from anabranch.graph._counterparts import is_kind
from anabranch.graph._kind import Kind
from anabranch.graph._module import Module, attributes_of
from anabranch.graph._tokens import owns
from anabranch.graph._variable import Intermediate, Perturbation

T = TypeVar("T")


class Records(Module):
    """What is recorded on one object.

    The keys are `name/0`, `name/1`, ... for what was sown, `name/` for a perturbation, and `name/=`
    for a value that each `sow` replaces, as those of flax can.

    Attributes:
        kinds: the kinds of Variables that are recorded.
        given: whether perturbations were given, so that none are made.
        outer: what a capture around has put in the same place.
    """

    ATTRIBUTE = "_ab_records"
    """The attribute of the object under which its Records are."""

    def __init__(self, kinds: tuple[type, ...], outer: Any, *, given: bool) -> None:
        self.kinds, self.outer, self.given = kinds, outer, given

    def records(self, kind: type) -> bool:
        """Tell whether Variables of a kind are recorded."""
        return collects(self.kinds, kind)

    def recorded(self) -> list[tuple[str, Any]]:
        """Return what was recorded, by key."""
        return [(key, v) for key, v in attributes_of(self).items() if "/" in key]

    def record(self, name: str, kind: Any, value: Any) -> None:
        """Record a value, beside those that were recorded under the name before."""
        count = sum(key.startswith(f"{name}/") for key, _ in self.recorded())
        setattr(self, f"{name}/{count}", kind(value))


def collects(kinds: tuple[type, ...], kind: type) -> bool:
    """Tell whether somebody who asks for some kinds gets Variables of a kind."""
    if is_kind(kind, Perturbation):  # flax has them below Intermediate; who asks for that adds none
        kinds = tuple(
            [k for k in kinds if is_kind(k, Perturbation) or not is_kind(k, Intermediate)]
        )
    return any(is_kind(kind, asked) for asked in kinds)


RECORDERS: dict[Any, type[Records]] = {_kinds.MODULE: Records, _kinds.OBJECT: Records}
"""The kinds of objects on which values can be recorded."""


def _name_records(text: str) -> str:
    for recorder in RECORDERS.values():
        text = text.replace(f".{recorder.ATTRIBUTE}", " (its recorded values)")
    return text


rewriters.append(_name_records)


def recorder_of(module: Any) -> type[Records] | None:
    """Return the class of the Records of an object, None if values cannot be recorded on it."""
    recorder = RECORDERS.get(rule_of(module))
    return None if recorder is None or not hasattr(module, "__dict__") else recorder


def held_for(module: Any) -> Any:
    """Return what is in the place of the Records of an object, None if nobody captures."""
    recorder = recorder_of(module)
    if recorder is None:
        return None
    attributes: Any = attributes_of(module) if isinstance(module, Module) else vars(module)
    return attributes.get(recorder.ATTRIBUTE)


def records_of(module: Any) -> Records | None:
    """Return the Records of an object, None if nobody captures."""
    held = held_for(module)
    return held if isinstance(held, Records) else None


_OPEN: ContextVar[tuple[tuple[type, ...], ...]] = ContextVar("captured kinds", default=())


@contextlib.contextmanager
def capturing(kinds: tuple[type, ...]) -> Generator[None]:
    """Say that some kinds of Variables are captured, for Modules that are made meanwhile."""
    token = _OPEN.set((*_OPEN.get(), kinds))
    try:
        yield
    finally:
        _OPEN.reset(token)


def set_records(module: Any, records: Any) -> None:
    """Give an object its Records; None takes them away."""
    recorder = recorder_of(module)
    assert recorder is not None
    ours = isinstance(module, Module)  # for others, whatever the class says about attributes
    if records is not None:
        (setattr if ours else object.__setattr__)(module, recorder.ATTRIBUTE, records)
    elif held_for(module) is not None:
        (delattr if ours else object.__delattr__)(module, recorder.ATTRIBUTE)


def _recording(module: Any, recorder: type[Records], kind: type) -> Records | None:
    records = held_for(module)
    if records is None and any(collects(kinds, kind) for kinds in _OPEN.get()):
        _check_made_here(module)
        for kinds in _OPEN.get():
            records = recorder(kinds, records, given=False)
        set_records(module, records)
    elif isinstance(records, Records) and not owns(object.__getattribute__(records, "_ab_token")):
        raise CapturedWriteError(_none_of_the_arguments(module))
    while isinstance(records, Records) and not records.records(kind):
        records = records.outer
    return records if isinstance(records, Records) else None


def _check_made_here(module: Any) -> None:
    """Raise if a Module is neither an argument of a capture nor made inside of it."""
    rule = rule_of(module)
    if isinstance(rule, Kind) and not rule.is_owned(module):
        raise CapturedWriteError(_none_of_the_arguments(module))


def _none_of_the_arguments(module: Any) -> str:
    return (
        f"a value is recorded on a {type(module).__name__} that was made outside of the function "
        "that runs now, and that is none of its arguments: pass it as an argument"
    )


def _check(module: Any, name: Any, action: str) -> type[Records]:
    check_name(name, action)
    recorder = recorder_of(module)
    if recorder is None:
        raise ArgumentError(
            f"{action}: values are recorded on Modules and other objects with attributes, not on a "
            f"{type(module).__name__}"
        )
    return recorder


def check_name(name: Any, action: str) -> None:
    """Raise `ArgumentError` if values cannot be recorded under a name."""
    if not isinstance(name, str) or "/" in name:
        raise ArgumentError(f"{action}: the name is a string without '/', not {name!r}")


@boundary("sow")
def sow(module: Any, name: str, value: Any, *, kind: type = Intermediate) -> None:
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
    records = _recording(module, _check(module, name, "sow"), kind)
    if records is not None:
        records.record(name, kind, value_of(value))


@boundary("perturb")
def perturb(module: Any, name: str, value: T, *, kind: type = Perturbation) -> T:
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
    records = _recording(module, _check(module, name, "perturb"), kind)
    if records is None:
        return value
    array: Any = value_of(value)
    known = attributes_of(records).get(f"{name}/")
    if known is None:
        if not records.given:
            setattr(records, f"{name}/", kind(jnp.zeros_like(array)))
        return value
    perturbation = value_of(known)
    if np.shape(array) != np.shape(perturbation):
        raise StructureError(
            f"perturb: the value {name!r} has the shape {np.shape(array)}, but its perturbation "
            f"{np.shape(perturbation)}; perturbations are made by `capture(f, Perturbation)` for "
            "the same call"
        )
    return array + perturbation
