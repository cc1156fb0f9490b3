"""The one door to JAX's private names.

JAX keeps one *current trace* per thread, and most traces know the trace that they were opened
in (`parent_trace`). Walking those links gives the chain of active transforms, innermost first.
Nothing else in anabranch touches what JAX does not publish: a new JAX release breaks this file,
which `_jax_check` makes visible, or nothing.

Public names are preferred where they exist (`jax.extend.core.find_top_trace`,
`jax.core.eval_context`, `jax.core.Tracer`). Private are: the attributes `parent_trace` and
`_trace`, the cell behind the current trace (two to three times faster to read than the public
function; `_jax_check` compares the two), the class of arrays and what is in an array of keys (where
`jax.typeof` is slow), the debug information for error messages, and what it takes to leave a trace:
setting the current one, and handling operations for one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeGuard

import jax
import jax.core
from jax._src import core as _src_core
from jax._src.array import ArrayImpl
from jax.sharding import AbstractMesh, AxisType, get_abstract_mesh

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


def public_getter() -> Callable[[], Trace | None]:
    """Return the public function for the current trace, which `_jax_check` compares with ours."""
    # 20 ms, and it registers settings, after which JAX traces everything again: only for checks
    import jax.extend.core as extend

    # `jax.core.find_top_trace` is deprecated exactly where `jax.extend.core` has it.
    find_top_trace: Any = getattr(extend, "find_top_trace", None)
    if find_top_trace is None:
        find_top_trace = getattr(jax.core, "find_top_trace", None)
    if find_top_trace is None:
        return lambda: _src_core.trace_ctx.trace
    return functools.partial(find_top_trace, None)


def trace_cell() -> tuple[Any, str] | None:
    """Return where the current trace is kept, an object and the name of its attribute, or None."""
    for name, attribute in (("trace_state_strong_ref", "value"), ("trace_ctx", "trace")):
        cell: Any = getattr(_src_core, name, None)
        if hasattr(cell, attribute):
            return cell, attribute
    return None


def _fast_getter() -> Callable[[], Trace | None]:
    """Pick the cheapest way to read the current trace (50 ns; the public one takes 90 to 180)."""
    found = trace_cell()
    if found is None:
        return public_getter()
    cell, attribute = found
    if attribute == "value":

        def current_trace() -> Trace | None:
            return cell.value
    else:

        def current_trace() -> Trace | None:
            return cell.trace

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


def types_of(values: Iterable[Any]) -> list[Any]:
    """Return for each of some leaves what is equal for those of one `jax.typeof`, but sooner."""
    return [x.aval if type(x) is ArrayImpl else _type_of(x) for x in values]


def _type_of(x: Any) -> Any:
    data = getattr(x, "_base_array", None)  # of an array of keys, whose type takes 10 us to make
    return jax.typeof(x) if data is None else (x.dtype, data.aval)


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
        raise unsupported("the current trace inside make_jaxpr cannot be read")
    return found[0]


def is_boundary(trace: Trace) -> bool:
    """Tell whether values from outside must not be seen inside a trace.

    They must not where JAX may cache what it traced (jit, scan, checkpoint, ...). A trace
    without a parent (eager shard_map, for one) counts too: what lies around it is unknown.
    """
    if trace is _ROOT:
        return False
    return isinstance(trace, _staging_type()) or getattr(trace, "parent_trace", None) is None


def is_staged() -> bool:
    """Tell whether what is done now becomes part of a larger program."""
    staging = _staging_type()
    return any(isinstance(trace, staging) for trace in trace_chain(current_trace()))


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
    # A wrapper of JAX's own (jax 0.8 hides the function under pmap so), or of ours, tells nobody
    # anything.
    ours = "/anabranch/transforms/" in source
    if not source or source == "<unknown>" or "/jax/_src/" in source or ours:
        return transform
    return f"{transform} of {source}"


_LOOPS: Final = frozenset({"scan", "fori_loop", "while_body", "while_cond"})


def is_loop_body(trace: Trace) -> bool:
    """Tell whether a trace is that of a function which is run once for each step of a loop."""
    try:
        return str(trace.frame.debug_info.traced_for) in _LOOPS
    except AttributeError:
        return False


def all_traces(trace: Trace | None) -> list[Trace]:
    """Return a trace and those around it; unlike JAX, a hoisting one tells where it was opened."""
    found: list[Trace] = []
    while trace is not None:
        found.append(trace)
        inside = isinstance(trace, _Hoisting)
        trace = trace.opened_in if inside else getattr(trace, "parent_trace", None)
    return found


def innermost(traces: Iterable[Trace | None], around: Sequence[Trace]) -> Trace:
    """Return the innermost of some traces, and the root if there are none.

    Arguments:
        traces: of tracers. What JAX's chain does not lead to (it has gaps around some custom
            rules) may lie anywhere, so that nothing is left then.
        around: the current trace and those around it.
    """
    place = {trace: at for at, trace in enumerate(around)}
    found = [place.get(trace, 0) for trace in traces if trace is not _ROOT]
    return around[min(found)] if found and around else _ROOT


def _find_use_abstract_mesh() -> Callable[[AbstractMesh], contextlib.AbstractContextManager[Any]]:
    """Return the context manager that sets the abstract mesh; jax 0.7.0 does not publish it."""
    found: Any = getattr(jax.sharding, "use_abstract_mesh", None)
    if found is None:
        from jax._src import mesh

        found = mesh.use_abstract_mesh
    return found


use_abstract_mesh: Final = _find_use_abstract_mesh()


@contextlib.contextmanager
def at_trace(trace: Trace) -> Generator[None]:
    """Make a trace the current one, and hide the axes that are bound further inside."""
    context: Any = _src_core.trace_ctx
    before = context.axis_env
    with contextlib.ExitStack() as stack:
        if trace is _ROOT:
            axes: Any = _src_core.top_axis_env
            if any(kind == AxisType.Manual for kind in get_abstract_mesh().axis_types):
                stack.enter_context(use_abstract_mesh(AbstractMesh((), ())))
        else:
            axes = before
            for inner in all_traces(current_trace()):
                if inner is trace:
                    break
                axes = _without(axes, _axis_of(inner))
        context.set_axis_env(axes)
        stack.callback(context.set_axis_env, before)
        stack.enter_context(_src_core.set_current_trace(trace))
        yield


def _axis_of(trace: Trace) -> Any:
    """Return the name of the axis that a trace of vmap binds."""
    return getattr(getattr(trace, "axis_data", None), "name", None)


def _without(axes: Any, name: Any) -> Any:
    return axes.pop_pure(name) if name in axes.axis_sizes else axes


class _Hoisting(jax.core.Trace):
    """Sends each operation to the innermost trace among those of its operands.

    To JAX it looks like a trace that was opened in eager code.
    """

    def __init__(self, opened_in: Trace) -> None:
        super().__init__()
        self.parent_trace = _ROOT
        self.opened_in = opened_in

    def send(self, operands: Iterable[Any], params: dict[str, Any]) -> Trace:
        """Return the trace that handles an operation."""
        around = all_traces(self.opened_in)
        traces = [tracer_trace(x) for x in operands if is_tracer(x)]
        for name in _axis_names(params):
            traces.append(next((t for t in around if _axis_of(t) == name), around[0]))
        return innermost(traces, around)

    def stage_value(self, val: Any) -> Any:
        """Handle what is like an identity."""
        target = self.send([val], {})
        with at_trace(target):
            return target.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        """Tell the state of a value whose type has one."""
        return self.send([x], {}).cur_qdd(x)


def _axis_names(params: dict[str, Any]) -> set[Any]:
    """Return the names of mapped axes that an operation mentions, which are no operands."""
    bound: Any = _src_core.trace_ctx.axis_env.axis_sizes
    found: set[Any] = set()
    for value in params.values() if bound else ():
        names = value if isinstance(value, tuple) else (value,)
        names = [*names, *[getattr(e, "name", None) for e in getattr(value, "effects", ())]]
        found.update([n for n in names if isinstance(n, Hashable) and n in bound])
    return found


def _forward(method: str) -> Any:
    def process(self: _Hoisting, primitive: Any, *args: Any, **kwargs: Any) -> Any:
        operands: Any = next(a for a in args if isinstance(a, (list, tuple)))
        params = kwargs or next((a for a in args if isinstance(a, dict)), {})
        target = self.send(operands, params)
        if target is _ROOT and method in _CUSTOM:  # what it closes over decides for itself
            with _src_core.set_current_trace(self):
                return args[0].call_wrapped(*operands)
        with at_trace(target):
            return getattr(target, method)(primitive, *args, **kwargs)

    return process


_CUSTOM: Final = ("process_custom_jvp_call", "process_custom_vjp_call")
for _method in ("primitive", "call", "map", "shard_map", "custom_transpose"):
    setattr(_Hoisting, f"process_{_method}", _forward(f"process_{_method}"))
for _method in _CUSTOM:
    setattr(_Hoisting, _method, _forward(_method))


@contextlib.contextmanager
def hoisting_trace() -> Generator[None]:
    """Let each operation be handled at the outermost trace that its operands allow."""
    trace = _Hoisting(current_trace())
    try:
        with _src_core.set_current_trace(trace):
            yield
    finally:
        trace.opened_in = _ROOT  # what was made inside may outlive it, and keeps no trace alive


def opened_in(trace: Trace | None) -> Trace | None:
    """Return the trace that a hoisting one was opened in, and any other one itself."""
    while isinstance(trace, _Hoisting):
        trace = trace.opened_in
    return trace


def unsupported(what: str) -> UnsupportedJaxError:
    """Say what the installed JAX does not do."""
    return UnsupportedJaxError(
        f"jax {jax.__version__} does not behave as anabranch expects: {what}. "
        "Install a jax version that anabranch supports, or a newer anabranch."
    )
