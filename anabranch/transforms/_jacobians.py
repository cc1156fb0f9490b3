"""`jacfwd`, `jacrev` and `hessian`: the derivative of each output by each argument.

Directions are lanes of a `vmap` inside, but what the function writes is primal: it is the same for
all of them, and comes back once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack, overload

import jax

from anabranch._boundary import boundary
from anabranch.transforms._box import ONE_GROUP, array_leaves, finish, run_inside
from anabranch.transforms._call import flatten_call, positions
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._differentiated import Argument, Differentiated, listed
from anabranch.transforms._options import GradOptions, JacobianOptions
from anabranch.transforms._outputs import output_arrays, without_aux
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
Argnums = Argument | Sequence[Argument]


@overload
def jacfwd(
    function: Callable[P, object], /, **options: Unpack[JacobianOptions]
) -> Callable[P, Any]: ...
@overload
def jacfwd(
    **options: Unpack[JacobianOptions],
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
@boundary("jacfwd")
@checks_options("jacfwd")
def jacfwd(
    function: Any = None,
    /,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Any:
    """Return a function that computes the Jacobian, column by column, as `jax.jacfwd` does.

    What the function writes comes back once, as primal values.

    Arguments:
        function: returns arrays in plain containers, or `(output, aux)` with `has_aux`; aux can
            hold objects. Without it, `jacfwd` is a decorator.
        argnums: which arguments are differentiated: positions, names or `DiffState`. Of
            objects, the `Param`s are by default; of plain containers, every inexact array.
        has_aux: whether the function returns a pair.
        holomorphic: see `jax.jacfwd`.

    Returns:
        A function that returns the Jacobian, or `(jacobian, aux)` with `has_aux`: in the form of
        the output, with the derivative by the argument in the place of each array: a `State` for
        an object. Several argnums give a tuple there. The shape of each derivative is that of
        the output followed by that of the argument.

    Raises:
        FilterError: nothing is selected, or something that has no derivative.
        StructureError: the output holds an object, or something that is no array.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> v = ab.Param(jnp.array([1.0, 2.0]))
    >>> ab.jacfwd(lambda v: v**2)(v)[()].tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    remake = functools.partial(jacfwd, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic)
    if function is None:
        return remake
    options = {"holomorphic": holomorphic}
    return _jacobian(
        jax.jacfwd, function, argnums, has_aux, options, allow_int=False, remake=remake
    )


@overload
def jacrev(
    function: Callable[P, object], /, **options: Unpack[GradOptions]
) -> Callable[P, Any]: ...
@overload
def jacrev(
    **options: Unpack[GradOptions],
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
@boundary("jacrev")
@checks_options("jacrev")
def jacrev(
    function: Any = None,
    /,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Return a function that computes the Jacobian, row by row, as `jax.jacrev` does.

    See `jacfwd` for arguments and results.

    Arguments:
        allow_int: accept integer arrays where a filter selects them.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> v = ab.Param(jnp.array([1.0, 2.0]))
    >>> ab.jacrev(lambda v: v.sum())(v)[()].tolist()
    [1.0, 1.0]
    """
    remake = functools.partial(
        jacrev, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
    )
    if function is None:
        return remake
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _jacobian(
        jax.jacrev, function, argnums, has_aux, options, allow_int=allow_int, remake=remake
    )


@overload
def hessian(
    function: Callable[P, object], /, **options: Unpack[JacobianOptions]
) -> Callable[P, Any]: ...
@overload
def hessian(
    **options: Unpack[JacobianOptions],
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
@boundary("hessian")
@checks_options("hessian")
def hessian(
    function: Any = None,
    /,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Any:
    """Return a function that computes second derivatives, as `jax.hessian` does.

    See `jacfwd` for the arguments.

    Returns:
        A function that returns the Hessian, or `(hessian, aux)` with `has_aux`: for an object, a
        `State` of `State`s, read like `hessian["w"]["b"]`.

    >>> import anabranch as ab
    >>> model = {"a": ab.Param(2.0), "b": ab.Param(3.0)}
    >>> h = ab.hessian(lambda m: m["a"] ** 2 * m["b"])(model)
    >>> float(h["a"][()]["a"][()]), float(h["a"][()]["b"][()])
    (6.0, 4.0)
    """
    remake = functools.partial(hessian, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic)
    if function is None:
        return remake
    options: Any = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic}
    return jacfwd(jacrev(function, **options), **options)


def _jacobian(
    transform: Any,
    function: Any,
    argnums: Argnums,
    has_aux: bool,
    options: dict[str, Any],
    *,
    allow_int: bool,
    remake: Callable[[Any], Any],
) -> Any:
    single, chosen = listed(argnums)
    names = functools.partial(positions, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, args, kwargs)
        parts = Differentiated(flat, chosen, len(args), names, allow_int=allow_int)
        leaves = array_leaves(flat.leaves)

        def pick(result: Any) -> list[Any]:
            return jax.tree.leaves(output_arrays(result, has_aux=has_aux))

        def run(inputs: list[Any]) -> Any:
            full = parts.insert(leaves, inputs)
            inside = run_inside(flat.graphdef, full, ONE_GROUP, pick)
            return inside.picked, (inside.report, inside.groups)

        rows, (report, groups) = transform(run, has_aux=True, **options)(parts.inputs(leaves))
        result = finish(flat, report, groups)
        found = [parts.derivatives(row) for row in rows]
        tree = jax.tree.structure(without_aux(result, has_aux=has_aux))
        jacobian = tree.unflatten([row[0] if single else row for row in found])
        return (jacobian, result[1]) if has_aux else jacobian

    return wrap(call, function, remake, name=transform.__name__)
