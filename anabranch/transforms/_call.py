"""A call, as one object that can be split: the function, its arguments, its keyword arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anabranch._jax import is_tracer
from anabranch.errors import ArgumentError, DeletedArrayError, StaticValueError, StructureError
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._containers import captured_constants, take_for_nodes
from anabranch.graph._flatten import Flat, flatten
from anabranch.graph._function import FUNCTION
from anabranch.graph._leaf_info import call_text
from anabranch.transforms._lifting import renew_found_stamp, split_for_attempt, with_found


class Call(NamedTuple):
    """What is called. Nodes that the function itself holds (a bound `self`) are split too."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def parts(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return the function and its arguments, static ones unwrapped."""
        args = [a.value if type(a) is StaticArgument else a for a in self.args]
        kwargs = {k: a.value if type(a) is StaticArgument else a for k, a in self.kwargs.items()}
        return self.function, args, kwargs

    def run(self) -> Any:
        """Call the function."""
        function, args, kwargs = self.parts()
        return function(*args, **kwargs)


_classify.declare(Call, _kinds.TUPLE)  # JAX could open it, too, and takes longer


class StaticArgument:
    """An argument that is static whatever it is; compared by type and value."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any, name: str) -> None:
        try:
            self._key = _static.encode(value)
        except StaticValueError as error:
            raise StaticValueError(f"static argument {name}: {error}") from None
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticArgument) and other._key == self._key


def flatten_call(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    functions: Sequence[Any] | None = None,
) -> Flat:
    """Split a call; Python numbers in the arguments are leaves.

    Arguments:
        function: what is called.
        args: its arguments.
        kwargs: its keyword arguments.
        functions: the functions of the user, if `function` only stands for them.
    """
    if functions is None:
        functions = (function,)
        function = method_of(function)
    function = with_found(function, functions)
    call = Call(function, tuple(args), dict(kwargs))
    flat = flatten(call, numbers=True)
    constants = captured_constants(functions)
    if constants and take_for_nodes(constants, flat.objects):
        renew_found_stamp()
        flat = flatten(call, numbers=True)
    return split_for_attempt(flat)


def method_of(function: Any) -> Any:
    """Return the method that a callable object is called by, if that reaches further objects."""
    if _classify.is_object(function) and callable(function):
        method = type(function).__call__
        if _classify.rule_of(method) is FUNCTION:
            return types.MethodType(method, function)
    return function


def check_functions(transform: str, /, **functions: Any) -> None:
    """Raise for the first of some arguments, by name, that cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise ArgumentError(
                f"{transform}: {name} is of type {type(function).__name__}, which cannot be "
                "called; give a function, a method or an object with `__call__`"
            )


def positions(function: Callable[..., Any]) -> dict[str, int]:
    """Return the position of each positional parameter of a function, by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: i for i, p in enumerate(parameters) if p.kind in positional}


class Selection:
    """Arguments chosen by number or name, the way of JAX: each implies the other.

    Arguments:
        function: whose signature tells which name is which number.
        nums: positions; negative ones count from the end of the positional arguments.
        names: parameter names.
    """

    __slots__ = ("names", "nums")

    def __init__(
        self,
        function: Callable[..., Any],
        nums: int | Sequence[int] | None,
        names: str | Iterable[str] | None,
    ) -> None:
        self.nums = {int(nums)} if isinstance(nums, (int, np.integer)) else set(nums or ())
        self.names = {names} if isinstance(names, str) else set(names or ())
        if not self:
            return  # a signature takes long to find
        by_name = positions(function)
        by_position = {i: name for name, i in by_name.items()}
        count = len(by_name)
        for num in list(self.nums):
            name = by_position.get(num % count if -count <= num < 0 else num)
            if name is not None:
                self.names.add(name)
        self._check(function, count)
        self.nums |= {by_name[name] for name in self.names if name in by_name}

    def _check(self, function: Callable[..., Any], count: int) -> None:
        """Raise if the function has no such parameters."""
        try:
            kinds = [p.kind for p in inspect.signature(function).parameters.values()]
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return
        unknown: list[Any] = []
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            unknown += [num for num in self.nums if not -count <= num < count]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            unknown += sorted(self.names - names)
        if unknown:
            raise StructureError(
                f"{getattr(function, '__qualname__', function)} has no argument {unknown[0]!r}, "
                f"which was chosen by number or name; its parameters are {sorted(names)}"
            )

    def __bool__(self) -> bool:
        return bool(self.nums or self.names)

    def of_args(self, args: Sequence[Any]) -> list[int]:
        """Return the chosen positions among positional arguments."""
        count = len(args)
        chosen = {num + count if num < 0 else num for num in self.nums}
        return [i for i in range(count) if i in chosen]


def with_static(
    selection: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Wrap the chosen arguments so that they are static."""
    if not selection:
        return args, kwargs
    args = list(args)
    for i in selection.of_args(args):
        args[i] = StaticArgument(args[i], f"args[{i}]")
    wrapped = {
        name: StaticArgument(value, name) if name in selection.names else value
        for name, value in kwargs.items()
    }
    return args, wrapped


def explain_failure(flat: Flat, error: BaseException | None) -> None:
    """Raise an error that says more, if a compiled call has failed for an array that is gone.

    Arguments:
        flat: the call.
        error: what was raised; a call that fails later may have donated arrays itself.

    Raises:
        DeletedArrayError: the array was donated to an earlier call.
    """
    if not isinstance(error, (RuntimeError, ValueError)) or "deleted" not in str(error):
        return
    for info, leaf in zip(flat.graphdef.infos, flat.leaves, strict=True):
        if isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.is_deleted():
            raise DeletedArrayError(
                f"{call_text(info.path)} holds an array ({leaf.dtype}, shape {leaf.shape}) that "
                "was deleted: its buffer was donated to another compiled call; let that call have "
                "a copy (`jnp.copy`, `copy.deepcopy` of the object), or do not donate"
            ) from None
