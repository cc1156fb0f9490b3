"""`jit`: one compiled function per structure of the arguments, called with a list of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from anabranch._boundary import boundary, hide_frames, leave
from anabranch.errors import StructureError
from anabranch.graph import _classify, _kinds
from anabranch.graph._build import Built
from anabranch.graph._delta import Diff
from anabranch.graph._filters import Filter
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import (
    ONE_GROUP,
    Assignment,
    Grouping,
    OneGroup,
    finish,
)
from anabranch.transforms._call import (
    Selection,
    check_functions,
    explain_failure,
    flatten_call,
    with_static,
)
from anabranch.transforms._check_options import as_sharding, check_sharding, checks_options
from anabranch.transforms._compiled import Compiled, Reports, Trace
from anabranch.transforms._donate import Asked, Donation
from anabranch.transforms._eval_shape import finish_on_copies
from anabranch.transforms._lifting import lifting
from anabranch.transforms._options import JitOptions
from anabranch.transforms._plan import AGAIN, read_stamps
from anabranch.transforms._plans import Plans
from anabranch.transforms._retraces import Retraces
from anabranch.transforms._specs import ABSENT, Resolved, values_of
from anabranch.transforms._worlds import input_values, resolve_inputs, resolve_outputs
from anabranch.transforms._wrap import Remade, rule_of_transformed

P = ParamSpec("P")
R = TypeVar("R")


class ShardingGroups(OneGroup):
    """Group the leaves that come out by sharding.

    The shardings of the result are known before the trace, those of written leaves are the ones
    that they came in with.
    """

    def __init__(self, inputs: Resolved, specs: Sequence[Any], result: Any) -> None:
        self._inputs, self._specs, self._result = inputs, specs, result
        self.shardings: list[Any] = [None]
        for sharding in (*specs, *map(check_sharding, values_of(result))):
            if sharding not in self.shardings:
                self.shardings.append(sharding)
        self.count = len(self.shardings)

    def assign(
        self, graphdef: GraphDef, twins: Built, found: Diff, leaves: Sequence[Any]
    ) -> Assignment:
        """Return the group of the sharding of each slot."""
        found_specs = resolve_outputs(
            graphdef, twins, found, self._inputs, self._result, None, as_sharding
        )
        return Assignment([self.shardings.index(spec.value) for spec in found_specs])

    def may_forward(self, leaf: int, group: int) -> bool:
        """A leaf stays as it is only if no sharding is asked for: it may come in another one."""
        return self.shardings[group] is None


class JitFunction(Remade, Generic[P, R]):
    """A function compiled by `jit`; methods of the same name do what those of `jax.jit` do.

    >>> import anabranch as ab
    >>> double = ab.jit(lambda v: v * 2)
    >>> isinstance(double, ab.JitFunction), float(double(ab.Param(1.0)))
    (True, 2.0)
    """

    __wrapped__: Callable[P, R]  # the function

    def __init__(self, function: Callable[P, R], options: dict[str, Any]) -> None:
        self._function = function
        self._static = Selection(
            function, options.pop("static_argnums", None), options.pop("static_argnames", None)
        )
        self._donated = Asked(function, options)
        self._in_shardings = options.pop("in_shardings", None)
        self._out_shardings = options.pop("out_shardings", None)
        self._options = options
        self._compiled: dict[GraphDef, Compiled] = {}
        self._plans = Plans(function, self._static)
        self._followers = self._plans.followers
        self._retraces = Retraces()
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            follow = self._followers.get(id(args[0])) if args else None
            if follow is None:
                follow = self._followers.get(0)
            if follow is not None:
                result = follow(args, kwargs)
                if result is not AGAIN:
                    return result
            result = self._plans.call(args, kwargs)
            return self._walk(args, kwargs) if result is AGAIN else result
        except Exception as error:
            leave(error, "jit", self._function)
            raise

    @lifting
    def _walk(self, args: Any, kwargs: Any) -> Any:
        """Call without a plan, and leave one."""
        stamps = read_stamps()
        flat = self._flatten(args, kwargs)
        compiled = self._compiled_for(flat, args)
        reports = compiled.reports
        try:
            outputs = reports.outputs(compiled.function(*flat.leaves))
        except Exception as error:
            explain_failure(flat, error)
            raise
        report = reports.read(outputs)
        result = self._plans.finish(args, kwargs, flat, stamps, compiled, report, outputs)
        return finish(flat, report, [outputs]) if result is AGAIN else result

    def _flatten(self, args: Any, kwargs: Any) -> Flat:
        args, kwargs = with_static(self._static, args, kwargs)
        return flatten_call(self._function, args, kwargs)

    def _compiled_for(self, flat: Flat, args: Sequence[Any]) -> Any:
        compiled = self._compiled.get(flat.graphdef)
        if compiled is None:
            self._retraces.note(flat.graphdef, self._function)
            compiled = self._compiled.setdefault(flat.graphdef, self._compile(flat, args))
        return compiled

    def _compile(self, flat: Flat, args: Sequence[Any]) -> Any:
        grouping: Grouping = ONE_GROUP
        options = dict(self._options)
        if self._in_shardings is not None or self._out_shardings is not None:
            shardings = self._in_shardings
            if isinstance(shardings, (tuple, list)):
                shardings = self._without_static(shardings, args)
            inputs = resolve_inputs(flat, shardings, None, None, as_sharding)
            specs = input_values(flat, inputs)
            result = ABSENT if self._out_shardings is None else self._out_shardings
            grouping = groups = ShardingGroups(inputs, specs, result)
            options["in_shardings"] = tuple(specs)
            first, *others = groups.shardings
            options["out_shardings"] = (first, *others) if others else first
        compiled = Compiled(self._function, flat.graphdef, grouping, options)
        if self._donated:
            compiled.function = Donation(compiled, flat, self._donated.leaves(flat, args))
        return compiled

    def _without_static(self, shardings: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Give static arguments, which take no place in `in_shardings`, a sharding of None."""
        given = iter(shardings)
        static = set(self._static.of_args(args))
        full = [None if i in static else next(given, None) for i in range(len(args))]
        return (*full, *given)

    @boundary("jit.lower")
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Trace and lower the function for these arguments; they are not changed.

        >>> import anabranch as ab
        >>> step = ab.jit(lambda v: v * 2)
        >>> compiled = step.lower(ab.Param(1.0)).compile()
        >>> float(compiled(ab.Param(3.0)))
        6.0
        """
        return self.trace(*args, **kwargs).lower()

    @boundary("jit.trace")
    @lifting
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[R]:
        """Trace the function for these arguments; they are not changed.

        >>> import anabranch as ab
        >>> len(ab.jit(lambda v: v * 2).trace(ab.Param(1.0)).jaxpr.eqns)
        1
        """
        flat = self._flatten(args, kwargs)
        compiled = self._compiled_for(flat, args)
        traced = compiled.function.trace(*flat.leaves)
        return Traced(traced, self, flat.graphdef, compiled.reports)

    @boundary("jit.eval_shape")
    @lifting
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return what a call would return, with `jax.ShapeDtypeStruct` in place of arrays.

        The arguments are not changed; where the result refers to them, it refers to copies.

        >>> import anabranch as ab
        >>> ab.jit(lambda v: [v]).eval_shape(ab.Param(1.0))[0].value.shape
        ()
        """
        flat = self._flatten(args, kwargs)
        compiled = self._compiled_for(flat, args)
        outputs = compiled.reports.outputs(compiled.function.eval_shape(*flat.leaves))
        return finish_on_copies(flat, compiled.reports.read(outputs), [outputs])

    def clear_cache(self) -> None:
        """Drop everything that was compiled.

        >>> import anabranch as ab
        >>> ab.jit(abs).clear_cache()
        """
        self._compiled.clear()
        self._plans.clear()

    def recent_traces(self) -> list[Trace]:
        """Return what the function was traced for, last one last; see `debug.explain_retrace`.

        >>> import anabranch as ab
        >>> double = ab.jit(lambda x: x * 2)
        >>> _ = double(1.0), double(2.0)
        >>> len(double.recent_traces())
        1
        """
        return sorted([trace for kept in [*self._compiled.values()] for trace in kept.traces])

    @overload
    def __get__(self, obj: None, cls: type) -> JitFunction[P, R]: ...
    @overload
    def __get__(self, obj: object, cls: type) -> BoundJitFunction: ...
    def __get__(self, obj: object, cls: type) -> Any:
        return self if obj is None else BoundJitFunction(self, obj)

    def __repr__(self) -> str:
        return f"<jit of {getattr(self._function, '__qualname__', self._function)}>"


class BoundJitFunction:
    """A `jit`-compiled method, bound to its object."""

    __slots__ = ("__func__", "__self__", "__weakref__")

    def __init__(self, function: JitFunction[Any, Any], obj: object) -> None:
        self.__func__, self.__self__ = function, obj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    def __eq__(self, other: object) -> bool:  # like a bound method: JAX caches by equality
        return (
            isinstance(other, BoundJitFunction)
            and other.__self__ is self.__self__
            and other.__func__ is self.__func__
        )

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__func__))

    @boundary("jit.lower")
    def lower(self, *args: Any, **kwargs: Any) -> Lowered[Any]:
        """See `JitFunction.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    @boundary("jit.trace")
    def trace(self, *args: Any, **kwargs: Any) -> Traced[Any]:
        """See `JitFunction.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    @boundary("jit.eval_shape")
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """See `JitFunction.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return self.__func__.__wrapped__.__get__(self.__self__)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r}>"


@overload
def jit(function: Callable[P, R], /, **options: Unpack[JitOptions]) -> JitFunction[P, R]: ...
@overload
def jit(**options: Unpack[JitOptions]) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...
@boundary("jit")
@checks_options("jit")
def jit(
    function: Any = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    donate: Filter | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compile a function that may read and write objects; the arguments are those of `jax.jit`.

    A call equals the plain call: values, attributes, aliases, and which object is which.

    Arguments:
        function: a function, method, callable object, or None to use `jit` as a decorator with
            arguments. In a class body it makes a method.
        in_shardings: a sharding for all arguments, or one for each, containers of them, or
            `StateSharding`.
        out_shardings: the same for what is returned.
        static_argnums: positions of arguments that are static.
        static_argnames: names of arguments that are static.
        donate_argnums: positions of arguments whose buffers may be used again. Of objects, only
            arrays that the function writes are donated.
        donate_argnames: names of such arguments.
        donate: "written", for the buffers of all arrays of objects that the call replaces; or a
            filter, for those of them that it selects by path (below the argument) and kind.
        keep_unused: keep arguments that the function does not use.
        inline: inline the function into outer compiled ones.
        compiler_options: for the compiler.

    Raises:
        NodeTypeError: an argument is neither an array, a node, a value nor a static.
        CapturedWriteError: the function writes an object that is none of its arguments.
        FilterError: `donate` selects nothing.
        DeletedArrayError: an argument holds an array that was donated to another call.

    >>> import anabranch as ab
    >>> @ab.jit
    ... def swap(m):
    ...     m["a"], m["b"] = m["b"], m["a"]
    >>> m = {"a": ab.Param(1.0), "b": ab.Param(2.0)}
    >>> a = m["a"]
    >>> swap(m)
    >>> m["b"] is a
    True
    """
    options: dict[str, Any] = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "donate": donate,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    if compiler_options is not None:
        options["compiler_options"] = compiler_options
    remake = functools.partial(_make, options=options)
    return remake if function is None else remake(function)


def _make(function: Callable[P, R], options: dict[str, Any]) -> JitFunction[P, R]:
    check_functions("jit", function=function)
    made = JitFunction(function, dict(options))
    made._remake = functools.partial(_make, options=options)
    return made


_classify.declare_look(JitFunction, rule_of_transformed)
_classify.declare(BoundJitFunction, _kinds.METHOD)


class _Staged(Generic[R]):
    """A stage of compilation, with what is needed to call it with objects."""

    def __init__(
        self, stage: Any, owner: JitFunction[Any, R], graphdef: GraphDef, reports: Reports
    ) -> None:
        self._stage, self._known = stage, (owner, graphdef, reports)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Traced(_Staged[R]):
    """A traced function: `jaxpr`, `out_info` and `lower`, as in `jax.stages.Traced`."""

    def lower(self, **options: Any) -> Lowered[R]:
        """Lower to a computation that can be compiled."""
        return Lowered(self._stage.lower(**options), *self._known)


class Lowered(_Staged[R]):
    """A lowered function: `as_text`, `compile` and more, as in `jax.stages.Lowered`."""

    def compile(self, **options: Any) -> CompiledCall[R]:
        """Compile to something that can be called with objects."""
        return CompiledCall(self._stage.compile(**options), *self._known)


class CompiledCall(_Staged[R]):
    """A compiled function, for objects of the structure that it was compiled for."""

    @boundary("jit.compiled")
    def __call__(self, *args: Any, **kwargs: Any) -> R:
        owner, graphdef, reports = self._known
        flat = owner._flatten(args, kwargs)
        if flat.graphdef is not graphdef:
            raise StructureError(
                "the arguments have another structure than those that the function was compiled "
                "for; static arguments are part of it and must be given again"
            )
        outputs = reports.outputs(self._stage(*flat.leaves))
        return finish(flat, reports.read(outputs), [outputs])
