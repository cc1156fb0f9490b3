"""What becomes of an error that leaves a transform.

The frames of this package and of JAX are taken out of its traceback, so that the user sees the
call and the line that failed, with nothing between them. An error of ours is told which transform
of which function it passed.

`ANABRANCH_TRACEBACK=full` in the environment leaves the frames in, and JAX's own
`JAX_TRACEBACK_FILTERING=off` those of JAX.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax

from anabranch.errors import AnabranchError

P = ParamSpec("P")
R = TypeVar("R")

_OWN = str(Path(__file__).parent) + os.sep
_WRITTEN = f"<{__package__}."  # the files of functions that are written by the program
_JAX = str(Path(jax.__file__).parent) + os.sep
_OWN_FUNCTION = re.compile(rf"the function \S+ at {re.escape(_OWN)}\S+")

rewriters: list[Callable[[str], str]] = [lambda text: _OWN_FUNCTION.sub("the function", text)]
"""What the text of an error goes through, to have places of ours replaced by the user's."""


def boundary(transform: str, function: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function one that errors leave without frames of ours.

    Arguments:
        transform: what error messages call it.
        function: what it transforms, if the transform makes a function.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def bounded_call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                leave(error, transform, function)
                raise  # adds no frame to the traceback that has just been set

        return bounded_call

    return decorate


def leave(error: BaseException, transform: str, function: Any = None) -> None:
    """Prepare an error for those outside; a bare `raise` has to follow.

    Arguments:
        error: what was raised.
        transform: the transform that it leaves.
        function: what is transformed, if there is one such function.
    """
    if isinstance(error, AnabranchError):
        error.pass_through(transform, None if function is None else where(function))
    for each in _connected(error):
        _rewrite(each)
    hide_frames(error)


def _rewrite(error: BaseException) -> None:
    if error.args and type(error.args[0]) is str:
        text = error.args[0]
        for rewriter in rewriters:
            text = rewriter(text)
        if text is not error.args[0]:
            error.args = (text, *error.args[1:])


def hide_frames(error: BaseException) -> None:
    """Take our frames, and those of JAX, out of the traceback of an error; `raise` follows."""
    if os.environ.get("ANABRANCH_TRACEBACK") == "full":
        return
    config: Any = jax.config
    hidden = (_OWN, _WRITTEN)
    if config.jax_traceback_filtering != "off":
        hidden += (_JAX,)
    for each in _connected(error):
        each.__traceback__ = _visible(each.__traceback__, hidden)


def _connected(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all that it came from."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions


def _visible(
    traceback: types.TracebackType | None, hidden: tuple[str, ...]
) -> types.TracebackType | None:
    shown: list[types.TracebackType] = []
    inside = False
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        # what a hidden frame calls of contextlib is in between, too
        inside = filename.startswith(hidden) or (inside and filename == contextlib.__file__)
        if not inside:
            shown.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(shown):
        traceback = types.TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback


def where(function: Any) -> str:
    """Return the name of a function, and its file and line, as error messages show it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, types.FunctionType):  # a callable object
        plain = inspect.unwrap(type(function).__call__)
    code = getattr(plain, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
