"""A known number of steps, run by `jax.lax.scan`: what `scan` and `fori_loop` share.

JAX keeps the trace of a step by the identity of its function, so all runs that are kept for a call
have one step. What differs from run to run, and is needed only while the step is traced, it finds
in a stack of its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from anabranch.transforms._loop import Loop, Stepped
from anabranch.transforms._prologue import FirstStep


class _Run(NamedTuple):
    fixed: dict[int, Any]
    first: FirstStep


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Run] = []


_RUNS = _Runs()


class Scanned:
    """Runs a call step by step. It keeps no array and no object of the caller.

    Arguments:
        loop: the call.
        call: see `run_inside`.
        length: the number of steps.
        counter: the leaf that counts the steps, if there is one.
        options: of `jax.lax.scan`.
    """

    def __init__(
        self,
        loop: Loop,
        call: Callable[[Any], Any],
        length: int,
        counter: int | None = None,
        **options: Any,
    ) -> None:
        self._loop, self._call, self._length, self._counter = loop, call, length, counter
        self._options = options
        self._step = self._new_step()

    def run(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the report and the outputs, or a prologue and its values.

        Arguments:
            leaves: of the call.
        """
        loop, counter = self._loop, self._counter
        fixed = loop.fixed(leaves)
        start = None if counter is None else fixed.pop(counter)
        state = (start, loop.carry_in(leaves))
        step = self._new_step() if fixed else self._step  # their trace would hold the Refs
        while True:
            first = FirstStep(self._length)
            (_, carried), (done, marks, stacked, is_added) = self._scan(
                step, _Run(fixed, first), state, loop.slices(leaves)
            )
            if is_added is None:
                return done, loop.outputs(carried, marks, stacked)
            step = self._step = self._new_step()  # its trace holds values of this run
            if first.prologue is not None:
                return first.prologue, first.prologue.outputs()
            # a trace that another thread has made meanwhile: try again

    def _scan(self, step: Any, run: _Run, state: Any, slices: Any) -> Any:
        stack = _RUNS.stack
        depth = len(stack)
        try:
            stack.append(run)
            return jax.lax.scan(step, state, slices, length=self._length, **self._options)
        finally:
            del stack[depth:]  # no call: an interrupt may come when a function is entered or left

    def _new_step(self) -> Callable[..., Any]:
        loop, call, counter, length = self._loop, self._call, self._counter, self._length

        def step(state: tuple[Any, list[Any]], slices: list[Any]) -> Any:
            (i, carried), (fixed, first) = state, _RUNS.stack[-1]
            if counter is not None:
                fixed = {**fixed, counter: i}
            done: Stepped = loop.step(call, carried, slices, fixed, steps=length > 0, first=first)
            is_added = None if first.prologue is None else ()  # static: there is no leaf in it
            after = None if counter is None else i + 1
            return (after, done.carried), (done.report, done.marks, done.stacked, is_added)

        return loop.named(step, counter)
