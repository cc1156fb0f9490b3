"""Room for the frames of a trace.

CPython keeps the frames of a thread in chunks of 16 KiB or more, and gives a chunk back as soon as
its first frame is left. Where the end of a chunk falls among the frames of a function that is
called again and again, every call maps and unmaps memory, which takes longer than the call. JAX's
traces are 60 to 100 frames deep, nested ones more, so that an end falls among them somewhere, and a
frame more or less decides where: the same trace takes up to 1.5 times as long.

A frame that needs more than half of a large chunk always gets one of its own, and leaves the rest
to the frames below it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = 8300
"""Of 8 bytes. With the 1,000 that CPython (3.11 to 3.13) adds, a chunk has 16,384: some 250 frames
are left."""


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function begin a chunk of its own for the frames below it; a call takes 10 us more."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_stacksize=_WORDS)
    return function
