"""Keep compiled runners for direct calls, such as `cond(pred, f, g, *operands)`.

`jit(f)` is an object that can own what it has compiled; `cond` is not. So there is one bounded
table here, and nothing in it keeps an object of a caller alive: functions are held weakly, and in
the graphdef of the call a `Target` stands in their places.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax

from anabranch import _jax
from anabranch.graph import _classify
from anabranch.transforms._captured import call_watched, captured
from anabranch.transforms._names import signature_of


class Target:
    """The place of a function, by number, in a graphdef that must not keep it alive."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash((Target, self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and other.number == self.number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only `functools.partial` wants it to be callable."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<function {self.number}>"


_classify.declare(Target, _classify.STATIC)


class Targets:
    """Functions of a direct call.

    Arguments:
        functions: functions, methods, partials, callable objects.
    """

    __slots__ = ("functions", "refs", "shown")

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = functions
        self.refs: list[weakref.ref[Any]] = []
        self.shown = tuple([self._show(function) for function in functions])
        """What stands for each function in the call that is flattened."""

    def _show(self, function: Any) -> Any:
        if type(function) is functools.partial:
            shown = self._show(function.func)
            return functools.partial(shown, *function.args, **function.keywords)
        rule = _classify.rule_of(function)
        if rule is _classify.STATIC and type(function).__weakrefoffset__:
            self.refs.append(weakref.ref(function))
            return Target(len(self.refs) - 1)
        return function

    @staticmethod
    def resolve(shown: Any, refs: Sequence[weakref.ref[Any]]) -> Any:
        """Return the function that stands behind what is shown, or a twin of it."""
        if type(shown) is Target:
            return refs[shown.number]()
        if type(shown) is functools.partial:
            function = Targets.resolve(shown.func, refs)
            return functools.partial(function, *shown.args, **shown.keywords)
        return shown


class Owned:
    """What a transformed function has made, by what it depends on.

    It is made anew when what the user's function captures has changed, or cannot be compared: JAX
    goes by the identity of functions, and would use the old trace.

    Arguments:
        function: of the user.
    """

    def __init__(self, function: Any) -> None:
        self._functions = (function,)
        self._table: dict[Hashable, tuple[list[Any] | None, Callable[..., Any]]] = {}

    def call(self, key: Hashable, make: Callable[[], Callable[..., Any]], *args: Any) -> Any:
        """Call what is kept for a key, made first if need be."""
        before, made = self._table.get(key, (None, None))
        if made is None or before is None or before != captured(self._functions):
            made = make()
        function = made

        def remember() -> None:
            # as the function has left it: it may count its own traces in what it captures
            self._table[key] = (captured(self._functions), function)

        return call_watched(remember, function, *args)


class _Kept:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.captured: list[Any] | None = None
        self.function = function

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The function, compiled."""
        function = self.function

        def run(*args: Any) -> Any:  # JAX goes by the identity of functions
            return function(*args)

        run.__signature__ = signature_of(function)  # for the names in JAX's messages
        return jax.jit(run, inline=True)


class Runners:
    """Compiled functions that are used again as long as what they capture is the same.

    Arguments:
        limit: how many are kept.
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._lock = threading.RLock()  # keys are compared, and finalisers run: they may call
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def call(
        self,
        key: Hashable,
        functions: Sequence[Any],
        make: Callable[[], Callable[..., Any]],
        *args: Any,
        refs: Sequence[weakref.ref[Any]] = (),
        keeps_traces: bool = False,
    ) -> Any:
        """Call a compiled function, and keep it.

        Arguments:
            key: what it depends on.
            functions: the functions of the user that it calls.
            make: returns what is compiled.
            args: arrays.
            refs: functions that it depends on, too, but that it must not keep alive.
            keeps_traces: whether JAX keeps the traces of what it calls. Then it is not compiled
                where all is part of a larger program, as a trace within a trace costs something.
        """
        entry = (key, tuple(refs))
        with self._lock:
            kept = self._kept.get(entry)
            if kept is not None:
                with contextlib.suppress(KeyError):  # one of the functions has just died
                    self._kept.move_to_end(entry)
        if kept is None or kept.captured is None or kept.captured != captured(functions):
            kept = _Kept(make())
        called, traced = kept, False

        def remember() -> None:
            nonlocal traced
            traced = True
            # as the functions have left it: they may count their own traces in what they capture
            called.captured = captured(functions)

        is_part = keeps_traces and _jax.is_staged()
        function = called.function if is_part else called.compiled
        result = call_watched(remember, function, *args)
        if traced and called.captured is not None:
            self._keep(key, refs, called)
        return result

    @contextlib.contextmanager
    def tracing(self, key: Hashable, functions: Sequence[Any]) -> Generator[None]:
        """Call a function that belongs to a kept one, but may be traced later than that.

        Arguments:
            key: as for `call`.
            functions: as for `call`.
        """
        kept = self._kept.get((key, ()))
        if kept is None or captured(functions) != kept.captured:
            yield
        else:
            yield
            kept.captured = captured(functions)

    def _keep(self, key: Hashable, refs: Sequence[weakref.ref[Any]], kept: _Kept) -> None:
        table = self._kept

        def forget(_: object) -> None:
            table.pop(entry, None)

        # equal to the entry that is looked up; besides, these references tell when a function dies
        entry = (key, tuple([weakref.ref(ref(), forget) for ref in refs]))
        with self._lock:
            table.pop(entry, None)
            table[entry] = kept
            while len(table) > self._limit:
                table.popitem(last=False)


DIRECT = Runners()
"""Those of direct calls."""


def call_kept(
    key: Hashable,
    targets: Targets,
    make: Callable[[], Callable[..., Any]],
    *args: Any,
    keeps_traces: bool = False,
) -> Any:
    """Call a compiled function that is kept as long as its targets live and capture the same.

    Arguments:
        key: what it depends on besides the targets; it must not keep the caller's objects alive.
        targets: the functions that it calls.
        make: returns what is compiled. It must hold targets by their `refs` only.
        args: arrays.
        keeps_traces: see `Runners.call`.
    """
    refs = targets.refs
    return DIRECT.call(key, targets.functions, make, *args, refs=refs, keeps_traces=keeps_traces)
