"""`grad` and `value_and_grad`: gradients of a node come back as a State, writes come back once.

The derivative is taken with respect to the values at entry. A shared Variable counts once, with the
summed gradient, in the first argument that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import FilterError, StructureError, bounded
from anabranch.graph import _kinds
from anabranch.graph._filters import to_predicate
from anabranch.graph._flatten import Flat
from anabranch.graph._graphdef import Visit
from anabranch.graph._leaf_info import LeafInfo, LeafInfos, path_text
from anabranch.graph._state import State
from anabranch.graph._variable import Param, Variable
from anabranch.transforms._box import ONE_GROUP, array_leaves, finish, run_inside
from anabranch.transforms._call import flatten_call
from anabranch.transforms._options import GradOptions
from anabranch.transforms._specs import DiffState
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")

_OBJECTS = frozenset({_kinds.VARIABLE, _kinds.MODULE, _kinds.OBJECT})


class Differentiated:
    """The part of one argument that is differentiated.

    Arguments:
        flat: the call.
        edge: to the argument.
        name: how it is called.
        wanted: a filter, or None: `Param` on objects, inexact arrays elsewhere.
        taken: leaves that belong to earlier arguments; its own are added.
        allow_int: whether integer arrays are accepted where a filter selects them.
    """

    def __init__(
        self, flat: Flat, edge: Any, name: str, wanted: Any, taken: set[int], *, allow_int: bool
    ) -> None:
        self._flat, self._edge, self._name = flat, edge, name
        self._objects = _below_objects(flat, edge)
        self._matches = to_predicate(Param if wanted is None else wanted)
        self._default = wanted is None
        self._allow_int = allow_int
        self.infos: dict[int, LeafInfo] = {}
        seen: list[LeafInfo] = []
        for visit, on_object in self._visit():
            number = ~visit.edge
            info = self._info(visit)
            seen.append(info)
            if number not in taken and self._wants(number, info, on_object):
                taken.add(number)
                self.infos[number] = info
        self._seen = seen

    def _visit(self) -> Any:
        """Yield the leaves below the argument, each at its first path."""
        graphdef = self._flat.graphdef
        seen: set[int] = set()
        stack = [Visit(None, -1, 0, self._edge, True, -1)]
        while stack:
            visit = stack.pop()
            edge = visit.edge
            if type(edge) is not int:
                continue
            if edge < 0:
                yield visit, visit.parent in self._objects
            elif edge not in seen:
                seen.add(edge)
                stack += reversed([*graphdef.children(edge, visit.link, visit.variable)])

    def _info(self, visit: Visit) -> LeafInfo:
        if visit.variable < 0:
            return LeafInfo(visit.path, jax.Array, ())
        entry = self._flat.graphdef.entries[visit.variable]
        return LeafInfo(visit.path, entry.cls, entry.extra or ())

    def _wants(self, number: int, info: LeafInfo, on_object: bool) -> bool:
        leaf = self._flat.leaves[number]
        inexact = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if self._default and not on_object:
            return bool(inexact)
        if not self._matches(info.path, self._flat.owner(number)):
            return False
        if not inexact and not self._allow_int:
            raise FilterError(
                f"{self._name}{path_text(info.path)}: cannot differentiate {jnp.result_type(leaf)}"
                f" (kind {info.kind_text}); only floating point and complex arrays have "
                "gradients: use a filter that leaves it out"
            )
        return True

    def check(self) -> None:
        """Raise `FilterError` if nothing is differentiated."""
        if self.infos:
            return
        kinds = sorted({info.kind_text for info in self._seen}) or ["none"]
        what = "no leaf of kind Param and no inexact array" if self._default else "nothing"
        raise FilterError(
            bounded(
                f"{self._name}: {what} is selected to be differentiated. "
                f"The kinds that are there: {', '.join(kinds)}. "
                "Choose with `argnums=DiffState(argnum, filter)`"
            )
        )

    def gradient(self, grads: dict[int, Any]) -> Any:
        """Return gradients in the form of the argument: a State for each object.

        Leaves that belong to an earlier argument are None here, and absent from States.
        """
        own = {number: grads[number] for number in self.infos}
        entries = self._flat.graphdef.entries
        made: dict[int, Any] = {}  # containers that several places share are made once

        def resolve(edge: Any) -> Any:
            if type(edge) is not int:
                return None
            return made[edge] if edge >= 0 else own.get(~edge)

        order, paths = self._containers()
        for index in order:  # nodes first, empty: they can be part of a cycle
            kind, cls, extra, _, _ = entries[index]
            if kind in _OBJECTS:
                made[index] = self._state_below(paths[index], own)
            elif kind.identity:
                made[index] = kind.create(cls, extra)
        for index in order:
            kind, cls, extra, keys, edges = entries[index]
            if not kind.identity:
                made[index] = kind.build(cls, extra, keys, [resolve(edge) for edge in edges])
        for index in order:
            kind, _, extra, keys, edges = entries[index]
            if kind.identity and kind not in _OBJECTS:
                kind.fill(made[index], extra, keys, [resolve(edge) for edge in edges])
        return resolve(self._edge)

    def _containers(self) -> tuple[list[int], dict[int, tuple[Any, ...]]]:
        """Return the entries of the result, children of values first, and a path to each."""
        graphdef = self._flat.graphdef
        paths: dict[int, tuple[Any, ...]] = {}
        pending = [Visit(None, -1, 0, self._edge, True, -1)]
        while pending:
            visit = pending.pop()
            edge = visit.edge
            if type(edge) is int and edge >= 0 and edge not in paths:
                paths[edge] = visit.path
                if graphdef.entries[edge].kind not in _OBJECTS:
                    pending += reversed([*graphdef.children(edge, visit.link, -1)])
        return sorted(paths, reverse=True), paths  # the children of a value have higher indices

    def _state_below(self, path: tuple[Any, ...], grads: dict[int, Any]) -> State:
        depth = len(path)
        below = [(n, info) for n, info in self.infos.items() if info.path[:depth] == path]
        infos = [info._replace(path=info.path[depth:]) for _, info in below]
        return State(LeafInfos(infos), tuple([grads[n] for n, _ in below]))


def _below_objects(flat: Flat, edge: Any) -> set[int]:
    """Return the entries that are objects, or belong to one."""
    entries = flat.graphdef.entries
    below: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    pending = [(edge, False)]
    while pending:
        found, inside = pending.pop()
        if type(found) is not int or found < 0:
            continue
        inside = inside or entries[found].kind in _OBJECTS
        if (found, inside) not in seen:
            seen.add((found, inside))
            if inside:
                below.add(found)
            pending += [(e, inside) for e in entries[found].edges]
    return below


@overload
def value_and_grad(
    function: Callable[P, object], /, **options: Unpack[GradOptions]
) -> Callable[P, Any]: ...
@overload
def value_and_grad(
    **options: Unpack[GradOptions],
) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
def value_and_grad(
    function: Any = None,
    /,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Return a function that computes a value and its gradients, as `jax.value_and_grad` does.

    What the function writes comes back once, as primal values.

    Arguments:
        function: returns a scalar, or `(scalar, aux)` with `has_aux`; aux can hold objects.
            Without it, `value_and_grad` is a decorator.
        argnums: which positional arguments are differentiated: positions or `DiffState`. Of
            objects, the `Param`s are by default; of plain containers, every inexact array.
        has_aux: whether the function returns a pair.
        holomorphic: see `jax.grad`.
        allow_int: accept integer arrays where a filter selects them.

    Returns:
        A function that returns `(value, gradients)`. The gradients of an object are a `State` with
        its paths; containers of objects and arrays keep their form, with None for what is not
        differentiated. Several argnums give a tuple.

    Raises:
        FilterError: nothing is selected, or something that has no gradient.

    >>> import anabranch as ab
    >>> model = {"w": ab.Param(3.0), "calls": ab.Variable(0)}
    >>> def loss(model, x):
    ...     model["calls"].value += 1
    ...     return model["w"] * x
    >>> value, grads = ab.value_and_grad(loss)(model, 2.0)
    >>> float(value), float(grads["w"][()]), int(model["calls"])
    (6.0, 2.0, 1)
    """
    if function is None:
        return lambda f: value_and_grad(
            f, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
        )
    single = not isinstance(argnums, (tuple, list)) or isinstance(argnums, DiffState)
    chosen = tuple(cast("Sequence[int | DiffState]", (argnums,) if single else argnums))

    def pick_loss(result: Any) -> Any:
        return _loss(result, has_aux=has_aux)

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(function, args, kwargs)
        parts = _differentiated(flat, chosen, len(args), allow_int=allow_int)
        numbers = [number for part in parts for number in part.infos]

        def run(diff: list[Any], leaves: list[Any]) -> Any:
            leaves = list(leaves)
            for number, leaf in zip(numbers, diff, strict=True):
                leaves[number] = leaf
            inside = run_inside(flat.graphdef, leaves, ONE_GROUP, pick_loss)
            return inside.picked, (inside.report, inside.groups)

        leaves = array_leaves(flat.leaves)
        diff = [_as_inexact(leaves[number]) for number in numbers]
        differentiate = jax.value_and_grad(
            run, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (_, (report, groups)), gradients = differentiate(diff, leaves)
        result = finish(flat, report, groups)
        by_number = dict(zip(numbers, gradients, strict=True))
        found = tuple([part.gradient(by_number) for part in parts])
        return result, found[0] if single else found

    return wrap(call, function)


@overload
def grad(function: Callable[P, object], /, **options: Unpack[GradOptions]) -> Callable[P, Any]: ...
@overload
def grad(**options: Unpack[GradOptions]) -> Callable[[Callable[P, object]], Callable[P, Any]]: ...
def grad(
    function: Any = None,
    /,
    *,
    argnums: int | DiffState | Sequence[int | DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Return a function that computes gradients, as `jax.grad` does; see `value_and_grad`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)` with `has_aux`.

    >>> import anabranch as ab
    >>> grads = ab.grad(lambda v: v**2)(ab.Param(3.0))
    >>> float(grads[()])
    6.0
    """
    if function is None:
        return lambda f: grad(
            f, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
        )
    both = value_and_grad(
        function, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrap(call, function)


def _differentiated(
    flat: Flat, chosen: Sequence[int | DiffState], count: int, *, allow_int: bool
) -> list[Differentiated]:
    call: Any = flat.graphdef.root
    args: Any = flat.graphdef.entries[call].edges[1]
    edges = flat.graphdef.entries[args].edges if type(args) is int else ()
    taken: set[int] = set()
    parts: list[Differentiated] = []
    for one in chosen:
        argnum, wanted = one if isinstance(one, DiffState) else (one, None)
        if not isinstance(argnum, int):
            raise StructureError(f"argnums holds positions or DiffState, not {argnum!r}")
        if not -count <= argnum < count:
            raise StructureError(
                f"argnums has {argnum}, but the function was called with {count} positional "
                "arguments; pass what is differentiated by position"
            )
        name = f"args[{argnum % count}]"
        before = bool(taken)
        part = Differentiated(flat, edges[argnum % count], name, wanted, taken, allow_int=allow_int)
        if not before:
            part.check()
        parts.append(part)
    return parts


def _loss(result: Any, *, has_aux: bool) -> Any:
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise StructureError(
                "with has_aux=True the function returns a pair (loss, aux), but it returned a "
                f"{type(result).__name__}"
            )
        result = result[0]
    value = result.value if isinstance(result, Variable) else result
    array = isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    if not array or np.shape(value) != ():
        shape = f"an array of shape {np.shape(value)}" if array else f"a {type(value).__name__}"
        raise StructureError(
            f"gradients are taken of a scalar, but the function returned {shape}; sum or average "
            "it, or return (loss, aux) with has_aux=True"
        )
    return jnp.asarray(value)


def _as_inexact(leaf: Any) -> Any:
    """Make a Python float an array, so that it is differentiated as one."""
    return jnp.asarray(leaf) if isinstance(leaf, (float, complex, np.generic)) else leaf
