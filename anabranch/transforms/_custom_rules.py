"""What `custom_vjp` and `custom_jvp` share: the call, and the union of function and rule.

The function and its rule may write different things, but JAX wants both to return the same. So both
are traced first, and each returns the union. A rule usually calls the function that it belongs to;
that inner call must not trace the rule again, and takes what the function alone does.

The arrays that the result reaches are what the rule is about: each is an output of its own, with
its own cotangent or tangent. Everything else that is written is state, and has no derivative.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from anabranch._boundary import leave
from anabranch._jax import use_abstract_mesh
from anabranch.errors import MissingRuleError, StructureError
from anabranch.graph import _classify, _kinds
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._kinds import Kind
from anabranch.graph._leaf_info import LeafInfo
from anabranch.transforms._box import ONE_GROUP, Report, array_leaves, finish, run_inside
from anabranch.transforms._call import Selection, check_functions, flatten_call
from anabranch.transforms._differentiated import (
    GradientForm,
    argument_edges,
    leaves_below,
)
from anabranch.transforms._lifting import lifting
from anabranch.transforms._names import leaf_name
from anabranch.transforms._runners import Runners, Targets
from anabranch.transforms._union import Outputs, United, outputs_of, unite

P = ParamSpec("P")
R = TypeVar("R")

RESULT, STATE = 0, 1

_RUNNERS = Runners(128)
"""Not owned by the functions: JAX's caches would reach their own keys through the rules."""


class Nondiff:
    """An argument that is not differentiated; numbers in it are static."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_classify.declare(Nondiff, _kinds.OBJECT)


class Plan(NamedTuple):
    """What a call returns, whether the function or its rule is run."""

    united: United
    outputs: Outputs
    result: GraphDef  # the return value, with slots as leaves

    @classmethod
    def of(cls, graphdef: GraphDef, reports: Sequence[Report], names: Sequence[str]) -> Plan:
        """Make a plan for the union of what the function and its rule do."""
        united = unite(graphdef, reports, names, results=True)
        delta = united.delta
        changed = dict(delta.changed)
        known = [changed.get(i, entry) for i, entry in enumerate(graphdef.entries)]
        result = GraphDef((*known, *delta.new), delta.root, delta.num_slots)
        returned = {visit.edge for visit in leaves_below(result, result.root)}
        outputs = outputs_of(
            united,
            lambda slot: RESULT if ~slot in returned else STATE,
            count=2,
            share=lambda group: group == STATE,
        )
        return cls(united, outputs, result)

    @property
    def report(self) -> Report:
        """The report for step 4."""
        return self.outputs.report(self.united)

    @property
    def returned(self) -> dict[int, int]:
        """By slot, the number of each output that belongs to the result."""
        count = len(self.outputs.groups[RESULT])
        return {i: ~s for i, s in enumerate(self.outputs.sources) if s < 0 and ~s < count}

    def is_like(self, other: Plan) -> bool:
        """Tell whether another plan returns the same."""
        own, others = self.outputs, other.outputs
        return self.united.delta == other.united.delta and own.sources == others.sources

    def form(self) -> GradientForm:
        """Return the form of the result."""
        infos = [(slot, self.result.infos[slot]) for slot in self.returned]
        return GradientForm(self.result, self.result.root, "the return value", tuple(infos))


class Arguments(NamedTuple):
    """The leaves of a call by what becomes of them."""

    edges: tuple[tuple[int, Any], ...]  # of the arguments that are differentiated
    nondiff: tuple[int, ...]
    undifferentiable: tuple[tuple[int, str], ...]  # leaves for which a rule has no place

    @classmethod
    def of(cls, graphdef: GraphDef, leaves: Sequence[Any], nondiff: Sequence[int]) -> Arguments:
        """Sort the leaves of a call."""
        edges = [(i, e) for i, e in enumerate(argument_edges(graphdef)) if i not in nondiff]
        own = {visit.edge for _, edge in edges for visit in leaves_below(graphdef, edge)}
        rest = [i for i, leaf in enumerate(leaves) if ~i not in own and is_inexact(leaf)]
        names = [(i, leaf_name(graphdef.infos[i])) for i in rest]
        return cls(tuple(edges), tuple(nondiff), tuple(names))

    def guard(self, leaves: Sequence[Any]) -> list[Any]:
        """Return leaves that raise if those for which a rule has no place are differentiated."""
        guarded = list(leaves)
        for number, name in self.undifferentiable:
            guarded[number] = _not_differentiated(leaves[number], name)
        return guarded


def shapes_of_rule(rule: Any, *args: Any) -> Any:
    """Trace a rule as JAX will: up to jax 0.10, rules run under an explicit (empty) mesh."""
    with use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        return rule.eval_shape(*args)


def is_inexact(leaf: Any) -> bool:
    """Tell whether an array has derivatives."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _not_differentiated(leaf: Any, name: str) -> Any:
    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    @identity.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        raise StructureError(
            f"{name}: this is differentiated, but the rule has no place for its derivative: it "
            "belongs to an argument in nondiff_argnums, to a keyword-only argument or to the "
            "function itself. Pass it as an ordinary argument, or apply `jax.lax.stop_gradient`"
        )

    return identity(leaf)


class CustomRules(Generic[P, R]):
    """A function with its own derivative rules; see `custom_vjp` and `custom_jvp`."""

    __wrapped__: Callable[P, R]
    _kind = ""
    _definer = ""

    def __init__(
        self,
        function: Callable[P, R],
        nondiff_argnums: int | Sequence[int],
        nondiff_argnames: str | Sequence[str],
    ) -> None:
        check_functions(self._kind, function=function)
        self._function = function
        self._nondiff = Selection(function, nondiff_argnums, nondiff_argnames)
        self._rules: tuple[Any, ...] = ()
        self._inside = threading.local()
        functools.update_wrapper(self, function, updated=())
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_inside"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _inside=threading.local())

    @lifting
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return self._call(args, kwargs)
        except Exception as error:
            leave(error, self._kind, self._function)
            raise

    def _call(self, args: Any, kwargs: Any) -> Any:
        if not self._rules:
            raise MissingRuleError(
                f"no rule was given for {self._name()}: call its `{self._definer}` before it is "
                "called itself"
            )
        positional, keywords = self._by_position(args, kwargs)
        nondiff = self._nondiff.of_args(positional)
        given = [Nondiff(x) if i in nondiff else x for i, x in enumerate(positional)]
        functions = (self._function, *self._rules)
        targets = Targets(functions)
        flat = flatten_call(targets.shown, given, keywords, functions)
        leaves = array_leaves(flat.leaves)
        graphdef, alone = flat.graphdef, getattr(self._inside, "rule", False)

        def make() -> Callable[..., Any]:
            def run(*leaves: Any) -> Any:
                arguments = Arguments.of(graphdef, leaves, nondiff)
                return self._run(graphdef, arguments, alone, *leaves)

            return run

        key = (self, graphdef, alone)
        # what is kept holds the rules: none that hold objects
        runners = Runners() if any(map(_holds_objects, functions)) else _RUNNERS
        report, groups = runners.call(key, functions, make, *leaves)
        return finish(flat, report, groups)

    def _run(self, graphdef: GraphDef, arguments: Arguments, alone: bool, *leaves: Any) -> Any:
        """Return the report and the outputs; `alone` if the rule is not looked at."""
        raise NotImplementedError

    def _by_position(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments in the order of the signature, as the rules get them."""
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _primal(self, graphdef: GraphDef) -> Any:
        """Return the function, of leaves, whose trace JAX keeps."""

        def call(made: Any) -> Any:
            return self._target(made, 0)(*arguments_of(made), **made.kwargs)

        def run(*leaves: Any) -> Any:
            inside = run_inside(graphdef, leaves, ONE_GROUP, call=call)
            return inside.report, inside.groups

        return jax.jit(run, inline=True)

    def _target(self, made: Any, number: int) -> Any:
        """Return the function (0) or a rule, bound to twins if it is bound to objects."""
        refs = Targets((self._function, *self._rules)).refs
        return Targets.resolve(made.function[number], refs)

    @contextlib.contextmanager
    def _tracing_rule(
        self, graphdef: GraphDef, *, alone: bool, forward: bool = True
    ) -> Generator[None]:
        """Call a rule: calls of the function in a forward one do not look at the rule."""
        before = getattr(self._inside, "rule", False)
        self._inside.rule = before or forward
        try:
            with _RUNNERS.tracing((self, graphdef, alone), (self._function, *self._rules)):
                yield
        finally:
            self._inside.rule = before

    def _check_like(self, plan: Plan, other: Plan, rule: str) -> None:
        if not plan.is_like(other):
            raise StructureError(
                f"{rule} of {self._name()} writes what the function does not, and is needed where "
                "only the function was looked at: inside the rule itself, which calls the "
                "function and is differentiated once more (or, with symbolic_zeros, what it "
                "writes depends on what is differentiated). Write the same objects in both"
            )

    def _name(self) -> str:
        function = self._function
        return getattr(function, "__qualname__", type(function).__name__)

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __repr__(self) -> str:
        return f"<{self._kind} of {self._name()}>"


def _holds_objects(function: Any) -> bool:
    return isinstance(_classify.rule_of(function), Kind)


def arguments_of(made: Any) -> list[Any]:
    """Return the positional arguments of a call, those that are not differentiated unwrapped."""
    return [x.value if type(x) is Nondiff else x for x in made.args]


def derivative_form(
    graphdef: GraphDef, edge: Any, name: str, leaves: Sequence[Any]
) -> GradientForm:
    """Return the form of the derivatives of an argument: of objects, of inexact arrays only."""
    infos: list[tuple[int, LeafInfo]] = []
    for visit in leaves_below(graphdef, edge):
        number = ~cast("int", visit.edge)
        kind, metadata = jax.Array, ()
        if visit.variable >= 0:
            entry = graphdef.entries[visit.variable]
            kind, metadata = entry.cls, entry.extra or ()
        on_object = visit.variable >= 0 or (
            visit.parent >= 0 and graphdef.entries[visit.parent].kind.is_object
        )
        if is_inexact(leaves[number]) or not on_object:
            infos.append((number, LeafInfo(visit.path, kind, metadata)))
    return GradientForm(graphdef, edge, name, tuple(infos))
