"""`plumb_and_transform`: carry context values into and out of a JAX transform.

Two wrappers around one function, with the transform between them:

    outside   extra_in = compute_extra_input_before()
    ─────────────────────────────── transform ────────────────────────────────
    inside    with create_context_managers_after(extra_in):
                  result = function(...)
                  extra_out = compute_extra_output_after()
    ─────────────────────────────── transform ────────────────────────────────
    outside   consume_extra_output(extra_out)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ParamSpec, TypeVar, cast, overload

from anabranch.errors import ArgumentError, StructureError, bounded

P = ParamSpec("P")
R = TypeVar("R")

_NO_PAIR = """\
{name} was plumbed with compute_extra_output_after, so that the function inside returns the pair \
(result, extra output), and the transformed function has to return such a pair too. It returned \
{got}. A transform that returns something else needs an adapter, for example

    transform_to_apply=lambda f: jax.grad(f, has_aux=True)"""

_HALF_A_PAIR = """\
compute_extra_output_after (called inside, while the contexts are open) and consume_extra_output \
(called outside, with what the former returned) go together: give both or neither."""

_NO_CONTEXTS = """\
create_context_managers_after has to return an iterable of context managers, for example \
[variable.set_on_enter(value)]; {name} got {got!r}."""


def _enter_all(stack: ExitStack, managers: object, name: str) -> None:
    if isinstance(managers, AbstractContextManager) or not isinstance(managers, Iterable):
        raise ArgumentError(bounded(_NO_CONTEXTS.format(name=name, got=managers)))
    for manager in cast("Iterable[AbstractContextManager[Any]]", managers):
        stack.enter_context(manager)


def _extended_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Put a positional-only parameter for the extra input in front of a signature.

    Transforms look parameters up by name (`static_argnames`) in the signature of the function
    that they get; without this they would be one position off.
    """
    kind = inspect.Parameter
    try:
        old = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        old = [kind("args", kind.VAR_POSITIONAL), kind("kwargs", kind.VAR_KEYWORD)]
    name = "extra_input"
    while any(parameter.name == name for parameter in old):
        name += "_"
    return inspect.Signature([kind(name, kind.POSITIONAL_ONLY), *old])


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _make_inner(
    fn: Callable[..., Any],
    create_context_managers_after: Callable[[Any], Iterable[AbstractContextManager[Any]]],
    compute_extra_output_after: Callable[[], Any] | None,
) -> Callable[..., Any]:
    """Build the function that the transform gets."""

    # `wraps` leaves `__wrapped__`, by which JAX finds the user's file and line for its messages.
    @functools.wraps(fn)
    def inner(extra_input: Any, /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            _enter_all(stack, create_context_managers_after(extra_input), _name_of(fn))
            result = fn(*args, **kwargs)
            if compute_extra_output_after is None:
                return result
            return result, compute_extra_output_after()

    inner.__signature__ = _extended_signature(fn)  # pyright: ignore[reportAttributeAccessIssue]
    return inner


def _plumb(
    fn: Callable[P, R],
    transform_to_apply: Callable[..., Callable[..., Any]],
    compute_extra_input_before: Callable[[], Any],
    create_context_managers_after: Callable[[Any], Iterable[AbstractContextManager[Any]]],
    compute_extra_output_after: Callable[[], Any] | None,
    consume_extra_output: Callable[[Any], object] | None,
) -> Callable[P, R]:
    if isinstance(fn, (staticmethod, classmethod)) or not callable(fn):
        raise ArgumentError(f"plumb_and_transform takes a function, not {fn!r:.200}.")
    whose = _name_of(fn)
    transformed = transform_to_apply(
        _make_inner(fn, create_context_managers_after, compute_extra_output_after)
    )

    @functools.wraps(fn)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        output = transformed(compute_extra_input_before(), *args, **kwargs)
        if consume_extra_output is None:
            return output
        if not isinstance(output, (tuple, list)) or len(cast("tuple[Any, ...]", output)) != 2:
            got = f"a {type(output).__name__}"
            raise StructureError(bounded(_NO_PAIR.format(name=whose, got=got)))
        result, extra_output = cast("tuple[R, Any]", output)
        consume_extra_output(extra_output)
        return result

    return outer


@overload
def plumb_and_transform(
    callable_to_transform: Callable[P, R],
    *,
    transform_to_apply: Callable[..., Callable[..., Any]],
    compute_extra_input_before: Callable[[], Any],
    create_context_managers_after: Callable[[Any], Iterable[AbstractContextManager[Any]]],
    compute_extra_output_after: Callable[[], Any] | None = None,
    consume_extra_output: Callable[[Any], object] | None = None,
) -> Callable[P, R]: ...
@overload
def plumb_and_transform(
    callable_to_transform: None = None,
    *,
    transform_to_apply: Callable[..., Callable[..., Any]],
    compute_extra_input_before: Callable[[], Any],
    create_context_managers_after: Callable[[Any], Iterable[AbstractContextManager[Any]]],
    compute_extra_output_after: Callable[[], Any] | None = None,
    consume_extra_output: Callable[[Any], object] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def plumb_and_transform(
    callable_to_transform: Callable[..., Any] | None = None,
    *,
    transform_to_apply: Callable[..., Callable[..., Any]],
    compute_extra_input_before: Callable[[], Any],
    create_context_managers_after: Callable[[Any], Iterable[AbstractContextManager[Any]]],
    compute_extra_output_after: Callable[[], Any] | None = None,
    consume_extra_output: Callable[[Any], object] | None = None,
) -> Any:
    """Transform a function that reads context variables, and plumb their values through.

    The transform sees a function with one more input, in front of the others, and with one more
    output if one is asked for. Arguments that count positions (`static_argnums`, `argnums`,
    `in_axes`, `donate_argnums`) therefore count the extra input as position 0. Names are as they
    were. Functions, methods (in a class body) and callable objects work, with any signature.

    Arguments:
        callable_to_transform: the function. Without it, the result is a decorator.
        transform_to_apply: a JAX transform, or anything else that takes a function and returns one
            (`functools.partial(jax.jit, static_argnames="n")`). Applied once.
        compute_extra_input_before: called outside, before each call; returns the extra input.
        create_context_managers_after: called inside with the extra input; returns the context
            managers to enter around the function, in this order.
        compute_extra_output_after: called inside when the function has returned, while the contexts
            are still open; returns the extra output. The transformed function returns
            `(result, extra output)`.
        consume_extra_output: called outside with the extra output; what it returns is dropped.

    Returns:
        A function with the signature of the original, or a decorator that makes one. If anything
        raises, the contexts are closed and nothing is consumed.

    Raises:
        TypeError: only one of the arguments for the extra output is given, the callable is none,
            or (on call) the context managers are not an iterable of such.
        StructureError: (on call) an extra output is asked for and the transformed function does
            not return a pair.

    Example:
        >>> import jax
        >>> from anabranch import contextvars_ext as cx
        >>> scale = cx.JitAwareContextVar("scale")
        >>> calls = cx.JitAwareContextVar("calls")
        >>> @cx.plumb_and_transform(
        ...     transform_to_apply=jax.jit,
        ...     compute_extra_input_before=lambda: (scale.get(), calls.get()),
        ...     create_context_managers_after=lambda extra: [
        ...         scale.set_on_enter(extra[0]),
        ...         calls.set_on_enter(dict(extra[1])),
        ...     ],
        ...     compute_extra_output_after=calls.get,
        ...     consume_extra_output=lambda inner_calls: calls.get().update(inner_calls),
        ... )
        ... def scaled(x):
        ...     calls.get()["n"] += 1
        ...     return scale.get() * x
        >>> with scale.set_on_enter(2.0), calls.set_on_enter({"n": 0}) as counts:
        ...     print(scaled(3.0), scaled(4.0), counts["n"])
        6.0 8.0 2
    """
    if (compute_extra_output_after is None) != (consume_extra_output is None):
        raise ArgumentError(_HALF_A_PAIR)

    def plumb(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _plumb(
            fn,
            transform_to_apply,
            compute_extra_input_before,
            create_context_managers_after,
            compute_extra_output_after,
            consume_extra_output,
        )

    return plumb if callable_to_transform is None else plumb(callable_to_transform)
