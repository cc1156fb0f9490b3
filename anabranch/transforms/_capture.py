"""`capture`: collect what `sow` and `perturb` record while a function runs.

It is the box without a transform: the function runs on twins, and every Module among them gets an
attribute that holds its Records. So the caller's objects are never marked, other threads notice
nothing, and a failure leaves nothing behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax

from anabranch._boundary import boundary
from anabranch.errors import ArgumentError, UpdateError, bounded, first_few
from anabranch.graph import _kinds
from anabranch.graph._classify import kind_of_variables
from anabranch.graph._flatten import flatten
from anabranch.graph._leaf_info import LeafInfo, LeafInfos, check_paths_are_disjoint, path_text
from anabranch.graph._recording import (
    Records,
    capturing,
    held_for,
    recorder_of,
    records_of,
    set_records,
)
from anabranch.graph._state import State
from anabranch.graph._variable import Intermediate, Perturbation
from anabranch.transforms._box import ONE_GROUP, finish, run_inside
from anabranch.transforms._call import Call, flatten_call
from anabranch.transforms._wrap import wrap

P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(
    function: type | None = None, /, *kinds: type, init: State | None = None
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, State]]]: ...
@overload
def capture(
    function: Callable[P, R], /, *kinds: type, init: State | None = None
) -> Callable[P, tuple[R, State]]: ...
@boundary("capture")
def capture(function: Any = None, /, *kinds: type, init: State | None = None) -> Any:
    """Collect the values that `sow` and `perturb` record while a function runs.

    Values come from any depth and through every transform; vmap, pmap, shard_map and scan stack
    them along axis 0. Nothing is left on the modules. Modules are those that the arguments
    (or what the function itself holds, such as a bound `self`) reach; what is recorded on one that
    the function makes and drops has no path, and is dropped too. Of several captures around each
    other, the innermost that asks for a kind gets the values.

    Arguments:
        function: a function, method or callable object. Without one, or with a kind in its place,
            `capture` is a decorator.
        kinds: the kinds of Variables to collect; `Intermediate` if there are none.
        init: perturbations for `perturb` to add, as `capture(function, Perturbation)` has
            made them; then none are made.

    Returns:
        A function that returns `(result, state)`. The path of a value is that of its module,
        then its name, and, if it was sown, its number. The path of a module in an argument begins
        with the position or the name of the argument.

    Raises:
        CapturedWriteError: a value was recorded on a module that is none of the arguments.
        StructureError: two values have the same path.
        UpdateError: a perturbation belongs to no module.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> class Square(ab.Module):
    ...     def __call__(self, x):
    ...         ab.sow(self, "x", x)
    ...         return x**2
    >>> def squares(model, xs):
    ...     return ab.vmap(model)(xs)
    >>> out, state = ab.capture(squares)(Square(), jnp.arange(3.0))
    >>> state[0]["x"][0].tolist()
    [0.0, 1.0, 2.0]
    """
    if _is_kind(function):
        function, kinds = None, (function, *kinds)
    asked = kinds or (() if init is not None else (Intermediate,))
    for kind in asked:
        if not _is_kind(kind):
            raise ArgumentError(f"capture takes kinds of Variables, not {kind!r}")
    if function is None:
        return lambda f: _captured(f, asked, init)
    return _captured(function, asked, init)


def _is_kind(x: Any) -> bool:
    return isinstance(x, type) and kind_of_variables(x) is not None


def _captured(function: Any, kinds: tuple[type, ...], init: State | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = flatten_call(_record, (Call(function, args, kwargs), kinds, init), {}, (function,))
        inside = run_inside(flat.graphdef, flat.leaves, ONE_GROUP)
        return finish(flat, inside.report, inside.groups)

    remake = functools.partial(_captured, kinds=kinds, init=init)
    return wrap(call, function, remake, name="capture")


class _Recorder(NamedTuple):
    """The Records of one Module."""

    path: tuple[Any, ...]
    module: Any
    records: Records
    before: Any


def _record(call: Call, kinds: tuple[type, ...], init: State | None) -> Any:
    """Run a call whose objects are twins, and return its result and what was recorded."""
    given = _given(init)
    accepted = (*kinds, *{type(v) for below in given.values() for v in below.values()})
    recorders = [*_attach(call, accepted, given, init is not None)]
    with capturing(accepted):
        result = call.run()
    recorders += _made(call, recorders)
    found = [*_found(recorders)]
    infos = LeafInfos([info for info, _ in found])
    check_paths_are_disjoint(infos)
    _detach(recorders, (call, result))
    return result, State(infos, tuple([leaf for _, leaf in found]))


def _attach(
    call: Call,
    kinds: tuple[type, ...],
    given: dict[tuple[Any, ...], dict[str, Any]],
    are_given: bool,
) -> Iterator[_Recorder]:
    """Give every Module that a call reaches its Records, and yield them."""
    flat = flatten(call)
    for visit in flat.graphdef.visit():
        edge = visit.edge
        if type(edge) is not int or edge < 0 or not visit.first:
            continue
        module = flat.objects[edge]
        recorder = _recorder(module)
        if recorder is None:
            continue
        path = _short(visit.path)
        before = held_for(module)
        records = recorder(kinds, before, given=are_given)
        for name, variable in given.pop(path, {}).items():
            setattr(records, f"{name}/", variable)
        set_records(module, records)
        yield _Recorder(path, module, records, before)
    if given:
        unknown = [path_text((*path, name)) for path, below in given.items() for name in below]
        raise UpdateError(
            bounded(
                "capture: there is no module for these perturbations of `init`:\n"
                f"{first_few(unknown)}\nThey are those of the same call, made by "
                "`capture(f, Perturbation)`"
            )
        )


def _made(call: Call, recorders: list[_Recorder]) -> list[_Recorder]:
    """Return the Records of Modules that the function has made and attached to others."""
    known = {id(recorder.module) for recorder in recorders}
    flat = flatten(call)
    made: list[_Recorder] = []
    for visit in flat.graphdef.visit():
        if type(visit.edge) is not int or visit.edge < 0 or not visit.first:
            continue
        module = flat.objects[visit.edge]
        records = None if id(module) in known else records_of(module)
        if records is not None:
            made.append(_Recorder(_short(visit.path), module, records, records.outer))
    return made


def _recorder(module: Any) -> type[Records] | None:
    return None if isinstance(module, Records) else recorder_of(module)


def _short(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the path of a module in a call: what the function holds, then the arguments."""
    part, below = path[0], path[1:]
    while part == "function" and below[:1] and below[0] in _HOLDERS:
        below = below[1:]
    return below


_HOLDERS = ("__self__", "__wrapped__", "func")  # of methods, transformed functions and partials


def _given(init: State | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the perturbations by the path of their module and by name."""
    given: dict[tuple[Any, ...], dict[str, Any]] = {}
    if init is not None:
        for info, leaf in zip(init.infos, init.leaves, strict=True):
            cls = Perturbation if info.kind is jax.Array else info.kind
            kind = kind_of_variables(cls) or _kinds.VARIABLE
            variable = kind.build(cls, info.metadata, ("value",), (leaf,))
            given.setdefault(info.path[:-1], {})[str(info.path[-1])] = variable
    return given


def _found(recorders: list[_Recorder]) -> Iterator[tuple[LeafInfo, Any]]:
    """Yield what was recorded."""
    for path, _, records, _ in recorders:
        for key, variable in records.recorded():
            name, number = key.rsplit("/", 1)
            if not number and records.given:
                continue  # it was not recorded, but given
            own = (*path, name, int(number)) if number.isdigit() else (*path, name)
            flat = flatten(variable)
            for info, leaf in zip(flat.graphdef.infos, flat.leaves, strict=True):
                yield info._replace(path=(*own, *info.path)), leaf


def _detach(recorders: list[_Recorder], reached: Any) -> None:
    """Take the Records off, also from copies that the function has made of modules."""
    for _, module, _, before in recorders:
        set_records(module, before)
    ours = {id(recorder.module) for recorder in recorders}
    for obj in flatten(reached).objects:
        records = None if id(obj) in ours or obj is None else records_of(obj)
        if records is not None:
            set_records(obj, records.outer)
