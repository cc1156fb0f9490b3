"""`hoist` and `hoisting`: compute outside of the traces that a computation does not depend on.

Under a JAX transform every operation is staged into the innermost trace, also one on constants. So
what is made on the fly in a `scan`, say, is a tracer of its body, useless afterwards. JAX accepts
operations in any trace that encloses the current one, as long as their operands belong to it or lie
further out; so the outermost trace that will do can be read off the operands.

`hoist` reads it off the arguments of a function, `hoisting` off the operands of each operation.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from anabranch import _jax
from anabranch._boundary import boundary
from anabranch.contextvars_ext import _messages
from anabranch.errors import ArgumentError, HoistError

P = ParamSpec("P")
R = TypeVar("R")


@boundary("hoist")
def hoist(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function as far outside as its arguments allow, and return what it returns.

    What is returned equals `fn(*args, **kwargs)`, but it belongs to the innermost trace that one of
    the arguments belongs to. If none is traced, it is a concrete array, which can be kept and used
    anywhere. In a loop it is computed once, and it outlives the loop.

    Arguments:
        fn: any function. It runs while JAX traces, as all Python does, and only then.
        args: its arguments, and all traced values that it computes with: as arrays, in pytrees or
            in Variables. Objects that JAX does not know, modules too, are not looked into, and
            neither is what the function captures: it may capture an array for its shape only.
        kwargs: more of them.

    Raises:
        HoistError: an argument depends on the step of the loop around the call, so that the result
            cannot leave that loop; or the function uses a traced value that is no argument.

    >>> import anabranch as ab, jax, jax.numpy as jnp
    >>> key, params = jax.random.key(0), {}
    >>> def step(h, x):
    ...     if "w" not in params:
    ...         params["w"] = ab.hoist(jax.random.uniform, key)
    ...     return jnp.tanh(h + params["w"] * x), None
    >>> h, _ = jax.lax.scan(step, 0.0, jnp.arange(3.0))
    >>> float(params["w"]) == float(jax.random.uniform(key))
    True
    """
    _check_callable("hoist", fn)
    around = _jax.all_traces(_jax.current_trace())
    traced = [*_tracers(fn, args, kwargs)]
    target = _jax.innermost([_jax.tracer_trace(tracer) for _, tracer in traced], around)
    loop = next((i for i, trace in enumerate(around) if _jax.is_loop_body(trace)), None)
    if loop is not None and target in around[: loop + 1]:
        outside = around[loop + 1 :]
        held = [(name, x) for name, x in traced if _jax.tracer_trace(x) not in outside]
        raise HoistError(_messages.cannot_leave(fn, around[loop], held))
    return _call_at(target, around, fn, args, kwargs)


@boundary("hoist_concrete")
def hoist_concrete(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function outside of all traces, so that what it returns has a value now.

    As `hoist`, for a caller who needs the value while JAX traces, or who keeps it for good.

    Arguments:
        fn: any function.
        args: its arguments; none of them may be traced.
        kwargs: more of them.

    Raises:
        HoistError: an argument is traced, or the function uses a traced value that is none.

    >>> import anabranch as ab, jax, jax.numpy as jnp
    >>> @jax.jit
    ... def run(x):
    ...     size = int(ab.hoist_concrete(lambda: jnp.arange(5).sum()))
    ...     return x * size if size > 3 else x
    >>> float(run(2.0))
    20.0
    """
    _check_callable("hoist_concrete", fn)
    around = _jax.all_traces(_jax.current_trace())
    traced = [*_tracers(fn, args, kwargs)]
    if traced:
        raise HoistError(_messages.not_concrete(fn, traced))
    return _call_at(_jax.root_trace(), around, fn, args, kwargs)


def _check_callable(name: str, fn: Any) -> None:
    if not callable(fn):
        raise ArgumentError(
            f"{name}: fn is of type {type(fn).__name__}, which cannot be called; give a function "
            "and then its arguments"
        )


@contextlib.contextmanager
def hoisting() -> Generator[None]:
    """Let every operation in a block be computed as far outside as its operands allow.

    Nothing has to be said about what is traced and what is not: an operation on constants gives a
    concrete array, one on values of an outer trace belongs to that trace, and one that depends on
    the innermost trace stays where it would have been without the block.

    Context variables that were set outside of the traces around can be read inside. Experimental:
    it needs more of JAX than `hoist`.

    >>> import anabranch as ab, jax, jax.numpy as jnp
    >>> made = []
    >>> def step(h, x):
    ...     with ab.hoisting():
    ...         z = jnp.zeros([])
    ...         made.extend([z + 1, z + x])
    ...     return h + made[1], None
    >>> float(jax.lax.scan(step, 0.0, jnp.arange(3.0))[0])
    3.0
    >>> made[0], type(made[1]).__name__
    (Array(1., dtype=float32), 'DynamicJaxprTracer')
    """
    with _jax.hoisting_trace():
        yield


def _call_at(target: Any, around: Sequence[Any], fn: Callable[..., R], args: Any, kwargs: Any) -> R:
    if not around or target is around[0]:
        return fn(*args, **kwargs)
    try:
        with _jax.at_trace(target):
            return fn(*args, **kwargs)
    except jax.errors.UnexpectedTracerError as error:
        raise HoistError(_messages.hidden_tracer(fn, [*_captured(fn, set())])) from error


def _tracers(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the traced arguments of a function, those that a partial holds too, and their names."""
    while isinstance(fn, functools.partial):
        for path, leaf in jax.tree_util.tree_leaves_with_path((fn.args, fn.keywords)):
            if _jax.is_tracer(leaf):
                yield f"{_place(path, fn.func)} of the partial", leaf
        fn = fn.func
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if _jax.is_tracer(leaf):
            yield _place(path, fn), leaf


def _place(path: Sequence[Any], fn: Any) -> str:
    """Return how an argument is called, by its path in the pair of args and kwargs."""
    part, first, *below = path
    if part.idx == 0:
        names = _messages.parameter_names(fn)
        name = names[first.idx] if first.idx < len(names) else f"args[{first.idx}]"
    else:
        name = first.key
    return f"{name}{jax.tree_util.keystr(tuple(below))}"


def _captured(fn: Any, seen: set[int]) -> Iterator[tuple[str, jax.Array]]:
    """Yield the tracers among the variables and defaults of a function, and their names."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if hasattr(fn, "__wrapped__"):
        yield from _captured(fn.__wrapped__, seen)
    if not isinstance(fn, types.FunctionType):
        return
    held = dict(fn.__kwdefaults__ or {})
    names = reversed(_messages.parameter_names(fn))
    held.update(zip(names, reversed(fn.__defaults__ or ()), strict=False))
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            held[name] = cell.cell_contents
    for name, value in held.items():
        if _jax.is_tracer(value):
            yield name, value
        elif isinstance(value, (types.FunctionType, functools.partial)):
            yield from _captured(value, seen)
