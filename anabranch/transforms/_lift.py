"""`lift`: a graph-aware version of any transform from functions to functions.

The transform is given a function of lists of arrays. Nothing is known about what it does to them,
so every array that the function leaves behind goes through it, and what comes out of it for an
object of the caller is checked, as far as one can tell, before it is written.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from anabranch.errors import AnabranchError, StructureError, bounded
from anabranch.graph._graphdef import Edge, GraphDef
from anabranch.transforms._box import array_leaves
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._differentiated import leaves_below
from anabranch.transforms._names import name_inside
from anabranch.transforms._outcome import Outcome, finish_outcomes, run_to_outcome
from anabranch.transforms._runners import Owned
from anabranch.transforms._wrap import wrap


def lift(transform: Callable[..., Any], /) -> Callable[..., Any]:
    """Make a transform from functions to functions work with functions of objects.

    The transform is given a function that takes, in the place of each argument, the list of its
    arrays, and returns one pytree of arrays. An array that several arguments reach belongs to the
    first. What the function itself holds (a bound `self`) is closed over, as it would be for JAX.
    So `in_axes=(0, None)` says what it always says; what says something about the result must be
    one value for all of it (`out_axes=0`).

    What the function writes or returns comes out of the transform as any output does: if it
    scales the outputs, then also what is written is scaled. If it changes shapes, as
    `jax.vmap` does, an array of an object can be written only where it comes out along the axis
    that it went in along; what is broadcast cannot be written.

    If the transform returns the result several times (a value and its derivatives, say), the first
    is the one whose writes count.

    Arguments:
        transform: called as `transform(function, *args, **kwargs)`. For options given in advance
            use `functools.partial`.

    Returns:
        A function like the transform. Functions that it transforms are transformed once for each
        structure of the arguments, unless they hold arrays themselves.

    Raises:
        StructureError: the transform does not take such a function, or writes cannot be expressed.

    >>> import anabranch as ab, functools, jax, jax.numpy as jnp
    >>> def count(model, x):
    ...     model["n"].value += 1
    ...     return model["w"] * x
    >>> model = {"w": ab.Param(2.0), "n": ab.Variable(0)}
    >>> float(ab.lift(jax.named_call)(count, name="count")(model, 3.0)), int(model["n"])
    (6.0, 1)
    >>> lanes = ab.lift(functools.partial(jax.vmap, in_axes=(None, 0)))
    >>> lanes(lambda m, x: m["w"] * x)(model, jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """

    check_functions("lift", transform=transform)

    def lifted(function: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        remake = functools.partial(_lifted, functools.partial(_apply, transform, args, kwargs))
        return remake if function is None else remake(function)

    return lifted


def _apply(transform: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
    return transform(run, *args, **kwargs)


def _lifted(transform: Callable[[Any], Any], function: Any) -> Any:
    owned = Owned(function)
    remake = functools.partial(_lifted, transform)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, args, kwargs)
        leaves = array_leaves(flat.leaves)
        inputs = _Inputs(flat.graphdef)
        shapes = tuple([np.shape(leaf) for leaf in leaves])
        key = (flat.graphdef, shapes)

        def make() -> Any:
            hidden = [leaves[number] for number in inputs.hidden]
            run = name_inside(_boxed(flat.graphdef, inputs, hidden, shapes), function)
            return functools.partial(_call, transform(run))

        positional, named = inputs.of(leaves)
        if inputs.hidden:  # closed over, so that it is of this call only
            output = make()(positional, named)
        else:
            output = owned.call(key, make, positional, named)
        return finish_outcomes(flat, leaves, output)

    return wrap(call, function, remake, name="lift")


class _Inputs:
    """Which argument each leaf belongs to."""

    def __init__(self, graphdef: GraphDef) -> None:
        self._count = graphdef.num_leaves
        call: Any = graphdef.root
        _, args, kwargs = graphdef.entries[call].edges
        seen: set[int] = set()

        def own(edge: Edge) -> list[int]:
            below = [~cast("int", visit.edge) for visit in leaves_below(graphdef, edge)]
            new = [number for number in dict.fromkeys(below) if number not in seen]
            seen.update(new)
            return new

        def edges(entry: Edge) -> dict[Any, Edge]:
            if not isinstance(entry, int):
                return {}
            return dict(
                zip(graphdef.entries[entry].keys, graphdef.entries[entry].edges, strict=True)
            )

        self.positional = [own(edge) for edge in edges(args).values()]
        self.named = {name: own(edge) for name, edge in edges(kwargs).items()}
        self.hidden = [number for number in range(self._count) if number not in seen]

    def of(self, leaves: Sequence[Any]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Return the leaves of each argument."""
        positional = [[leaves[n] for n in numbers] for numbers in self.positional]
        return positional, {k: [leaves[n] for n in v] for k, v in self.named.items()}

    def join(self, positional: Any, named: Any, hidden: Sequence[Any]) -> list[Any]:
        """Return all leaves in their order."""
        leaves: list[Any] = [None] * self._count
        numbers = [*self.positional, *self.named.values(), self.hidden]
        given = [*positional, *[named[name] for name in self.named], hidden]
        for some_numbers, some in zip(numbers, given, strict=True):
            for number, leaf in zip(some_numbers, some, strict=True):
                leaves[number] = leaf
        return leaves


def _boxed(
    graphdef: GraphDef, inputs: _Inputs, hidden: Sequence[Any], shapes: Sequence[Any]
) -> Callable[..., Outcome]:
    def run(*positional: Any, **named: Any) -> Outcome:
        leaves = inputs.join(positional, named, hidden)
        try:
            return run_to_outcome(graphdef, leaves, shapes)
        except BaseException as error:
            _RAISED.error = error
            raise

    return run


class _Raised(threading.local):
    error: BaseException | None = None


_RAISED = _Raised()  # the last error of a function: all others come from its transform


def _call(transformed: Any, positional: Any, named: Any) -> Any:
    try:
        return transformed(*positional, **named)
    except (TypeError, ValueError) as error:
        if error is _RAISED.error or isinstance(error, AnabranchError):
            raise
        raise StructureError(
            bounded(
                f"the lifted transform failed: {error}\n"
                "It was given a function that takes a list of arrays for each argument, and "
                "returns one pytree of arrays; a specification for the result must be one value "
                "for all of it"
            )
        ) from error
    finally:
        _RAISED.error = None
