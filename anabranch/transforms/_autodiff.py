"""`vjp`, `jvp` and `linearize`: writes come back once, at the call, as primal values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from anabranch._boundary import boundary
from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph._flatten import Flat
from anabranch.transforms._box import ONE_GROUP, array_leaves, finish, run_inside
from anabranch.transforms._call import check_functions, flatten_call
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._differentiated import (
    Differentiated,
    GradientForm,
    argument_edges,
    as_inexact,
    listed,
)
from anabranch.transforms._lifting import lifting
from anabranch.transforms._outputs import output_arrays
from anabranch.transforms._specs import DiffState
from anabranch.transforms._tangents import TangentForm, avals_of

Argnums = int | DiffState | Sequence[int | DiffState] | None


@boundary("vjp")
@checks_options("vjp")
@lifting
def vjp(
    function: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    argnums: Argnums = None,
) -> Any:
    """Compute the output of a function, and the function that pulls cotangents back.

    What the function writes comes back once, here. Of objects, the `Param`s are differentiated by
    default, of plain containers every inexact array.

    Arguments:
        function: returns arrays in plain containers, or `(output, aux)` with `has_aux`; aux can
            hold objects.
        *primals: its arguments.
        has_aux: whether the function returns a pair.
        argnums: which arguments are differentiated: positions or `DiffState`; None: all.

    Returns:
        `(output, pullback)`, or `(output, pullback, aux)` with `has_aux`. The pullback takes a
        cotangent in the form of the output and returns a tuple with the gradient of each
        differentiated argument, in the form that `grad` gives it: a `State` for an object, None
        for what is not differentiated.

    Raises:
        FilterError: nothing is selected, or something that has no gradient.
        StructureError: the output holds an object, or something that is no array.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(3.0)}
    >>> out, pullback = ab.vjp(lambda m, x: m["w"] * x, model, 2.0)
    >>> grads, dx = pullback(1.0)
    >>> float(out), float(grads["w"][()]), float(dx)
    (6.0, 2.0, 3.0)
    """
    check_functions("vjp", function=function)
    flat, parts, run = _prepare(function, primals, argnums, has_aux)
    inputs = parts.inputs(array_leaves(flat.leaves))
    _, pullback, (report, groups) = jax.vjp(run, inputs, has_aux=True)
    result = finish(flat, report, groups)
    output = result[0] if has_aux else result
    leaves, treedef = jax.tree.flatten(output)
    shapes = tuple([np.shape(leaf) for leaf in leaves])
    pull = Partial(_Pullback(parts.forms, treedef, shapes), pullback)
    return (result[0], pull, result[1]) if has_aux else (result, pull)


@boundary("jvp")
@checks_options("jvp")
@lifting
def jvp(
    function: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: bool = False,
) -> Any:
    """Compute the output of a function, and push tangents forward.

    What the function writes comes back once, as primal values.

    Arguments:
        function: returns arrays in plain containers, or `(output, aux)` with `has_aux`.
        primals: its arguments.
        tangents: one for each argument, in its form: a `State` for an object (paths that it lacks
            have a tangent of zero; it can name leaves of any kind), None for zero.
        has_aux: whether the function returns a pair.

    Returns:
        `(output, tangent)`, or `(output, tangent, aux)` with `has_aux`.

    Raises:
        StructureError: a tangent has another form, shape or dtype than its argument, or names a
            path that the object does not have; or the output holds an object.
        AliasError: one leaf is given two tangents.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(3.0), "b": ab.Param(1.0)}
    >>> tangent = {"w": ab.State.from_flat({(): 10.0}), "b": None}
    >>> out, change = ab.jvp(lambda m, x: m["w"] * x + m["b"], (model, 2.0), (tangent, 0.0))
    >>> float(out), float(change)
    (7.0, 20.0)
    """
    check_functions("jvp", function=function)
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise StructureError(
            "jvp takes a tuple or list of primals and one of tangents, not a "
            f"{type(primals).__name__} and a {type(tangents).__name__}"
        )
    flat = flatten_call(function, primals, {})
    found = _read_tangents(_tangent_forms(flat), tangents)
    leaves = array_leaves(flat.leaves)

    def run(*inputs: Any) -> Any:
        full = list(leaves)
        for number, leaf in zip(found, inputs, strict=True):
            full[number] = leaf
        return _run(flat, full, has_aux)

    pairs = [(as_inexact(leaves[number]), tangent) for number, tangent in found.items()]
    _, change, (report, groups) = jax.jvp(
        run, [primal for primal, _ in pairs], [jnp.asarray(t) for _, t in pairs], has_aux=True
    )
    result = finish(flat, report, groups)
    return (result[0], change, result[1]) if has_aux else (result, change)


@boundary("linearize")
@checks_options("linearize")
@lifting
def linearize(
    function: Callable[..., Any],
    *primals: Any,
    has_aux: bool = False,
    argnums: Argnums = None,
) -> Any:
    """Compute the output of a function, and its linear approximation, which can be called often.

    What the function writes comes back once, here.

    Arguments:
        function: returns arrays in plain containers, or `(output, aux)` with `has_aux`.
        *primals: its arguments.
        has_aux: whether the function returns a pair.
        argnums: which arguments can be given tangents: positions or `DiffState`; None: all. Of
            objects, those are the `Param`s, of plain containers every inexact array.

    Returns:
        `(output, pushforward)`, or `(output, pushforward, aux)` with `has_aux`. The pushforward
        takes a tangent for each argument of `argnums`, in the form that `jvp` takes it.

    Raises:
        FilterError: nothing is selected, or something that has no tangent.
        StructureError: the output holds an object; the pushforward is called with something
            that is no tangent of its arguments.

    >>> import anabranch as ab
    >>> v = ab.Param(3.0)
    >>> out, pushforward = ab.linearize(lambda v: v**2, v)
    >>> float(out), float(pushforward(ab.State.from_flat({(): 1.0})))
    (9.0, 6.0)
    """
    check_functions("linearize", function=function)
    flat, parts, run = _prepare(function, primals, argnums, has_aux)
    inputs = parts.inputs(array_leaves(flat.leaves))
    _, pushforward, (report, groups) = jax.linearize(run, inputs, has_aux=True)
    result = finish(flat, report, groups)
    forms = tuple(
        [
            TangentForm(form.graphdef, form.edge, f"tangents[{i}]", avals_of(flat.leaves))
            for i, form in enumerate(parts.forms)
        ]
    )
    push = Partial(_Pushforward(forms, tuple(parts.numbers)), pushforward)
    return (result[0], push, result[1]) if has_aux else (result, push)


def _prepare(
    function: Any, primals: Sequence[Any], argnums: Argnums, has_aux: bool
) -> tuple[Flat, Differentiated, Callable[[list[Any]], Any]]:
    flat = flatten_call(function, primals, {})
    _, chosen = listed(tuple(range(len(primals))) if argnums is None else argnums)
    parts = Differentiated(flat, chosen, len(primals), each=argnums is not None)
    leaves = array_leaves(flat.leaves)

    def run(inputs: list[Any]) -> Any:
        return _run(flat, parts.insert(leaves, inputs), has_aux)

    return flat, parts, run


def _run(flat: Flat, leaves: list[Any], has_aux: bool) -> Any:
    inside = run_inside(
        flat.graphdef, leaves, ONE_GROUP, lambda result: output_arrays(result, has_aux=has_aux)
    )
    return inside.picked, (inside.report, inside.groups)


class _Pullback(NamedTuple):
    """From the gradients of leaves to those of arguments; static, so that it can leave a trace."""

    forms: tuple[GradientForm, ...]
    treedef: Any  # of the output
    shapes: tuple[tuple[int, ...], ...]

    @boundary("pullback")
    def __call__(self, pullback: Any, cotangent: Any) -> tuple[Any, ...]:
        leaves, treedef = jax.tree.flatten(cotangent)
        shapes = tuple([np.shape(leaf) for leaf in leaves])
        if treedef != self.treedef or shapes != self.shapes:
            raise StructureError(
                bounded(
                    "a cotangent has the form of the output, which is "
                    f"{str(self.treedef)[:1000]} with shapes {str(self.shapes)[:500]}; found "
                    f"{str(treedef)[:1000]} with shapes {str(shapes)[:500]}"
                )
            )
        (gradients,) = pullback(cotangent)
        numbers = [number for form in self.forms for number, _ in form.infos]
        by_number = dict(zip(numbers, gradients, strict=True))
        return tuple([form.fill(by_number) for form in self.forms])


class _Pushforward(NamedTuple):
    """From the tangents of arguments to those of leaves."""

    forms: tuple[TangentForm, ...]
    numbers: tuple[int, ...]

    @boundary("pushforward")
    def __call__(self, pushforward: Any, *tangents: Any) -> Any:
        found = _read_tangents(self.forms, tangents)
        avals = self.forms[0].avals
        self._refuse_others(found)
        full = [found.get(n, jnp.zeros(*avals[n])) for n in self.numbers]
        return pushforward([jnp.asarray(tangent) for tangent in full])

    def _refuse_others(self, found: dict[int, Any]) -> None:
        graphdef = self.forms[0].graphdef
        others = [graphdef.infos[n] for n in found if n not in self.numbers]
        if others:
            rows = [f"{info.path[2:]!r} ({info.kind_text})" for info in others]
            raise StructureError(
                bounded(
                    "the function was not linearized with respect to these leaves:\n"
                    f"{first_few(rows)}\n"
                    "choose them with `linearize(..., argnums=DiffState(argnum, filter))`"
                )
            )


def _tangent_forms(flat: Flat) -> tuple[TangentForm, ...]:
    avals = avals_of(flat.leaves)
    edges = argument_edges(flat.graphdef)
    return tuple(
        [TangentForm(flat.graphdef, e, f"tangents[{i}]", avals) for i, e in enumerate(edges)]
    )


def _read_tangents(forms: Sequence[TangentForm], tangents: Sequence[Any]) -> dict[int, Any]:
    if len(forms) != len(tangents):
        raise StructureError(f"there are {len(forms)} arguments, but {len(tangents)} tangents")
    found: dict[int, Any] = {}
    for form, tangent in zip(forms, tangents, strict=True):
        form.read(tangent, found)
    return found
