"""Let calls fail at one point, and look whether anything is left of the attempt.

A **point** is a primitive of JAX that is bound, a read or a write of a Variable, a change of an
attribute, or the filling of an object, a twin or one of the caller, while a transformed call runs.
`Failing` makes the call again and again, at the first point, at the second, and so on, until a call
gets to its end; that one is the call of the program. After each attempt every object must hold what
it held, and nothing of ours may be open.

A call may also fail later: while the program is compiled, or while it runs. For this, `weakened`
puts a **weak point** into every function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import random
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

import anabranch as ab
from anabranch import _jax
from anabranch.contextvars_ext import _stack
from anabranch.graph import _scope, _tokens
from anabranch.graph._kind import Kind
from anabranch.graph._turn import FREE, HOLDER
from anabranch.transforms import _captured as _captured_values
from anabranch.transforms import _lifting
from tests.property.contents import Snapshot, reachable
from tests.property.objects import ATTRIBUTE_NODES, VOCABULARY
from tests.property.scenario import Function, Scenario
from tests.property.worlds import Transform

KINDS = "primitive", "read", "write", "change of an attribute", "filling of an object"
PRIMITIVE, READ, WRITE, ATTRIBUTE, FILLING = KINDS
STAGES = ("compile", "run")


class Fault(Exception):
    """The injected failure."""


class Interrupt(KeyboardInterrupt):
    """The injected failure that is no `Exception`."""


class LeftBehindError(AssertionError):
    """An attempt that failed has left something behind."""


class Attempt(Protocol):
    """A context in which a call fails."""

    name: str
    raised: BaseException | None

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def is_it(self, error: BaseException) -> bool:
        """Tell whether an error is the one that was raised."""
        ...


class AtPoint:
    """Raise at a point.

    Arguments:
        number: of the point, counted from zero.
        error: what is raised.
        after: raise when the thing has been done, not before.
        kind: count points of one kind only.
    """

    def __init__(
        self,
        number: int,
        error: type[BaseException] = Fault,
        after: bool = False,
        kind: str = "",
    ) -> None:
        self._number, self._error, self._after, self._kind = number, error, after, kind
        self._count = 0
        self._saved: list[tuple[Any, str, Any]] = []
        self.raised: BaseException | None = None
        self.name = ""

    def __enter__(self) -> None:
        for owner, name, new in self._patches():
            self._saved.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, new)

    def __exit__(self, *_: object) -> None:
        for owner, name, old in reversed(self._saved):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def is_it(self, error: BaseException) -> bool:
        return error is self.raised

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        primitive: Any = jax.extend.core.Primitive
        yield primitive, "bind", self._around(primitive.bind, PRIMITIVE)
        variable: Any = ab.Variable
        value = variable.value
        read, write = self._around(value.fget, READ), self._around(value.fset, WRITE)
        yield variable, "value", property(read, write)
        yield variable, "__getitem__", self._around(variable.__getitem__, READ)
        for name in ("__setitem__", "set_metadata"):
            yield variable, name, self._around(getattr(variable, name), WRITE)
        for cls in (ab.Module, *[c for c in ATTRIBUTE_NODES if not issubclass(c, ab.Module)]):
            for name in ("__setattr__", "__delattr__"):
                yield cls, name, self._around(getattr(cls, name), ATTRIBUTE)
        for cls in _subclasses(Kind):
            if "fill" in vars(cls):
                yield cls, "fill", self._around(cls.fill, FILLING)

    def _around(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            here = self._count == self._number and self._kind in ("", kind)
            self._count += self._kind in ("", kind)
            if not here:
                return function(*args, **kwargs)
            self.name = f"{self._error.__name__} at a {kind}"
            self.raised = self._error(f"at point {self._number}, {function.__qualname__}")
            if self._after:
                with contextlib.suppress(Exception):
                    function(*args, **kwargs)
            raise self.raised

        return run


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    for below in cls.__subclasses__():
        yield from _subclasses(below)


class AtStage:
    """Raise at the weak point, while the program is compiled or while it runs."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.name = f"Fault when it came to {stage}"
        self.raised: BaseException | None = None

    def __enter__(self) -> None:
        WEAK_POINT.fails = self
        logging.disable(logging.ERROR)  # JAX logs what a callback raises

    def __exit__(self, *_: object) -> None:
        WEAK_POINT.fails = None
        logging.disable(logging.NOTSET)

    def is_it(self, error: BaseException) -> bool:
        # at run time XLA catches it, and JAX raises an error of its own with the text of it
        return error is self.raised or str(self.raised) in str(error)

    def reach(self, stage: str) -> None:
        if stage == self._stage and self.raised is None:
            self.raised = Fault(f"at the weak point, when it came to {stage}")
            raise self.raised


class _WeakPoint:
    """What a program calls where it may fail late."""

    def __init__(self) -> None:
        self.fails: AtStage | None = None
        self._primitive: Any = jax.extend.core.Primitive("weak_point")
        self._primitive.def_abstract_eval(lambda: jax.core.ShapedArray((), np.float32))
        self._primitive.def_impl(self._compile)
        lower = mlir.lower_fun(self._compile, multiple_results=False)
        mlir.register_lowering(self._primitive, lower, cacheable=False)

    def __call__(self) -> None:
        # what the callback takes, JAX does not drop
        jax.debug.callback(self._run, self._primitive.bind())

    def _compile(self) -> jax.Array:
        if self.fails is not None:
            self.fails.reach("compile")
        return jnp.zeros((), np.float32)

    def _run(self, _: object) -> None:
        if self.fails is not None:
            self.fails.reach("run")


WEAK_POINT = _WeakPoint()
VOCABULARY["weak_point"] = WEAK_POINT


def weakened(scenario: Scenario) -> Scenario:
    """Put a weak point into every function."""
    choose = random.Random(f"weak point {scenario.seed}")

    def weaken(function: Function) -> Function:
        at = choose.randint(0, len(function.lines))
        lines = (*function.lines[:at], "weak_point()", *function.lines[at:])
        return dataclasses.replace(function, lines=lines)

    return dataclasses.replace(scenario, functions=tuple(map(weaken, scenario.functions)))


def left_open() -> list[str]:
    """Name what is open in this thread, or process, although no call of ours runs."""
    state = {
        "scopes of any thread": _scope.OPEN,
        "scopes": _scope._SCOPES.stack,
        "levels of any thread": _tokens.OPEN_LEVELS,
        "levels": _tokens._LEVELS.stack,
        "attempts": _lifting._ATTEMPTS.stack,
        "watchers": _captured_values._WATCHERS.stack,
        "contexts": list(_stack._innermost.get()),
        "traces": [] if _jax.is_root(_jax.current_trace()) else [_jax.current_trace()],
    }
    found = [f"{name}: {held}" for name, held in state.items() if held]
    if FREE != [None] or HOLDER.thread is not None:
        found.append("the turn to write")
    return found


def _captured(function: Any) -> list[Any]:
    """List what a function of a program reaches without being passed it."""
    held: list[Any] = []
    while not isinstance(function, types.FunctionType):
        held.append(function)
        function = function.func if isinstance(function, functools.partial) else function.__func__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = (function.__kwdefaults__ or {}).values()
    return [*held, *cells, *defaults, *function.__globals__.values()]


Attempts = Callable[[random.Random], Iterator[Attempt]]


def every_point(choose: random.Random) -> Iterator[Attempt]:
    """Yield an attempt for each point."""
    for number in itertools.count():
        yield _at_point(choose, number)


def late(_: random.Random) -> Iterator[Attempt]:
    """Yield the attempts that fail late; what is traced is kept, so that no others may follow."""
    yield from map(AtStage, STAGES)


def some_points(count: int) -> Attempts:
    """Return attempts for some of the first points, which most calls have."""

    def attempts(choose: random.Random) -> Iterator[Attempt]:
        for _ in range(count):
            kind = choose.choice(["", *KINDS])  # most points are fillings
            yield _at_point(choose, int(choose.expovariate(1 / 4)), kind)

    return attempts


def _at_point(choose: random.Random, number: int, kind: str = "") -> AtPoint:
    return AtPoint(number, choose.choice([Fault, Interrupt]), choose.random() < 0.5, kind)


class Failing:
    """A transform whose calls fail, and then succeed; `counts` tells how often and where.

    Arguments:
        transform: the transform that is tested.
        attempts: how a call fails; the first attempt that does not is the call of the program.
        seed: of the choices.
    """

    def __init__(self, transform: Transform, attempts: Attempts, seed: int = 0) -> None:
        self._transform, self._attempts = transform, attempts
        self._random = random.Random(f"faults {seed}")
        self.counts: Counter[str] = Counter()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        transformed = self._transform(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts["calls"] += 1
            before = Snapshot(reachable([args, *kwargs.values(), *_captured(function)]))
            for attempt in self._attempts(self._random):
                try:
                    with attempt:
                        result = transformed(*args, **kwargs)
                except BaseException as error:
                    if attempt.raised is None:
                        raise
                    self._check(attempt, error, before)
                else:
                    if attempt.raised is not None:
                        raise LeftBehindError(f"{attempt.raised!r} was swallowed")
                    return result
            return transformed(*args, **kwargs)

        return call

    def _check(self, attempt: Attempt, error: BaseException, before: Snapshot) -> None:
        self.counts[attempt.name] += 1
        found = [*before.changes(), *left_open()]
        if not attempt.is_it(error):
            found.append(f"{error!r} was raised instead")
        if found:
            raise LeftBehindError("\n".join([f"after {attempt.raised!r}", *found])) from error
