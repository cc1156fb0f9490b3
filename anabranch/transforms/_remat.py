"""`remat`, also called `checkpoint`: intermediate values are computed again for the gradient.

JAX traces a checkpointed function once for each function object, so the function that it is given
is kept for each structure of the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax

from anabranch._boundary import boundary
from anabranch.errors import StructureError
from anabranch.graph import _classify
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaf_info import call_text
from anabranch.transforms._box import ONE_GROUP, array_leaves, array_outputs, finish, run_inside
from anabranch.transforms._call import Selection, flatten_call, with_static
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._names import name_inside
from anabranch.transforms._options import RematOptions
from anabranch.transforms._runners import Owned
from anabranch.transforms._worlds import input_values, resolve_inputs
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def remat(function: Callable[P, R], /, **options: Unpack[RematOptions]) -> Callable[P, R]: ...
@overload
def remat(**options: Unpack[RematOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary("remat")
@checks_options("remat")
def remat(
    function: Any = None,
    /,
    *,
    prevent_cse: bool | Sequence[bool] = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Compute intermediate values again for the gradient, in place of keeping them.

    A call equals the plain call; what the function writes is written once for each call, however
    often it is computed. `checkpoint` is another name for it; the arguments are those of
    `jax.checkpoint`.

    Arguments:
        function: a function, method or callable object; without it, `remat` is a decorator.
        prevent_cse: whether the compiler is kept from undoing it; or one for each argument, where
            the version of JAX takes that.
        policy: which values are kept nevertheless, one of `jax.checkpoint_policies`.
        static_argnums: positions of arguments that are static.
        static_argnames: names of arguments that are static.

    Raises:
        StructureError: an argument holds a `jax.Ref`, to which JAX would write twice.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> @ab.remat
    ... def block(model, x):
    ...     model["calls"].value += 1
    ...     return jnp.sin(model["w"] * x)
    >>> model = {"w": ab.Param(0.0), "calls": ab.Variable(0)}
    >>> float(ab.grad(block)(model, 2.0)["w"][()]), int(model["calls"])
    (2.0, 1)
    """
    remake = functools.partial(
        remat,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    if function is None:
        return remake
    static = Selection(function, static_argnums, static_argnames)
    owned = Owned(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        args_given, kwargs_given = with_static(static, args, kwargs)
        flat = flatten_call(function, args_given, kwargs_given)
        _refuse_refs(flat)

        def make() -> Any:
            own_cse = _for_each_leaf(flat, prevent_cse, static.of_args(args))
            return _checkpointed(flat.graphdef, function, policy=policy, prevent_cse=own_cse)

        report, groups = owned.call(flat.graphdef, make, *array_leaves(flat.leaves))
        return finish(flat, report, array_outputs(groups))

    return wrap(call, function, remake, name="remat")


checkpoint = remat


def _checkpointed(graphdef: GraphDef, function: Any, **options: Any) -> Any:
    def run(*leaves: Any) -> Any:
        inside = run_inside(graphdef, leaves, ONE_GROUP)
        return inside.report, inside.groups

    return jax.checkpoint(name_inside(run, function, graphdef), **options)


def _for_each_leaf(
    flat: Flat, prevent_cse: bool | Sequence[bool], static: Sequence[int]
) -> bool | tuple[bool, ...]:
    """Return `prevent_cse` for each leaf, if it is given for each argument that is not static."""
    if isinstance(prevent_cse, bool):
        return prevent_cse
    given = list(prevent_cse)
    for i in static:
        given.insert(i, True)
    return tuple(input_values(flat, resolve_inputs(flat, given, True, True, _as_bool)))


def _as_bool(value: Any, leaf: Any) -> bool:
    if not isinstance(value, bool):
        raise StructureError(f"prevent_cse is a bool, or one for each argument, not {value!r}")
    return value


def _refuse_refs(flat: Flat) -> None:
    for number, leaf in enumerate(flat.leaves):
        if _classify.rule_of(leaf) is _classify.REF:
            where = call_text(flat.graphdef.infos[number].path)
            raise StructureError(
                f"{where}: a jax.Ref cannot go through remat, which would "
                "run writes to it twice; hold the array in a Variable, or write to the Ref outside"
            )
