"""Arithmetic of Variables: every operator acts on the value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

A = TypeVar("A", bound="Arithmetic")


class Arithmetic:
    """The operators of what has a value; they are added below."""

    __slots__ = ()

    value: Any
    __hash__ = object.__hash__

    if TYPE_CHECKING:  # `==` is elementwise

        def __eq__(self, other: object, /) -> Any: ...
        def __ne__(self, other: object, /) -> Any: ...
        def _operator(self, other: Any, /) -> Any: ...
        def _iop(self: A, other: Any, /) -> A: ...
        def _unary(self) -> Any: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __matmul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rpow__ = __rmatmul__ = __rand__ = __ror__ = __rxor__ = __rlshift__ = _operator
        __rrshift__ = __divmod__ = __rdivmod__ = __lt__ = __le__ = __gt__ = __ge__ = _operator
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _iop
        __ipow__ = __imatmul__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _iop
        __neg__ = __pos__ = __abs__ = __invert__ = _unary


def raw(operand: Any) -> Any:
    """Return the value of an operand, or of those in an index such as `v[i, 1:]`."""
    if isinstance(operand, Arithmetic):
        return operand.value
    if isinstance(operand, tuple):
        return tuple([raw(x) for x in operand])
    return operand


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Arithmetic, Any], Any]:
    def method(self: Arithmetic, other: Any) -> Any:
        return function(self.value, raw(other))

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Arithmetic, Any], Any]:
    def method(self: Arithmetic, other: Any) -> Any:
        return function(raw(other), self.value)

    return method


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[Arithmetic, Any], Arithmetic]:
    def method(self: Arithmetic, other: Any) -> Arithmetic:
        self.value = function(self.value, raw(other))
        return self

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Arithmetic], Any]:
    def method(self: Arithmetic) -> Any:
        return function(self.value)

    return method


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
for _name, _function in _ARITHMETIC.items():
    setattr(Arithmetic, f"__{_name}__", _binary(_function))
    setattr(Arithmetic, f"__r{_name}__", _reflected(_function))
    setattr(Arithmetic, f"__i{_name}__", _in_place(_function))
setattr(Arithmetic, "__divmod__", _binary(divmod))
setattr(Arithmetic, "__rdivmod__", _reflected(divmod))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Arithmetic, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Arithmetic, f"__{_name}__", _unary(getattr(operator, _name)))
