"""Whose turn it is to write: a lock that costs next to nothing as long as nobody waits for it.

A lock of `threading` takes a tenth of the smallest compiled call. This one is a list with one
element: the thread that removes it has its turn, and puts it back in the end. Whoever finds the
list empty looks again, a little later. A thread that has its turn may take it once more, since a
finaliser of the user may run at any time, and write.

What writes is a function that `in_turn` wraps; the followers of plans have the same lines in place.
Python looks for signals where a function is entered and when one of C has returned: not between the
removal and the `try`, and not before the element is back. Finalisers of the user, too, run there,
or where something is made, and would wait for ever if the list is empty and nobody is its holder.

There, too, and nowhere else, another thread may come in. So one line takes no turn if it looks
whether it is nobody's, compares, writes, and calls nothing but one function of C at its end, if
Python `HAS_LOCK`. What the call takes is made before, since the collector may run where something
is made.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two looks

HAS_LOCK = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether threads take turns between the instructions of CPython."""

FREE: list[None] = [None]
"""Empty while it is somebody's turn."""


class _Holder:
    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread: int | None = None


HOLDER = _Holder()
"""Whose turn it is, if that is known already."""


class _Commits:
    """How many commits of any thread have begun, and how many have ended: the same, or one runs.

    The two are one object then, so that `is` tells. A commit is made in turn, and ends with the
    turn: a finaliser may make another one meanwhile, and an interrupt come anywhere.
    """

    __slots__ = ("begun", "ended")

    def __init__(self) -> None:
        self.begun = self.ended = 0


COMMITS = _Commits()


def wait(me: int) -> bool:
    """Wait for the turn of this thread; return False if it is its turn already."""
    if HOLDER.thread == me:
        return False
    pause = _SHORTEST
    while True:
        try:
            del FREE[0]
        except IndexError:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        else:
            HOLDER.thread = me
            return True


def in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run when it is the turn of its thread."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        me = get_ident()
        try:
            del FREE[0]
        except IndexError:
            mine = wait(me)
        else:
            HOLDER.thread = me
            mine = True
        try:
            return function(*args, **kwargs)
        finally:
            if mine:
                COMMITS.ended = COMMITS.begun
                HOLDER.thread = None
                FREE.append(None)

    return call
