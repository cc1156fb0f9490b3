"""Give the result of a transform the name, the signature and the doc of the function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def wrap(call: F, function: Callable[..., Any]) -> F:
    """Return a function that looks like another one; it is a method in a class body.

    Attributes of the function (of a callable Module, say) are not taken over.
    """
    functools.update_wrapper(call, function, updated=())
    return call


def name_inside(run: F, function: Callable[..., Any]) -> F:
    """Let JAX's messages name the user's function and line, not the function that it is given."""
    signature = inspect.signature(run)
    run = wrap(run, function)
    run.__signature__ = signature  # type: ignore[attr-defined]  # jit looks at the parameters
    return run
