"""`custom_vjp`: a function whose reverse-mode derivative is given by two rules.

The residuals leave the forward rule as leaves and a graphdef, so that they can hold objects: the
backward rule gets copies of what they were. It runs in a trace of its own and must not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from anabranch._boundary import boundary
from anabranch.errors import CapturedWriteError, NodeTypeError, StaticValueError, StructureError
from anabranch.graph import _classify
from anabranch.graph._flatten import flatten, namer
from anabranch.graph._graphdef import GraphDef
from anabranch.transforms._box import ONE_GROUP, run_inside
from anabranch.transforms._call import check_functions
from anabranch.transforms._check_options import checks_options
from anabranch.transforms._custom_rules import (
    RESULT,
    Arguments,
    CustomRules,
    Plan,
    arguments_of,
    is_inexact,
    shapes_of_rule,
)
from anabranch.transforms._runners import Targets
from anabranch.transforms._tangents import TangentForm, avals_of

P = ParamSpec("P")
R = TypeVar("R")


class _Saved:
    """What the backward rule is called with: its residuals, and arguments without derivative."""

    __slots__ = ("graphdef", "leaves", "treedef")

    def __init__(self, leaves: Sequence[Any], static: tuple[GraphDef, Any]) -> None:
        self.leaves = leaves
        self.graphdef, self.treedef = static


jax.tree_util.register_pytree_node(
    _Saved,
    lambda saved: (tuple(saved.leaves), (saved.graphdef, saved.treedef)),
    lambda static, leaves: _Saved(leaves, static),
)


class _Held(NamedTuple):
    """What a backward rule is called with, but for the cotangent."""

    rule: Any
    nondiff: tuple[Any, ...]
    residuals: tuple[Any, ...]


class CustomVJP(CustomRules[P, R]):
    """A function with rules for reverse mode; see `custom_vjp`.

    >>> import anabranch as ab
    >>> cube = ab.custom_vjp(lambda x: x**3)
    >>> isinstance(cube, ab.CustomVJP), cube
    (True, <custom_vjp of ...>)
    """

    _kind = "custom_vjp"
    _definer = "defvjp"

    def defvjp(
        self,
        fwd: Callable[..., tuple[R, Any]],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Set the rules; the arguments are those of `jax.custom_vjp.defvjp`.

        Arguments:
            fwd: takes the arguments of the function, and returns `(result, residuals)`. What it
                writes comes back when the function is differentiated. Residuals are arrays,
                containers, statics, or objects, of which the backward rule gets copies.
            bwd: takes the arguments in `nondiff_argnums`, the residuals and the cotangent of the
                result, and returns a tuple with one cotangent for each differentiable argument.
                Cotangents of objects are States with the paths of inexact arrays, as `grad` gives
                them; what is missing is zero, and so is None. It must not write.
            symbolic_zeros: give `fwd` the array arguments as `CustomVJPPrimal`, and `bwd` a
                `SymbolicZero` for each cotangent that is known to be zero. Arrays that objects hold
                are given as they are.
            optimize_remat: see `jax.custom_vjp`.

        >>> import anabranch as ab
        >>> square = ab.custom_vjp(lambda x: x * x)
        >>> square.defvjp(lambda x: (x * x, x), lambda x, ct: (100.0 * ct,))
        >>> float(ab.grad(square)(3.0))
        100.0
        """
        check_functions("defvjp", fwd=fwd, bwd=bwd)
        self._rules = (fwd, bwd)
        self._symbolic_zeros, self._optimize_remat = symbolic_zeros, optimize_remat

    def _run(self, graphdef: GraphDef, arguments: Arguments, alone: bool, *leaves: Any) -> Any:
        primal = self._primal(graphdef)
        report, (shapes,) = primal.eval_shape(*leaves)
        rules: dict[Any, Any] = {}  # by what is perturbed

        def rule_for(perturbed: Any) -> tuple[Any, Plan]:
            if perturbed not in rules:
                rule = self._forward(graphdef, alone, perturbed)
                ruled, (own,), _ = shapes_of_rule(rule, *leaves)
                names = (self._name(), "its forward rule")
                both = Plan.of(graphdef, (report, ruled), names)
                both.outputs.check_types(leaves, (shapes, own), names)
                rules[perturbed] = rule, both
            return rules[perturbed]

        if alone:
            plan = Plan.of(graphdef, (report,), (self._name(),))
        else:
            all_perturbed = tuple(map(is_inexact, leaves)) if self._symbolic_zeros else None
            _, plan = rule_for(all_perturbed)
        avals = avals_of(leaves)
        backwards: dict[Any, Any] = {}  # JAX may run the rule once for each call

        @jax.custom_vjp
        def function(*leaves: Any) -> Any:
            _, (own,) = primal(*leaves)
            return plan.outputs.values(0, leaves, own)

        def forward(*leaves: Any) -> Any:
            perturbed = None
            if self._symbolic_zeros:
                perturbed = tuple([leaf.perturbed for leaf in leaves])
                leaves = tuple([leaf.value for leaf in leaves])
            rule, both = rule_for(perturbed)
            self._check_like(plan, both, "the forward rule")
            _, (own,), saved = rule(*leaves)
            return both.outputs.values(1, leaves, own), saved

        def backward(saved: Any, cotangents: Any) -> Any:
            given = cotangents[RESULT]
            traced = tuple([i for i, ct in enumerate(given) if not _is_static(ct)])
            key = (saved.graphdef, traced)  # (treedefs may have no hash)
            known, rule = backwards.get(key, (None, None))
            if rule is None or known != saved.treedef:
                rule = self._backward(graphdef, arguments, alone, plan, avals, saved, given)
                backwards[key] = saved.treedef, rule
            found = rule(list(saved.leaves), [given[i] for i in traced])
            return tuple([found.get(i) for i in range(len(avals))])

        function.defvjp(
            forward,
            backward,
            symbolic_zeros=self._symbolic_zeros,
            optimize_remat=self._optimize_remat,
        )
        return plan.report, function(*arguments.guard(leaves))

    def _forward(self, graphdef: GraphDef, alone: bool, perturbed: Any) -> Any:
        """Return the forward rule, of leaves, whose trace JAX keeps."""

        def run(*leaves: Any) -> Any:
            saved: list[_Saved] = []

            def call(made: Any) -> Any:
                args = arguments_of(made)
                marked = _Marked(leaves, perturbed)
                with self._tracing_rule(graphdef, alone=alone):
                    result = self._target(made, 1)(*map(marked.mark, args), **made.kwargs)
                marked.check()
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise StructureError(
                        f"the forward rule of {self._name()} returns a pair (result, residuals), "
                        f"but it returned a {type(result).__name__}"
                    )
                nondiff = tuple([x for x, g in zip(args, made.args, strict=True) if x is not g])
                saved.append(self._save(made.function[2], nondiff, result[1]))
                return result[0]

            inside = run_inside(graphdef, leaves, ONE_GROUP, call=call)
            return inside.report, inside.groups, saved[0]

        return jax.jit(run, inline=True)

    def _save(self, bwd: Any, nondiff: tuple[Any, ...], residuals: Any) -> _Saved:
        leaves, treedef = jax.tree.flatten(residuals, is_leaf=_classify.is_object)
        try:
            flat = flatten(_Held(bwd, nondiff, tuple(leaves)))
        except (NodeTypeError, StaticValueError) as error:
            raise type(error)(f"the residuals of {self._name()}: {error}") from None
        return _Saved(flat.leaves, (flat.graphdef, treedef))

    def _backward(
        self,
        graphdef: GraphDef,
        arguments: Arguments,
        alone: bool,
        plan: Plan,
        avals: Any,
        saved: _Saved,
        cotangents: Sequence[Any],
    ) -> Any:
        """Return the backward rule, from residuals and cotangents to cotangents by leaf."""
        static = {i: ct for i, ct in enumerate(cotangents) if _is_static(ct)}
        traced = [i for i in range(len(cotangents)) if i not in static]
        residual_def, treedef = saved.graphdef, saved.treedef
        refs = Targets((self._function, *self._rules)).refs

        def run(leaves: Sequence[Any], values: Sequence[Any]) -> dict[int, Any]:
            cts = static | dict(zip(traced, values, strict=True))
            by_slot = {slot: cts[at] for slot, at in plan.returned.items()}
            given: list[Any] = []

            def call(made: Any) -> None:
                bwd, nondiff, residuals = made
                bwd = Targets.resolve(bwd, refs)
                residuals = jax.tree.unflatten(treedef, residuals)
                cotangent = plan.form().fill(by_slot)
                with self._tracing_rule(graphdef, alone=alone, forward=False):
                    given.append(bwd(*nondiff, residuals, cotangent))

            inside = run_inside(residual_def, leaves, ONE_GROUP, call=call)
            changed = inside.report.delta.changed
            if changed:
                raise CapturedWriteError(
                    f"the backward rule of {self._name()} writes to a {changed[0][1].cls.__name__} "
                    f"({namer(residual_def)(changed[0][0])}), which would be lost: it must not "
                    "write. Write in the forward rule, or return what is computed as a cotangent"
                )
            return self._read(graphdef, arguments, avals, given[0])

        return jax.jit(run, inline=True)

    def _read(
        self, graphdef: GraphDef, arguments: Arguments, avals: Any, given: Any
    ) -> dict[int, Any]:
        count = len(arguments.edges)
        if not (isinstance(given, (tuple, list)) and len(given) == count):
            found = f"{len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
            raise StructureError(
                f"the backward rule of {self._name()} returns a tuple with one cotangent for each "
                f"of {count} differentiable arguments, but it returned {found}; None is zero"
            )
        by_leaf: dict[int, Any] = {}
        for (i, edge), cotangent in zip(arguments.edges, given, strict=True):
            cotangent = jax.tree.map(lambda x: None if type(x) is SymbolicZero else x, cotangent)
            TangentForm(graphdef, edge, f"the cotangent of args[{i}]", avals).read(
                cotangent, by_leaf
            )
        return by_leaf


_classify.declare(CustomVJP, _classify.STATIC)


def _is_static(cotangent: Any) -> bool:
    """Tell whether JAX gives a zero that is none of its arrays."""
    return type(cotangent) is SymbolicZero or jnp.result_type(cotangent) == jax.dtypes.float0


class _Marked:
    """Array arguments as `CustomVJPPrimal`, with `symbolic_zeros`."""

    def __init__(self, leaves: Sequence[Any], perturbed: Sequence[bool] | None) -> None:
        self._perturbed = perturbed
        self._number = {id(leaf): i for i, leaf in enumerate(leaves)}
        self._copies: list[tuple[Any, list[Any], Any]] = []

    def mark(self, argument: Any) -> Any:
        """Return an argument with its arrays marked; containers are copied."""
        if self._perturbed is None:
            return argument
        marked = jax.tree.map(self._primal, argument)
        if _classify.rule_of(argument) is not _classify.LEAF:
            self._copies.append((marked, *jax.tree.flatten(marked)))
        return marked

    def _primal(self, leaf: Any) -> Any:
        number = self._number.get(id(leaf))
        if number is None or self._perturbed is None:
            return leaf
        return CustomVJPPrimal(leaf, self._perturbed[number])

    def check(self) -> None:
        """Raise if a copy was written."""
        for marked, leaves, treedef in self._copies:
            now, structure = jax.tree.flatten(marked)
            if structure != treedef or any(a is not b for a, b in zip(now, leaves, strict=True)):
                raise StructureError(
                    "with symbolic_zeros, a forward rule gets copies of the containers among its "
                    "arguments, and has written to one, which would be lost; write to Variables"
                )


@overload
def custom_vjp(
    function: Callable[P, R],
    /,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> CustomVJP[P, R]: ...
@overload
def custom_vjp(
    *,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[P, R]], CustomVJP[P, R]]: ...
@boundary("custom_vjp")
@checks_options("custom_vjp")
def custom_vjp(
    function: Any = None,
    /,
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> Any:
    """Give a function its own rules for reverse mode, as `jax.custom_vjp` does.

    The function and its rules may read and write objects; the rules have the signatures that JAX
    gives them, see `CustomVJP.defvjp`. What the function writes comes back; when it is
    differentiated, it is the forward rule that runs, and what that writes comes back. Both are
    traced at the first call, and must leave the same structure.

    What the result reaches has cotangents: arrays, new objects, returned arguments. Everything else
    that is written is state, for which the backward rule has no place: it comes back as if by
    `jax.lax.stop_gradient`.

    Arguments:
        function: a function, method or callable object; without it, `custom_vjp` is a decorator.
            In a class body it makes a method, whose `self` is argument 0.
        nondiff_argnums: positions of arguments that are not differentiated, and are given to the
            backward rule first. Numbers in them are static.
        nondiff_argnames: names of such arguments.

    Raises:
        MissingRuleError: it is called before `defvjp`.
        StructureError: the function and a rule leave different structures; a cotangent does not
            fit; something is differentiated that is not differentiable here.
        CapturedWriteError: the backward rule writes.

    >>> import anabranch as ab
    >>> @ab.custom_vjp
    ... def scale(m, x):
    ...     return m["w"] * x
    >>> def forward(m, x):
    ...     m["seen"].value += 1
    ...     return scale(m, x), (m["w"].value, x)
    >>> def backward(residuals, ct):
    ...     w, x = residuals
    ...     return {"w": ab.State.from_flat({(): ct * x}), "seen": None}, ct * w
    >>> scale.defvjp(forward, backward)
    >>> m = {"w": ab.Param(3.0), "seen": ab.Variable(0)}
    >>> float(ab.grad(scale, argnums=1)(m, 2.0)), int(m["seen"])
    (3.0, 1)
    """
    if function is None:
        return lambda f: CustomVJP(f, nondiff_argnums, nondiff_argnames)
    return CustomVJP(function, nondiff_argnums, nondiff_argnames)
