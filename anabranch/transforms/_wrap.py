"""Give the result of a transform the name, the signature and the doc of the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def wrap(call: F, function: Callable[..., Any]) -> F:
    """Return a function that looks like another one; it is a method in a class body.

    Attributes of the function (of a callable Module, say) are not taken over.
    """
    functools.update_wrapper(call, function, updated=())
    return call
