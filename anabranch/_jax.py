"""The one door to JAX's private names.

JAX keeps one *current trace* per thread, and most traces know the trace that they were opened
in (`parent_trace`). Walking those links gives the chain of active transforms, innermost first.
Nothing else in anabranch touches what JAX does not publish: a new JAX release breaks this file,
which `self_check` makes visible, or nothing.

Public names are preferred where they exist (`jax.extend.core.find_top_trace`,
`jax.core.eval_context`, `jax.core.Tracer`). Private are: the attributes `parent_trace` and
`_trace`, the cell behind the current trace (two to three times faster to read than the public
function; `self_check` compares the two), and the debug information for error messages.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, TypeGuard

import jax
import jax.core
from jax._src import core as _src_core

from anabranch.errors import UnsupportedJaxError

Trace: TypeAlias = Any
"""A JAX trace. JAX does not publish a stable type for it, so it is only compared by identity."""

TraceRefs: TypeAlias = "tuple[weakref.ref[Any], ...]"
"""A chain of traces, innermost first, held weakly."""


class _Untraced:
    """The place of the trace in contexts where JAX has none (its value there is None)."""

    def __repr__(self) -> str:
        return "a computation for which JAX keeps no trace"


UNTRACED: Final = _Untraced()


def _public_getter() -> Callable[[], Trace | None]:
    # 20 ms, and it registers settings, after which JAX traces everything again: only for checks
    import jax.extend.core as extend

    # `jax.core.find_top_trace` is deprecated exactly where `jax.extend.core` has it.
    find_top_trace: Any = getattr(extend, "find_top_trace", None)
    if find_top_trace is None:
        find_top_trace = getattr(jax.core, "find_top_trace", None)
    if find_top_trace is None:
        return lambda: _src_core.trace_ctx.trace
    return functools.partial(find_top_trace, None)


def _fast_getter() -> Callable[[], Trace | None]:
    """Pick the cheapest way to read the current trace (50 ns; the public one takes 90 to 180)."""
    cell: Any = getattr(_src_core, "trace_state_strong_ref", None)
    if cell is not None and hasattr(cell, "value"):

        def current_trace() -> Trace | None:
            return cell.value
    else:
        context: Any = getattr(_src_core, "trace_ctx", None)
        if not hasattr(context, "trace"):
            return _public_getter()

        def current_trace() -> Trace | None:
            return context.trace

    current_trace.__doc__ = "Return the trace that is current in this thread; it may be None."
    return current_trace


current_trace: Final[Callable[[], Trace | None]] = _fast_getter()


def _find_root() -> Trace:
    with jax.core.eval_context():
        return current_trace()


_ROOT: Final[Trace] = _find_root()
ROOT_REFS: Final[TraceRefs] = (weakref.ref(_ROOT),)


def root_trace() -> Trace:
    """Return the trace under which JAX computes eagerly."""
    return _ROOT


def is_root(trace: Trace | None) -> bool:
    """Tell whether a trace is the eager one."""
    return trace is _ROOT


def parent_trace(trace: Trace) -> Trace | None:
    """Return the trace that a trace was opened in, or None where JAX does not tell."""
    return getattr(trace, "parent_trace", None)


def trace_chain(trace: Trace | None) -> Iterator[Trace]:
    """Yield a trace and all traces around it, innermost first; nothing for None."""
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def record_chain() -> TraceRefs:
    """Return weak references to the current chain of traces; empty if there is no trace."""
    trace = current_trace()
    if trace is _ROOT:
        return ROOT_REFS
    return tuple([weakref.ref(t) for t in trace_chain(trace)])


def is_tracer(x: object) -> TypeGuard[jax.Array]:
    """Tell whether a value is a JAX tracer."""
    return isinstance(x, jax.core.Tracer)


def is_ref_tracer(tracer: jax.Array) -> bool:
    """Tell whether a tracer stands for a `jax.Ref`; `isinstance` does not tell in jax 0.7."""
    return hasattr(tracer.aval, "inner_aval")


def tracer_trace(tracer: jax.Array) -> Trace | None:
    """Return the trace that a tracer belongs to, or None where JAX does not tell."""
    return getattr(tracer, "_trace", None)


def varying_axes(x: object) -> set[object]:
    """Return the mesh axes along which, by its type, a value in a shard_map may differ."""
    aval: Any = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # from jax 0.10 on; `vma` before
    return set(getattr(aval, "vma", ()) if kind is None else kind.varying)


@functools.cache
def _staging_type() -> type:
    """Find the class of the traces that stage a jaxpr, by looking at one."""
    found: list[type] = []

    def probe() -> None:
        trace = current_trace()
        if trace is not None and trace is not _ROOT:
            found.append(type(trace))  # not the trace: `jax.checking_leaks` would find it

    jax.make_jaxpr(probe)()
    if not found:
        raise _unsupported("the current trace inside make_jaxpr cannot be read")
    return found[0]


def is_boundary(trace: Trace) -> bool:
    """Tell whether values from outside must not be seen inside a trace.

    They must not where JAX may cache what it traced (jit, scan, checkpoint, ...). A trace
    without a parent (eager shard_map, for one) counts too: what lies around it is unknown.
    """
    if trace is _ROOT:
        return False
    return isinstance(trace, _staging_type()) or getattr(trace, "parent_trace", None) is None


def find_crossed_boundary(recorded: TraceRefs) -> Trace | None:
    """Return the first boundary between the current trace and a recorded chain, or None.

    The walk goes outwards and ends at the first trace that is part of the recorded chain, not
    only at its innermost: JAX runs some custom rules one level further out than the function
    that they belong to. Where JAX has no current trace, `UNTRACED` stands for it.
    """
    trace = current_trace()
    if trace is _ROOT:
        return None
    if trace is None:
        return UNTRACED if recorded else None
    if recorded and recorded[0]() is trace:
        return None
    around = [ref() for ref in recorded]
    staging = _staging_type()
    while trace is not _ROOT:
        for known in around:
            if known is trace:
                return None
        parent = getattr(trace, "parent_trace", None)
        if parent is None or isinstance(trace, staging):  # what `is_boundary` says, inlined
            return trace
        trace = parent
    return None


_TRANSFORM_OF: Final = {
    "ShardMapTrace": "shard_map",
    "MapTrace": "pmap",
    "BatchTrace": "vmap",
    "JVPTrace": "jvp",
    "LinearizeTrace": "grad (or vjp, linearize)",
}


def describe_boundary(trace: Trace) -> str:
    """Say which transform of which function opened a trace, as far as JAX tells."""
    if isinstance(trace, _Untraced):
        return repr(trace)
    try:
        info = trace.frame.debug_info
        transform, source = str(info.traced_for), str(info.func_src_info)
    except AttributeError:
        name = type(trace).__name__
        return _TRANSFORM_OF.get(name, name)
    source = source.replace("\\", "/")
    if "/jax/_src/pmap.py" in source:
        return "pmap"
    # A wrapper of JAX's own (jax 0.8 hides the function under pmap so) tells nobody anything.
    if not source or source == "<unknown>" or "/jax/_src/" in source:
        return transform
    return f"{transform} of {source}"


def _unsupported(what: str) -> UnsupportedJaxError:
    return UnsupportedJaxError(
        f"jax {jax.__version__} does not behave as anabranch expects: {what}. "
        "Install a jax version that anabranch supports, or a newer anabranch."
    )


_EXPECTED: Final = {
    "thread": "root",
    "staged": "boundary root",
    "nested": "boundary boundary root",
    "checkpoint": "boundary boundary root",
    "scan": "boundary boundary root",
    "grad in jit": "open boundary root",
    "vmap": "open root",
    "grad": "open root",
    "jvp": "open root",
}


def _observe_chains(seen: dict[str, str]) -> None:
    """Run tiny transforms and write down the chain that the function inside sees."""

    def kind(trace: Trace) -> str:
        return "root" if trace is _ROOT else "boundary" if is_boundary(trace) else "open"

    def probe(name: str) -> Callable[[Any], Any]:
        def fn(x: Any) -> Any:
            trace = current_trace()
            seen[name] = " ".join(map(kind, trace_chain(trace)))
            if is_tracer(x) and tracer_trace(x) is not trace:
                seen[name] += " (argument of another trace)"
            return x * 2.0

        return fn

    api: Any = jax  # the transforms are called on probes, whose types are of no interest

    def staged(x: Any) -> Any:
        probe("staged")(x)
        seen["described"] = describe_boundary(current_trace())
        api.jit(probe("nested"))(x)
        api.checkpoint(probe("checkpoint"))(x)
        api.lax.scan(lambda c, _: (probe("scan")(c), None), x, None, length=1)
        return api.grad(probe("grad in jit"))(x)

    probe("thread")(1.0)
    with jax.disable_jit(False):
        api.eval_shape(staged, 1.0)
        api.vmap(probe("vmap"))(api.numpy.ones(1))
        api.grad(probe("grad"))(1.0)
        api.jvp(probe("jvp"), (1.0,), (1.0,))


def self_check() -> None:
    """Check on tiny transforms that JAX's traces look as this module expects.

    Raises:
        UnsupportedJaxError: something looks different in the installed JAX.
    """
    seen: dict[str, str] = {}
    failures: list[Exception] = []

    public = _public_getter()
    agree: list[bool] = [public() is current_trace()]

    def observe() -> None:
        try:
            jax.make_jaxpr(lambda: agree.append(public() is current_trace()))()
            _observe_chains(seen)
        except Exception as error:  # whatever JAX raises, it is the finding
            failures.append(error)

    # A fresh thread has no transforms around it, whatever the caller is in.
    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    if failures:
        raise _unsupported(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
    if not all(agree):
        raise _unsupported("the public and the private way to the current trace disagree")
    for name, chain in _EXPECTED.items():
        if seen.get(name) != chain:
            raise _unsupported(f"the traces seen in {name!r} are {seen.get(name)!r}, not {chain!r}")
    if " of " not in seen["described"]:
        raise _unsupported("a trace does not say what it was opened for")
