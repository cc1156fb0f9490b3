"""Make the result of a transform look like the function, and let what the function holds be seen.

A transformed function is a `Transformed`: a value whose child is the function, if that reaches
objects (it is a bound method, a closure, a callable Module), so that the objects are split when it
is transformed once more (`jit(vmap(model.step))`). Otherwise it is static, as a function is.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from anabranch._boundary import leave
from anabranch.graph import _classify, _static
from anabranch.graph._kinds import Kind, Opened
from anabranch.graph._scope import Found
from anabranch.transforms._call import check_functions
from anabranch.transforms._lifting import Attempt, attempts

F = TypeVar("F", bound=Callable[..., Any])


def wrap(call: F, function: Callable[..., Any], remake: Callable[[Any], Any], *, name: str) -> F:
    """Return a function that looks like another one; it is a method in a class body.

    Attributes of the function (of a callable Module, say) are not taken over.

    Arguments:
        call: what it does.
        function: what it looks like.
        remake: from another function to what the transform makes of it; it holds no objects.
        name: of the transform.
    """
    check_functions(name, function=function)
    wrapper: Any = Transformed(call, remake, name)
    functools.update_wrapper(wrapper, function, updated=())
    return wrapper


class Remade:
    """A function that a transform has made; a copy is made anew, of a copy of the function.

    So a copy of an object that holds `jit(self.step)` steps the copy, and neither it nor a pickle
    has what was compiled or planned for the original. What is found under its own name, as a method
    is in its class, stands for itself, as functions do.
    """

    __wrapped__: Any  # the function
    _remake: Callable[[Any], Any]  # from another function to what the transform makes of it

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_found_by_name():
            return vars(self)["__qualname__"]
        return _blank, (type(self),), (self.__wrapped__, self._remake)

    def __setstate__(self, state: tuple[Any, Callable[[Any], Any]]) -> None:
        function, remake = state
        vars(self).update(vars(remake(function)))

    def _is_found_by_name(self) -> bool:
        own = vars(self)
        try:
            place = sys.modules[own["__module__"]]
            return operator.attrgetter(own["__qualname__"])(place) is self
        except (KeyError, AttributeError, TypeError):
            return False


def _blank(cls: Any) -> Any:
    return object.__new__(cls)


class Transformed(Remade):
    """A transformed function."""

    def __init__(self, call: Callable[..., Any], remake: Callable[[Any], Any], name: str) -> None:
        self._call, self._remake, self._name = call, remake, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `boundary` and `lifting` in one frame: JAX records the whole stack for each operation
        attempt = Attempt()
        stack = attempts()
        depth = len(stack)
        try:
            stack.append(attempt)
            while True:
                try:
                    return self._call(*args, **kwargs)
                except (Found, Exception) as error:
                    if not attempt.prepare_again(error):
                        raise
        except Exception as error:
            leave(error, self._name, self.__wrapped__)
            raise
        finally:
            del stack[depth:]  # no call: an interrupt may come when a function is entered or left

    def __get__(self, obj: object, cls: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)


class TransformedKind(Kind):
    """A value that is made of the function; `_remake` makes another one of another function."""

    __slots__ = ()
    identity = False
    numbers = False

    def open(self, obj: Any) -> Opened:
        return _static.encode(obj._remake), ("__wrapped__",), (obj.__wrapped__,)

    def build(self, cls: Any, extra: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        return _static.decode(extra)(values[0])

    def show_key(self, key: Any) -> str:
        return f".{key}"


TRANSFORMED = TransformedKind("transformed function")


def rule_of_transformed(transformed: Any) -> _classify.Rule:
    """Tell whether a split finds objects in a transformed function."""
    holds = isinstance(_classify.rule_of(transformed.__wrapped__), Kind)
    return TRANSFORMED if holds else _classify.STATIC


_classify.declare_look(Transformed, rule_of_transformed)
