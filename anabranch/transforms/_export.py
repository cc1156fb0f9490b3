"""`export`: a compiled function as a program for a file, which is called with objects.

The program is a pure one, of the arrays. What makes a call of it, the structure of the arguments
and what the function does to them, is kept beside it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.export

from anabranch._boundary import boundary
from anabranch.errors import ArgumentError, MissingExtraError, StructureError
from anabranch.graph import _static
from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import Report, finish
from anabranch.transforms._jit import BoundJitFunction, JitFunction
from anabranch.transforms._lifting import lifting

_FUNCTION = "the function"


class _Pickler(pickle.Pickler):
    """Leaves the function of the user out: under its name there is what `jit` has made of it."""

    def __init__(self, file: io.BytesIO, owner: JitFunction[..., Any]) -> None:
        super().__init__(file)
        self._function = owner.__wrapped__

    def persistent_id(self, obj: Any) -> str | None:
        return _FUNCTION if obj is self._function else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, owner: JitFunction[..., Any]) -> None:
        super().__init__(file)
        self._function = owner.__wrapped__

    def persistent_load(self, pid: Any) -> Any:
        return self._function


class Exported:
    """An exported function; made by `export`, or by `Exported.deserialize` from bytes.

    >>> import anabranch as ab
    >>> exported = ab.export(ab.jit(lambda v: v * 2))(ab.Param(1.0))
    >>> float(exported.call(ab.Param(4.0)))
    8.0
    """

    def __init__(
        self, owner: JitFunction[..., Any], graphdef: GraphDef, report: Report, program: Any
    ) -> None:
        self._owner, self._graphdef, self._report = owner, graphdef, report
        self.program: jax.export.Exported = program
        """What JAX has exported: a function of the arrays."""

    @boundary("export.call")
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program with objects of the structure, shapes and dtypes that it was made for.

        Raises:
            StructureError: the arguments have another structure.

        >>> import anabranch as ab
        >>> def step(v):
        ...     v.value += 1
        >>> v = ab.Variable(1.0)
        >>> ab.export(ab.jit(step))(v).call(v)
        >>> float(v)
        2.0
        """
        flat = self._owner._flatten(args, kwargs)
        if flat.graphdef != self._graphdef:
            raise StructureError(
                "the arguments have another structure than those that the function was exported "
                "for; static arguments are part of it and must be given again"
            )
        groups: Any = self.program.call(*flat.leaves)
        return finish(flat, self._report, groups)

    @boundary("export.serialize")
    def serialize(self) -> bytes:
        """Return the program as bytes, for `deserialize`.

        The function, and the classes of the objects, are referred to by their names in modules.

        Raises:
            ArgumentError: something has no such name, as a lambda or a local class has none.
            MissingExtraError: flatbuffers is not installed, which JAX needs for this.

        >>> import anabranch as ab
        >>> exported = ab.export(ab.jit(abs))(-1.0)
        >>> float(ab.Exported.deserialize(exported.serialize()).call(-3.0))
        3.0
        """
        with _needs_extra():
            program = bytes(self.program.serialize())
        report = _static.pack((self._report.delta, self._report.sources))
        data = io.BytesIO()
        try:
            pickle.dump(self._owner, data)
            _Pickler(data, self._owner).dump((self._graphdef, report, program))
            return data.getvalue()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"the exported function cannot be written as bytes: {error}. Define the function "
                "and the classes of its arguments at the top of a module, by their own names"
            ) from error

    @classmethod
    @boundary("export.deserialize")
    def deserialize(cls, data: bytes | bytearray) -> Exported:
        """Return what was exported from bytes. Like any pickle, they must come from a friend.

        >>> import anabranch as ab
        >>> data = ab.export(ab.jit(abs))(-1).serialize()
        >>> int(ab.Exported.deserialize(data).call(-3))
        3
        """
        file = io.BytesIO(data)
        owner = pickle.load(file)
        graphdef, report, program = _Unpickler(file, owner).load()
        report = Report(*_static.unpack(report))
        with _needs_extra():
            return cls(owner, graphdef, report, jax.export.deserialize(bytearray(program)))


@contextlib.contextmanager
def _needs_extra() -> Generator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            "to write an exported function as bytes, or to read one, JAX needs flatbuffers: "
            "pip install 'anabranch[export]'"
        ) from error


@boundary("export")
def export(
    function: Callable[..., Any], *, platforms: Sequence[str] | None = None
) -> Callable[..., Exported]:
    """Return a function that exports a call of a compiled function, as `jax.export.export` does.

    The function is traced for the arguments that are given then, which are not changed. What is
    exported can be called with other objects of the same structure, and what it writes comes back.

    Arguments:
        function: made by `jit`; or a method that was.
        platforms: for which to lower, "cpu", "cuda", "tpu" and such; None for the one in use.

    Returns:
        A function from arguments to an `Exported`.

    Raises:
        ArgumentError: the function was not made by `jit`.

    >>> import anabranch as ab
    >>> class Counter(ab.Module):
    ...     def __init__(self):
    ...         self.n = ab.Variable(0)
    >>> @ab.jit
    ... def count(counter, by):
    ...     counter.n.value += by
    ...     return counter.n.value
    >>> exported = ab.export(count)(Counter(), 1)
    >>> counter = Counter()
    >>> [int(exported.call(counter, 5)) for _ in range(3)], int(counter.n)
    ([5, 10, 15], 15)
    """
    bound: tuple[Any, ...] = ()
    if isinstance(function, BoundJitFunction):
        function, bound = function.__func__, (function.__self__,)
    if not isinstance(function, JitFunction):
        raise ArgumentError(
            f"export: expected a function made by `jit`, found one of type "
            f"{type(function).__name__}: write `export(jit(f))`"
        )
    owner: JitFunction[..., Any] = function

    @boundary("export", owner.__wrapped__)
    @lifting
    def exporting(*args: Any, **kwargs: Any) -> Exported:
        flat = owner._flatten((*bound, *args), kwargs)
        compiled = owner._compiled_for(flat, (*bound, *args))
        reports: list[Report] = []

        def run(*leaves: Any) -> Any:
            report, groups = compiled.inside(*leaves)
            reports.append(report)
            return groups

        options = dict(compiled.options)
        if compiled.reports.groups == 1 and "out_shardings" in options:
            options["out_shardings"] = (options["out_shardings"],)
        make = jax.export.export(jax.jit(run, **options), platforms=platforms)
        program = make(*flat.leaves)
        return Exported(owner, flat.graphdef, reports[-1], program)

    return exporting
