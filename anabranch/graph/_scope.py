"""Which object stands for another one here: what a running function captures, found by its use.

While a function runs on twins, its **scope** is open. A Variable of an outer level that it reaches
in a way that nobody could foresee is then found by its own reads and writes: its twin stands for
it. Unless that was known, it is *found*: the run is in vain, and is done again with the Variable as
an input of its own. Until then a stand-in with the value of the Variable keeps the function going,
so that one run finds them all. An object that is an argument and is reached in such a way, too, is
found like any other: in the next call the argument may be another one.

A function that JAX traces and keeps must never see such a value, which would stay in its trace:
there, finding a Variable ends the run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from anabranch import _jax
from anabranch.errors import CapturedWriteError
from anabranch.graph._tokens import STRUCTURE, current_token, is_level, token_of, trace_of

OPEN: list[Scope] = []
"""The open scopes of all threads: most often there is none."""


class Hook(Protocol):
    """How Variables of one library are made to ask."""

    def attach(self) -> None:
        """Let them ask."""

    def detach(self) -> None:
        """Let the library be as it was."""

    def refused(self, error: Exception) -> Any:
        """Return the object of which an error says that it belongs to another trace, or None."""
        ...


class Hooks:
    """How Variables of other libraries ask what stands for them: held as long as needed.

    Our own always ask. Others are made to while a scope is open in which it matters: one whose
    function JAX keeps, whose objects are of the same trace, or that lifts Variables found before.
    Anywhere else what is read is right, and what is written is refused: then it is tried again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may call, too
        self._hooks: list[Hook] = []
        self._held = False

    def add(self, hook: Hook) -> None:
        """Let there be one more hook."""
        self._hooks.append(hook)

    def refused(self, error: Exception) -> Any:
        """Return what an error refuses to be written, which a hook may lead elsewhere, or None."""
        return next(filter(_is_there, (hook.refused(error) for hook in self._hooks)), None)

    def hold(self, needed: Any) -> None:
        """Attach them if a scope that has been opened needs them."""
        if needed and self._hooks:
            with self._lock:  # held or not: another thread may be about to let go
                if not self._held:
                    for hook in self._hooks:
                        hook.attach()
                    self._held = True

    def let_go(self) -> None:
        """Detach them if no scope is open any more."""
        if self._held:
            with self._lock:
                if self._held and not OPEN:
                    self._held = False  # first: a finaliser may call meanwhile, and need them
                    try:
                        for hook in self._hooks:
                            hook.detach()
                    except BaseException:
                        self._held = True
                        raise


def _is_there(x: Any) -> bool:
    return x is not None  # the truth of a Variable is that of its value


HOOKS = Hooks()


class Found(BaseException):
    """A run is in vain: the function has used Variables that are no inputs of it yet."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []


_SCOPES = _Scopes()


def open_scopes() -> list[Scope]:
    """Return the open scopes of this thread; who opens one cuts the list to its old length."""
    return _SCOPES.stack


class Scope:
    """The scope of a function that runs on twins.

    Arguments:
        outer: the objects that have twins, by index; None if nobody knows them any more.
        twins: their twins, by index.
        opener: the trace that the transform was called in.
        captured: those of the objects that were found before.
        hooked: whether Variables of other libraries have to ask, too.
    """

    def __init__(
        self,
        outer: Sequence[Any] | None,
        twins: Sequence[Any],
        opener: Any,
        captured: Sequence[Any] = (),
        hooked: bool = False,
    ) -> None:
        self._lifts = outer is not None
        # with the objects themselves, so that ids stay valid
        self._pairs = [] if outer is None else [*zip(outer, twins, strict=True)]
        self._inputs = {id(obj): twin for obj, twin in self._pairs}
        self._known = {id(x): self._inputs[id(x)] for x in captured if id(x) in self._inputs}
        self._twins = twins
        self._twin_ids: set[int] | None = None
        self._opener = opener
        self._hooked = hooked
        self._parent: Scope | None = None
        self.places: Any = None  # see `_leaks`
        self.found: list[Any] = []
        self.stand_ins: list[Any] = []

    def open(self) -> None:
        """Let it be the scope of the code that runs in this thread from now on."""
        stack = _SCOPES.stack
        self._parent = stack[-1] if stack else None
        self._inside = current_token()
        self.owns_what_it_makes = self._inside is not token_of(self._opener)
        self._outside = self._tokens_outside()  # by id; with the tokens, so that ids stay valid
        OPEN.append(self)
        STRUCTURE.unwatched = object()
        stack.append(self)
        HOOKS.hold(
            self._hooked
            or self._known
            or is_level(self._inside)
            or _is_staged(_jax.current_trace())
        )

    def _tokens_outside(self) -> dict[int, Any]:
        trace = _jax.current_trace()
        chain: Iterable[Any] = (*_jax.trace_chain(trace), _jax.root_trace())
        tokens = {id(token): token for token in map(token_of, chain)}
        if self._parent is not None:  # JAX does not tell all parents
            tokens |= self._parent._outside
            tokens[id(self._parent._inside)] = self._parent._inside
        tokens.pop(id(self._inside), None)
        return tokens

    def stands_for(self, obj: Any) -> Any:
        """Return what stands for an object: its twin, or the object itself."""
        outer = obj
        if id(obj) not in self._inputs and self._parent is not None:
            outer = self._parent.stands_for(obj)
        twin = self._inputs.get(id(outer))
        if twin is None:
            return outer
        self._note(outer, twin)
        return twin

    def _note(self, outer: Any, twin: Any) -> None:
        """Note that an input is reached in a hidden way, too."""
        if not self._lifts or id(outer) in self._known:
            return
        if not (type(outer).__weakrefoffset__ or _kind_of(outer).is_variable):
            # it could not be remembered
            raise CapturedWriteError(
                f"a {type(outer).__name__} is reached both as an argument and in a way that cannot "
                "be seen (behind an object that is no node, say), and is returned or was assigned "
                "to an attribute from there: use the argument"
            )
        self.found.append(outer)
        self._known[id(outer)] = twin

    def variable(self, variable: Any, token: Any) -> Any:
        """Return what stands for a Variable here; it becomes an input if it is none yet."""
        if token is self._inside:
            return variable
        twin = self._known.get(id(variable))
        if twin is not None:
            if self.found and id(twin) in map(id, self.stand_ins):
                self._check_not_kept()
            return twin
        outer = variable
        if id(variable) not in self._inputs:
            if id(token) not in self._outside:
                return variable  # it was made here, in a plain transform of JAX
            if self._parent is not None:
                outer = self._parent.variable(variable, token)
        twin = self._inputs.get(id(outer))
        if twin is not None:
            self._note(outer, twin)
        else:
            twin = self._known.get(id(outer))
            if twin is None:
                twin = self._find(outer) if self._lifts else outer
        self._pairs.append((variable, twin))
        self._known[id(variable)] = twin
        return twin

    def _find(self, outer: Any) -> Any:
        twin = _kind_of(outer).copy_for(outer, self._inside)
        self.found.append(outer)
        self.stand_ins.append(twin)
        self._twin_ids = None
        self._check_not_kept()
        return twin

    def is_inside(self, x: Any) -> bool:
        """Tell whether something means nothing outside: a tracer or a twin."""
        if _jax.is_tracer(x):
            trace = _jax.tracer_trace(x)
            return trace is not self._opener and id(token_of(trace)) not in self._outside
        return self.is_twin(x)

    def is_twin(self, x: Any) -> bool:
        """Tell whether something is a twin."""
        if self._twin_ids is None:
            self._twin_ids = set(map(id, (*self._twins, *self.stand_ins)))
        return id(x) in self._twin_ids

    def _check_not_kept(self) -> None:
        """Raise if the value of a stand-in would get into a trace that JAX keeps."""
        stack = _SCOPES.stack
        below = stack[stack.index(self) + 1 :]
        traces = [*[scope._opener for scope in below], _jax.current_trace()]
        for scope, trace in zip([self, *below], traces, strict=True):
            if _staged_between(trace, trace_of(scope._inside)):
                raise Found(self)


def _kind_of(obj: Any) -> Any:
    from anabranch.graph._classify import rule_of  # it needs Variables, which need this file

    return rule_of(obj)


def _is_staged(trace: Any) -> bool:
    return any(map(_jax.is_boundary, _jax.trace_chain(trace)))


def _staged_between(trace: Any, outer: Any) -> bool:
    """Tell whether a function that runs in a trace, within an outer one, is kept by JAX."""
    for inner in _jax.trace_chain(trace):
        if inner is outer:
            return False
        if _jax.is_boundary(inner):
            return True
    return False


def here(variable: Any, token: Any) -> Any:
    """Return what stands for a Variable, made in the trace of a token, in the code that runs."""
    stack = _SCOPES.stack
    return stack[-1].variable(variable, token) if stack else variable


def object_here(obj: Any) -> Any:
    """Return what stands for a node in the code that runs."""
    stack = _SCOPES.stack
    return stack[-1].stands_for(obj) if stack else obj


def is_twin_here(obj: Any) -> bool:
    """Tell whether an object is a twin in the code that runs."""
    stack = _SCOPES.stack
    return bool(stack) and stack[-1].is_twin(obj)
