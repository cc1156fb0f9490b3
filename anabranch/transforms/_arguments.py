"""Specifications for arguments, given by position or by name.

JAX matches `in_axes` with what was passed by position, and treats keyword arguments alike. Here a
specification belongs to a parameter, however it was passed, and may be given by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from anabranch.errors import StructureError, bounded
from anabranch.transforms._specs import is_container


class Signature(NamedTuple):
    """What is to be known of the parameters of a function."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    rest: str | None  # the name of `*args`
    more: str | None  # the name of `**kwargs`

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        tail = [name for name in (self.rest, self.more) if name is not None]
        return (*self.positional, *self.keyword_only, *tail)


def signature_of(function: Any) -> Signature | None:
    """Return the signature of a function, None if Python does not know it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    by_kind: dict[Any, list[str]] = {}
    for p in parameters:
        by_kind.setdefault(p.kind, []).append(p.name)
    kinds = inspect.Parameter
    return Signature(
        (
            *by_kind.get(kinds.POSITIONAL_ONLY, ()),
            *by_kind.get(kinds.POSITIONAL_OR_KEYWORD, ()),
        ),
        tuple(by_kind.get(kinds.KEYWORD_ONLY, ())),
        next(iter(by_kind.get(kinds.VAR_POSITIONAL, ())), None),
        next(iter(by_kind.get(kinds.VAR_KEYWORD, ())), None),
    )


class _Required:
    def __repr__(self) -> str:
        return "<no default>"


REQUIRED = _Required()


class ArgumentSpecs:
    """A specification for each argument of a function.

    Arguments:
        function: the function.
        spec: one for all arguments; or one for each, a tuple or list by position or a dict by
            name. `*args` and `**kwargs` are given under their own names.
        option: the name of the option that it was given for.
        default: for arguments that it does not mention, and for keyword arguments if it is one
            for all; `REQUIRED` if every argument has to be mentioned.
    """

    __slots__ = ("_default", "_function", "_option", "_signature", "spec")

    def __init__(self, function: Any, spec: Any, option: str, default: Any) -> None:
        self.spec = spec
        self._function, self._option, self._default = function, option, default
        self._signature: Signature | None = None

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the specifications of positional and of keyword arguments.

        Raises:
            StructureError: there is no parameter of some name, or an argument has to be mentioned
                and is not.
        """
        spec = self.spec
        if not is_container(spec):
            required = self._default is REQUIRED
            return spec, (spec if required else dict.fromkeys(kwargs, self._default))
        if not kwargs and not isinstance(spec, dict) and len(spec) <= len(args):
            return tuple(spec), {}  # a signature takes long to find
        if self._signature is None:
            self._signature = signature_of(self._function) or Signature((), (), "args", "kwargs")
        names = self._signature
        if isinstance(spec, dict):
            by_name = cast("dict[Any, Any]", spec)
            self._check_names(by_name, names)
            positional = [
                self._of(by_name, names.positional[i], f"argument {i}")
                if i < len(names.positional)
                else self._of(by_name, names.rest, f"argument {i}")
                for i in range(len(args))
            ]
        else:
            sequence = tuple(spec)
            by_name = dict(zip(names.positional, sequence, strict=False))
            positional = sequence[: len(args)]
            if len(sequence) > max(len(args), len(names.positional)):
                positional = sequence  # too many: this is reported when they are matched
        keyword = {
            name: self._of(by_name, name if name in by_name else names.more, f"argument {name!r}")
            for name in kwargs
        }
        return tuple(positional), keyword

    def _of(self, by_name: Mapping[Any, Any], name: str | None, what: str) -> Any:
        found = by_name.get(name, self._default)
        if found is REQUIRED:
            shown = what if name is None or repr(name) in what else f"{what} ({name})"
            raise StructureError(
                f"{self._option} has no entry for {shown}: give one by position or by name, or "
                "one specification for all arguments"
            )
        return found

    def _check_names(self, by_name: Mapping[Any, Any], names: Signature) -> None:
        known = names.names
        unknown = [name for name in by_name if name not in known]
        if names.more is not None:
            unknown = [name for name in unknown if not isinstance(name, str)]
        if unknown:
            called = getattr(self._function, "__qualname__", type(self._function).__name__)
            raise StructureError(
                bounded(
                    f"{self._option} names the argument {unknown[0]!r}, which {called} does not "
                    f"have; its parameters are {list(known)}. (A dict at the top of {self._option} "
                    "goes by argument name; put it in a tuple if it is meant for a dict)"
                )
            )
