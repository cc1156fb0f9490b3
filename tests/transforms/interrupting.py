"""Interrupts at chosen places of our own code.

Python looks for signals when a function is entered, and when one of C has returned. `Interrupting`
raises there, in code of the package and in what it writes.
"""

from __future__ import annotations

import dis
import functools
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anabranch as ab
from anabranch.transforms._follower import FILE

OURS = (str(Path(ab.__file__).parent) + os.sep, FILE)


class Interrupting:
    """Raise `KeyboardInterrupt` at one of the places where Python looks for signals.

    Arguments:
        number: of the place, counted from zero.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.raised = False

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: types.FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OURS):
            if self.left == 0:
                sys.setprofile(None)
                self.raised = True
                raise KeyboardInterrupt
            self.left -= 1


class InterruptingAtLines(Interrupting):
    """Raise it before a line of a follower that writes: slots in C leave no trace in a profile."""

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        if event == "line" and frame.f_lineno in _writing_lines(frame.f_code):
            if self.left == 0:
                sys.settrace(None)
                self.raised = True
                raise KeyboardInterrupt
            self.left -= 1
        return self._trace


@functools.cache
def _writing_lines(code: types.CodeType) -> frozenset[int]:
    starts = dict(dis.findlinestarts(code))
    lines: set[int] = set()
    line = 0
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if instruction.opname in ("STORE_SUBSCR", "STORE_SLICE") or (
            instruction.argval in ("values", "writing", "set_value")
        ):
            lines.add(line)
    return frozenset(lines)


def interrupted_by_a_signal(call: Callable[[], Any], seconds: float) -> bool:
    """Make a call, and let a real signal interrupt it after a time; tell whether it came."""
    armed = [True]

    def interrupt(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False
