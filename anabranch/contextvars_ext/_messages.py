"""The error texts of context variables: what was done, where, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from anabranch import _jax
from anabranch.errors import bounded, first_few

if TYPE_CHECKING:
    from anabranch.contextvars_ext._var import JitAwareContextVar

_NOT_SET = """\
No value is set for {var!r}{where}. Set one around the code that reads it:

    with {name}.set_on_enter(value):
        ...

or give the variable a default. (Threads start without the values of the thread that made them.)"""

_BEHIND = """\
{var!r} was read in {boundary}, but its value comes from outside: {where_set}. JAX may cache what \
it traces there, and the cached program would not see later values."""

_PLUMB = """\
Pass the value in as an input, and set it again inside. With jax.jit as the transform:

    from anabranch.contextvars_ext import plumb_and_transform

    @plumb_and_transform(
        transform_to_apply=jax.jit,
        compute_extra_input_before=lambda: {name}.get(),
        create_context_managers_after=lambda value: [{name}.set_on_enter(value)],
    )
    def function_that_reads_{name}(...): ..."""

_PLUMB_KEY = """\
Let the transform take a key as an input. For jax.jit that is

    from anabranch.contextvars_ext import plumb_rng_key_and_jit

    function_that_draws = plumb_rng_key_and_jit(function_that_draws)

In any other transform (scan, checkpoint, ...) pass a key as an argument and open a stream inside:

    with set_keystream_on_enter(KeyStream(key)):
        ..."""

_NOT_OPEN = """\
The context that sets {var!r} was left where it is not open: it was left before, or it was entered \
in another thread or task (a generator that is finished elsewhere does that)."""

_GENERATOR = """\
{fn!r} is a generator function. Its body runs in the context of whoever iterates over it, so that \
the value of {var!r} would leak between the steps. Set it inside, around the parts that need it:

    with {name}.set_on_enter(value):
        ...  # no yield in here"""

_NOT_DECORATABLE = """\
set_on_enter(value) of {var!r} decorates functions, not {fn!r}. Below @staticmethod and \
@classmethod it gets the function itself."""

_CANNOT_LEAVE = """\
hoist: the result of {fn} cannot leave {loop}, as it depends on values that may differ from step \
to step:
{names}
Pass values from outside of the loop. If such a value was computed in the body from nothing that \
changes, hoist that computation as well, a key that is made there for one: \
`hoist(lambda: init(jax.random.key(0)))`. If the result is to differ from step to step, call the \
function without `hoist`, or in a block `with hoisting():`, which moves what can be moved."""

_NOT_CONCRETE = """\
hoist_concrete: the result of {fn} has no value at trace time, as it depends on traced values:
{names}
Pass concrete values, or use `hoist`: its result is a tracer that belongs where these come from, \
and is returned from there."""

_HIDDEN_TRACER = """\
hoist: {fn} computes with a traced value that is none of its arguments: {what}. Pass every traced \
value as an argument, as an array or in a pytree; or compute in a block `with hoisting():`, where \
each operation goes where its operands are."""


def _code_name(var: JitAwareContextVar[Any]) -> str:
    name = var.name or ""
    return name if name.isidentifier() else "var"


def not_set(var: JitAwareContextVar[Any]) -> str:
    """Say that nothing is set, and where that was asked."""
    crossed = _jax.find_crossed_boundary(_jax.ROOT_REFS)
    where = "" if crossed is None else f" in {_jax.describe_boundary(crossed)}"
    return _NOT_SET.format(var=var, name=_code_name(var), where=where)


def where_set(recorded: _jax.TraceRefs) -> str:
    """Say in which traced function a value was set, from the traces recorded then."""
    for ref in recorded:
        trace = ref()
        if trace is not None and _jax.is_boundary(trace):
            return f"it was set in {_jax.describe_boundary(trace)}"
    return "it was set outside of all traced functions"


def behind_boundary(var: JitAwareContextVar[Any], boundary: str, where_set: str) -> str:
    """Say that a value lies behind a boundary."""
    return _BEHIND.format(var=var, boundary=boundary, where_set=where_set)


def plumb_value(var: JitAwareContextVar[Any]) -> str:
    """Show `plumb_and_transform` with the variable at hand."""
    return _PLUMB.format(name=_code_name(var))


def plumb_key() -> str:
    """Show `plumb_rng_key_and_jit`."""
    return _PLUMB_KEY


def not_open(var: JitAwareContextVar[Any]) -> str:
    """Say that a context was left that is not open."""
    return _NOT_OPEN.format(var=var)


def generator_function(var: JitAwareContextVar[Any], fn: object) -> str:
    """Say why generator functions cannot be decorated."""
    return _GENERATOR.format(var=var, fn=fn, name=_code_name(var))


def not_decoratable(var: JitAwareContextVar[Any], fn: object) -> str:
    """Say that something is no function."""
    return _NOT_DECORATABLE.format(var=var, fn=fn)


def cannot_leave(fn: object, loop: _jax.Trace, held: Sequence[tuple[str, jax.Array]]) -> str:
    """Say which arguments depend on the step of a loop."""
    where = _jax.describe_boundary(loop)
    return bounded(_CANNOT_LEAVE.format(fn=_called(fn), loop=where, names=_arguments(held)))


def not_concrete(fn: object, traced: Sequence[tuple[str, jax.Array]]) -> str:
    """Say which arguments are traced."""
    return bounded(_NOT_CONCRETE.format(fn=_called(fn), names=_arguments(traced)))


def hidden_tracer(fn: object, captured: Sequence[tuple[str, jax.Array]]) -> str:
    """Say that a function uses a tracer that is no argument, and which it may be."""
    names = ", ".join([name for name, _ in captured[:5]])
    what = f"it captures {names}" if names else "it is in a global, a container or an object"
    return bounded(_HIDDEN_TRACER.format(fn=_called(fn), what=what))


def _arguments(tracers: Sequence[tuple[str, jax.Array]]) -> str:
    """Name arguments, with their types and traces."""
    lines: list[str] = []
    for name, tracer in tracers:
        kind = tracer.aval.str_short(short_dtypes=False)
        where = _jax.describe_boundary(_jax.tracer_trace(tracer))
        lines.append(f"argument {name}: {kind}, traced by {where}")
    return first_few(lines)


def parameter_names(fn: Any) -> list[str]:
    """Return the names of the parameters that take positional arguments, if they are known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


def _called(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)[:150]
