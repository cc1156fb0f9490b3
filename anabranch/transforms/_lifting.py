"""Variables that a function captures in ways that nobody can see: found by their use, then lifted.

A transformed call is an **attempt**. If the function turns out to use Variables that are no inputs
of the call, the attempt is in vain, nothing has been written, and the next one has them as inputs,
beside the function. What was found is remembered for the function, so that later calls need one
attempt.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from anabranch import _jax
from anabranch._boundary import rewriters
from anabranch.errors import CapturedWriteError
from anabranch.graph import _classify, _kinds
from anabranch.graph._containers import captured_constants, take_for_nodes
from anabranch.graph._expression import expression_from
from anabranch.graph._flatten import Flat
from anabranch.graph._function import is_mutable_container, plain_function
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._scope import HOOKS, Found, Scope
from anabranch.graph._tokens import STRUCTURE
from anabranch.graph._ways import Together, Ways, ways_to
from anabranch.transforms._watch import Unplannable

P = ParamSpec("P")
R = TypeVar("R")


_REFUSED = """a {} is written that was made outside of the function that runs now, and that the
function reaches in a way that nobody can see (behind an object that is no node, say). Only the
values of Variables can be written so: pass the object as an argument."""


class Capturing(NamedTuple):
    """In the place of a function: the function, and Variables that were found by their use.

    The name of the field is a mark in messages: what stands for the user there is put in its place.
    """

    function: Any
    found_by_use: tuple[Any, ...]
    marks: tuple[str, ...]
    """How each of them is reached. What was traced for others is right only if it is the same."""


_MARK = re.compile(
    r"\b(?:the )?function(?:\.function|\[\d+\])*(?:\.found_by_use|\['found_by_use'\])\[(\d+)\]"
)


def _name_found(error: BaseException, attempt: Attempt) -> None:
    """Let the text of an error name Variables that were found by their use as the user does."""
    if error.args and type(error.args[0]) is str and "found_by_use" in error.args[0]:

        def name(mark: re.Match[str]) -> str:
            i = int(mark[1])
            known = i < len(attempt.captured)
            found = expression_from(attempt.functions, attempt.captured[i]) if known else None
            return mark[0] if found is None else found

        error.args = (_MARK.sub(name, error.args[0]), *error.args[1:])


rewriters.append(lambda text: _MARK.sub("a Variable that the function does not name", text))


class Attempt:
    """A transformed call: what was split for it, and what was found in the attempts before."""

    __slots__ = (
        "captured",
        "found",
        "function",
        "functions",
        "hooked",
        "marks",
        "opener",
        "scope",
        "split",
    )

    def __init__(self) -> None:
        self.opener = _jax.current_trace()
        self.found: list[Any] = []
        self.marks: dict[int, str] = {}  # of what was found, by id
        self.captured: list[Any] = []  # what was found, and what is remembered
        self.split: list[Flat] = []
        self.scope: Scope | None = None
        self.function: Any = None  # in whose name something is remembered
        self.functions: Sequence[Any] = ()  # of the user
        self.hooked = False  # whether Variables of other libraries have to ask what stands for them

    def refuse_copies(self, objects: Sequence[Any], scope: Scope) -> None:
        """Give up the run if a container that the function captures would come back as a copy.

        Arguments:
            objects: what the function leaves behind that is new.
            scope: of the function.

        Raises:
            Found: the containers are inputs the next time.
        """
        containers = [*filter(is_mutable_container, objects)]
        if containers and take_for_nodes(captured_constants(self.functions), containers):
            renew_found_stamp()
            raise Found(scope)

    @property
    def flat(self) -> Flat:
        """The call that was split last."""
        return self.split[-1]

    def prepare_again(self, error: Found | Exception) -> bool:
        """Note what a call was in vain for; return False if it has failed, or another one was."""
        if isinstance(error, Found):
            if self.scope is None or error.scope is not self.scope:
                return False
            _remember(self, error.scope.found)
        else:
            refused = HOOKS.refused(error)
            if refused is None:
                _name_found(error, self)
                return False
            if self.hooked:
                raise CapturedWriteError(_REFUSED.format(type(refused).__name__)) from None
            self.hooked = True
        self.split.clear()
        self.scope = None
        return True


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[Attempt] = []


_ATTEMPTS = _Attempts()


class _Known(NamedTuple):
    """A Variable that was found by its use."""

    reference: Callable[[], Any]
    ways: Ways | None  # how the function reached it; None if nobody can tell
    mark: str

    def find(self) -> Any:
        """Return the Variable, None if it is gone, or is not any more where it was."""
        found = None if self.ways is None else Together([self.ways]).find()
        return None if found is None or found[0] is not self.reference() else found[0]

    def is_like(self, ways: Ways | None, obj: Any) -> bool:
        """Tell whether something else was found in the same way."""
        return self.reference() is obj if ways is None else self.ways == ways


class _KnownInOne:
    """All Variables that were found by their use in one function."""

    def __init__(self, every: Sequence[_Known]) -> None:
        self.every = every
        self._tellable = [one for one in every if one.ways is not None]
        self._together = Together([one.ways for one in self._tellable if one.ways is not None])

    def find(self) -> dict[int, tuple[Any, str]]:
        """Return those that are found now, by id, with their marks."""
        objects = self._together.find()
        found: dict[int, tuple[Any, str]] = {}
        if objects is None:  # some are not where they were
            for one in self._tellable:
                obj = one.find()
                if obj is not None:
                    found.setdefault(id(obj), (obj, one.mark))
        else:
            for one, obj in zip(self._tellable, objects, strict=True):
                if one.reference() is obj and obj is not None:
                    found.setdefault(id(obj), (obj, one.mark))
        return found


_FOUND: weakref.WeakKeyDictionary[Any, _KnownInOne] = weakref.WeakKeyDictionary()


def attempts() -> list[Attempt]:
    """Return the attempts of this thread; who begins one cuts the list to its old length."""
    return _ATTEMPTS.stack


def lifting(call: Callable[P, R]) -> Callable[P, R]:
    """Let a function that splits and runs a call be tried again with what was found in vain."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        attempt = Attempt()
        stack = attempts()
        depth = len(stack)
        try:
            stack.append(attempt)
            while True:
                try:
                    return call(*args, **kwargs)
                except (Found, Exception) as error:
                    if not attempt.prepare_again(error):
                        raise
        finally:
            del stack[depth:]  # no call: an interrupt may come when a function is entered or left

    return run


def call_in_attempt(opener: Any, function: Callable[[], R]) -> R:
    """Call a function in an attempt of a call that was made in a trace, and is split only now."""
    attempt = Attempt()
    attempt.opener = opener
    stack = _ATTEMPTS.stack
    depth = len(stack)
    try:
        stack.append(attempt)
        return function()
    finally:
        del stack[depth:]  # as in `lifting`


def _remember(attempt: Attempt, found: Sequence[Any]) -> None:
    attempt.found += found
    key = attempt.function
    known = [] if key is None or key not in _FOUND else [*_FOUND[key].every]
    news = False
    for obj, ways in zip(found, ways_to(attempt.functions, found), strict=True):
        kind: Any = _classify.rule_of(obj)
        like = [i for i, one in enumerate(known) if one.is_like(ways, obj)]
        if like and ways is None:
            attempt.marks[id(obj)] = known[like[0]].mark
            continue
        mark = known[like[0]].mark if like else _new_mark(ways, known)
        at = like[-1] + 1 if like else len(known)  # so that what is traced goes on to fit
        known = [*known[:at], _Known(kind.reference(obj), ways, mark), *known[at:]]
        attempt.marks[id(obj)] = mark
        news = True
    if news and key is not None:
        _FOUND[key] = _KnownInOne([one for one in known if one.reference() is not None])
        renew_found_stamp()


def _new_mark(ways: Ways | None, known: Sequence[_Known]) -> str:
    text = (ways and ways.text) or "in a way that cannot be written"
    others = {one.mark for one in known}
    numbered = (f"{text} ({number})" for number in itertools.count(2))
    return next(mark for mark in itertools.chain([text], numbered) if mark not in others)


def renew_found_stamp() -> None:
    """Say that something has been found."""
    _STAMP[0] = object()
    STRUCTURE.unwatched = object()


def found_stamp() -> object:
    """Return an object that is another one whenever something has been found."""
    return _STAMP[0]


_STAMP: list[object] = [object()]


def with_found(function: Any, functions: Sequence[Any]) -> Any:
    """Return a function with the Variables that were found in it, if there are any.

    Arguments:
        function: what is split.
        functions: the functions of the user.
    """
    stack = _ATTEMPTS.stack
    if not stack or not functions:
        return function
    attempt = stack[-1]
    if attempt.function is None:
        attempt.function, attempt.functions = _plain(functions[0]), functions
    found = _known(attempt.function) if _FOUND else {}
    found |= {id(x): (x, attempt.marks[id(x)]) for x in attempt.found if id(x) not in found}
    attempt.captured = [variable for variable, _ in found.values()]
    return _capturing(function, found)


def with_known(function: Any, user: Any) -> Any:
    """Return a function with the Variables that earlier calls have found in it, if there are any.

    Arguments:
        function: what is split.
        user: the function of the user.
    """
    return _capturing(function, _known(_plain(user)) if _FOUND else {})


def _capturing(function: Any, found: Mapping[int, tuple[Any, str]]) -> Any:
    if not found:
        return function
    variables, marks = zip(*found.values(), strict=True)
    return Capturing(function, variables, marks)


def has_found(user: Any) -> bool:
    """Tell whether Variables were found in a function of the user."""
    return bool(_FOUND and _plain(user) in _FOUND)


def hidden_in(user: Any) -> Callable[[], list[int]] | None:
    """Return what tells which Variables are found in a function now, None if there are none.

    Raises:
        Unplannable: one of them is found in a way that nobody can tell: each call has to look.
    """
    function = _plain(user)
    known = _FOUND.get(function) if _FOUND else None
    if known is None:
        return None
    if any(one.ways is None and one.reference() is not None for one in known.every):
        raise Unplannable
    return lambda: [*_known(function)]


def _known(function: Any) -> dict[int, tuple[Any, str]]:
    """Return the Variables that are found in a function now, by id, with their marks."""
    known = _FOUND.get(function)
    return {} if known is None else known.find()


def split_for_attempt(flat: Flat) -> Flat:
    """Remember what was split for the attempt that is being made."""
    if _ATTEMPTS.stack:
        _ATTEMPTS.stack[-1].split.append(flat)
    return flat


def attempt_for(graphdef: GraphDef) -> Attempt | None:
    """Return the attempt that a function runs for; None if it is traced later than that."""
    stack = _ATTEMPTS.stack
    if stack and stack[-1].split and _is_like(stack[-1].flat.graphdef, graphdef):
        return stack[-1]
    return None


def _is_like(one: GraphDef, other: GraphDef) -> bool:
    """Tell whether two graphdefs have the same table, whatever their metadata."""
    if one is other:
        return True
    return [(x.cls, x.edges) for x in one.entries] == [(x.cls, x.edges) for x in other.entries]


@contextlib.contextmanager
def lifting_into(attempt: Attempt | None, scope: Scope) -> Generator[None]:
    """Raise `Found` at the end of a run that has found something, however it ends."""
    if attempt is None:
        yield
        return
    before, attempt.scope = attempt.scope, scope
    try:
        yield
    except Found:
        raise
    except Exception:
        if scope.found:  # it may be due to the stand-ins; if not, it is raised again
            raise Found(scope) from None
        raise
    if scope.found:
        raise Found(scope)
    attempt.scope = before


def with_captured(call: Any) -> Any:
    """Return a call whose function is that of the user."""
    function = getattr(call, "function", None)  # (a backward rule is called otherwise)
    return call._replace(function=function.function) if type(function) is Capturing else call


def _plain(function: Any) -> Any:
    """Return the function in whose name something is remembered."""
    function = plain_function(function)
    if not isinstance(function, types.FunctionType):
        rule = _classify.rule_of(function)
        if isinstance(rule, _kinds.Kind):  # it may have no hash, or one of its contents
            function = type(function)
    return function if type(function).__weakrefoffset__ else None
