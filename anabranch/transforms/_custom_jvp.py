"""`custom_jvp`: a function whose derivative is given by a rule for tangents."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from anabranch._boundary import boundary
from anabranch.errors import StructureError
from anabranch.graph import _classify
from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import ONE_GROUP, run_inside
from anabranch.transforms._call import check_functions
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._custom_rules import (
    RESULT,
    STATE,
    Arguments,
    CustomRules,
    Nondiff,
    Plan,
    arguments_of,
    derivative_form,
    is_inexact,
    shapes_of_rule,
)
from anabranch.transforms._tangents import TangentForm, avals_of

P = ParamSpec("P")
R = TypeVar("R")


class CustomJVP(CustomRules[P, R]):
    """A function with a rule for tangents; see `custom_jvp`.

    >>> import anabranch as ab
    >>> cube = ab.custom_jvp(lambda x: x**3)
    >>> isinstance(cube, ab.CustomJVP), cube
    (True, <custom_jvp of ...>)
    """

    _kind = "custom_jvp"
    _definer = "defjvp"

    def defjvp(
        self, jvp: Callable[..., tuple[Any, Any]], symbolic_zeros: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """Set the rule; the arguments are those of `jax.custom_jvp.defjvp`.

        Arguments:
            jvp: takes the arguments in `nondiff_argnums`, a tuple of primals and a tuple of
                tangents, and returns the result and its tangent. Tangents of objects are States
                with the paths of inexact arrays; in what is returned, None is zero. What it writes
                to the primals comes back when the function is differentiated.
            symbolic_zeros: give a `SymbolicZero` for each tangent that is known to be zero.

        Returns:
            The rule, so that this is a decorator.

        >>> import anabranch as ab
        >>> square = ab.custom_jvp(lambda x: x * x)
        >>> @square.defjvp
        ... def rule(primals, tangents):
        ...     return square(*primals), 100.0 * tangents[0]
        >>> float(ab.grad(square)(3.0))
        100.0
        """
        check_functions("defjvp", jvp=jvp)
        self._rules = (jvp,)
        self._symbolic_zeros = symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set a rule for each argument; their sum is the tangent, and None counts as zero.

        Arguments:
            jvps: each takes the tangent of its argument, the result, and all primals, and
                returns a tangent of the result.

        >>> import anabranch as ab
        >>> product = ab.custom_jvp(lambda x, y: x * y)
        >>> product.defjvps(lambda t, result, x, y: t * y, None)
        >>> [float(g) for g in ab.grad(product, argnums=(0, 1))(2.0, 3.0)]
        [3.0, 0.0]
        """
        if self._nondiff:
            raise StructureError("defjvps knows no nondiff_argnums: use defjvp")

        function = cast("Callable[..., Any]", self)

        def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
            result = function(*primals)
            if len(jvps) != len(primals):
                raise StructureError(
                    f"defjvps of {self._name()} was given {len(jvps)} rules, but the function was "
                    f"called with {len(primals)} arguments; None is a rule for zero"
                )
            pairs = zip(jvps, tangents, strict=True)
            terms = [rule(t, result, *primals) for rule, t in pairs if rule is not None]
            add = functools.partial(jax.tree.map, operator.add)
            return result, functools.reduce(add, terms) if terms else None

        self.defjvp(jvp)

    def _run(self, graphdef: GraphDef, arguments: Arguments, alone: bool, *leaves: Any) -> Any:
        primal = self._primal(graphdef)
        report, (shapes,) = primal.eval_shape(*leaves)
        inexact = tuple([i for i, leaf in enumerate(leaves) if is_inexact(leaf)])
        rules: dict[Any, Any] = {}  # by the leaves that have tangents

        def rule_for(moving: tuple[int, ...]) -> tuple[Any, Plan]:
            if moving not in rules:
                rule = self._rule(graphdef, arguments, alone, moving)
                ruled, (own,), _ = shapes_of_rule(rule, leaves, [leaves[i] for i in moving])
                names = (self._name(), "its rule")
                both = Plan.of(graphdef, (report, ruled), names)
                both.outputs.check_types(leaves, (shapes, own), names)
                rules[moving] = rule, both
            return rules[moving]

        plan = Plan.of(graphdef, (report,), (self._name(),)) if alone else rule_for(inexact)[1]

        @jax.custom_jvp
        def function(*leaves: Any) -> Any:
            _, (own,) = primal(*leaves)
            return plan.outputs.values(0, leaves, own)

        def differentiate(primals: Any, tangents: Any) -> Any:
            moving = tuple([i for i in inexact if type(tangents[i]) is not SymbolicZero])
            rule, both = rule_for(moving)
            self._check_like(plan, both, "the rule")
            _, (own,), tangent = rule(primals, [tangents[i] for i in moving])
            values = both.outputs.values(1, primals, own)
            return values, self._tangents(plan, values, tangent)

        function.defjvp(differentiate, symbolic_zeros=self._symbolic_zeros)
        return plan.report, function(*arguments.guard(leaves))

    def _rule(
        self, graphdef: GraphDef, arguments: Arguments, alone: bool, moving: tuple[int, ...]
    ) -> Any:
        """Return the rule, of leaves and tangents, whose trace JAX keeps."""

        def run(leaves: Sequence[Any], given: Sequence[Any]) -> Any:
            known = dict(zip(moving, given, strict=True))
            zero = SymbolicZero if self._symbolic_zeros else _zero
            tangents = [
                known[i] if i in known else zero(jax.typeof(leaf)) for i, leaf in enumerate(leaves)
            ]
            found: list[Any] = []

            def call(made: Any) -> Any:
                args = arguments_of(made)
                nondiff = [x for x, g in zip(args, made.args, strict=True) if type(g) is Nondiff]
                primals = tuple([args[i] for i, _ in arguments.edges])
                forms = [
                    derivative_form(graphdef, edge, f"args[{i}]", leaves)
                    for i, edge in arguments.edges
                ]
                by_leaf = dict(enumerate(tangents))
                with self._tracing_rule(graphdef, alone=alone):
                    result = self._target(made, 1)(
                        *nondiff, primals, tuple([form.fill(by_leaf) for form in forms])
                    )
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise StructureError(
                        f"the rule of {self._name()} returns a pair (result, tangent), but it "
                        f"returned a {type(result).__name__}"
                    )
                found.append(
                    jax.tree.map(lambda x: None if type(x) is SymbolicZero else x, result[1])
                )
                return result[0]

            inside = run_inside(graphdef, leaves, ONE_GROUP, call=call)
            return inside.report, inside.groups, found[0]

        return jax.jit(run, inline=True)

    def _tangents(self, plan: Plan, values: list[list[Any]], tangent: Any) -> list[list[Any]]:
        """Return a tangent for each output: what the rule says, and zeros for state."""
        returned = plan.returned
        outputs = avals_of(values[RESULT])
        none = ((), np.dtype(np.int32))
        avals = [
            outputs[returned[i]] if i in returned else none for i in range(len(plan.united.slots))
        ]
        form = TangentForm(
            plan.result, plan.result.root, f"the tangent of {self._name()}", tuple(avals)
        )
        found: dict[int, Any] = {}
        form.read(tangent, found)
        by_output = {returned[slot]: t for slot, t in found.items()}
        return [
            [by_output[i] if i in by_output else _zero(x) for i, x in enumerate(values[RESULT])],
            [_zero(x) for x in values[STATE]],
        ]


_classify.declare(CustomJVP, _classify.STATIC)


def _zero(value: Any) -> Any:
    """Return the tangent of a value that does not move."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros(value.shape, value.dtype)
    return np.zeros(value.shape, jax.dtypes.float0)


@overload
def custom_jvp(
    function: Callable[P, R],
    /,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> CustomJVP[P, R]: ...
@overload
def custom_jvp(
    *,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[P, R]], CustomJVP[P, R]]: ...
@boundary("custom_jvp")
@checks_options("custom_jvp")
def custom_jvp(
    function: Any = None,
    /,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> Any:
    """Give a function its own rule for tangents, as `jax.custom_jvp` does.

    The function and its rule may read and write objects; the rule has the signature that JAX
    gives it, see `CustomJVP.defjvp`. What the function writes comes back; when it is
    differentiated, it is the rule that runs, and what that writes comes back. Both are traced at
    the first call, and must leave the same structure.

    What the result reaches has tangents: arrays, new objects, returned arguments. Everything else
    that is written is state, for which the rule has no place: it comes back as if by
    `jax.lax.stop_gradient`.

    Arguments:
        function: a function, method or callable object; without it, `custom_jvp` is a decorator.
            In a class body it makes a method, whose `self` is argument 0.
        nondiff_argnums: positions of arguments that are not differentiated, and are given to the
            rule first. Numbers in them are static.
        nondiff_argnames: names of such arguments.

    Raises:
        MissingRuleError: it is called before `defjvp`.
        StructureError: the function and its rule leave different structures; a tangent does not
            fit; something is differentiated that is not differentiable here.

    >>> import anabranch as ab
    >>> @ab.custom_jvp
    ... def scale(m, x):
    ...     m["calls"].value += 1
    ...     return m["w"] * x
    >>> @scale.defjvp
    ... def rule(primals, tangents):
    ...     (m, x), (dm, dx) = primals, tangents
    ...     return scale(m, x), dm["w"][()] * x + m["w"] * dx
    >>> m = {"w": ab.Param(3.0), "calls": ab.Variable(0)}
    >>> float(ab.grad(scale, argnums=1)(m, 2.0)), int(m["calls"])
    (3.0, 1)
    """
    if function is None:
        return lambda f: CustomJVP(f, nondiff_argnums, nondiff_argnames)
    return CustomJVP(function, nondiff_argnums, nondiff_argnames)
