"""Steps 2 to 4: what a function did to its objects, and how it is done to the caller's.

Inside a transform the objects are built anew around tracers: **twins**. Afterwards every twin is
compared, by identity, with what it was built from, also those that are no longer reachable. The
difference is a static `Delta` and the values of its **slots**. Outside, the delta is played on the
caller's objects: everything is computed first, then written under an undo log.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from anabranch import _jax
from anabranch.errors import (
    CapturedWriteError,
    ConcurrentWriteError,
    NodeTypeError,
    ValueWriteError,
)
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._build import Built, build
from anabranch.graph._classify import NUMBER
from anabranch.graph._flatten import Flat, namer
from anabranch.graph._function import FUNCTION, lasting
from anabranch.graph._graphdef import Edge, Entry, GraphDef
from anabranch.graph._kind import Kind
from anabranch.graph._static import EXACT_BY_TYPE, encode
from anabranch.graph._tokens import STRUCTURE, check_owned
from anabranch.graph._turn import COMMITS, in_turn
from anabranch.graph._variable import NO_METADATA, Variable
from anabranch.graph._walk import Contents, Walk
from anabranch.graph._watchers import forget_all


class Delta(NamedTuple):
    """What a function did. Edges to leaves count slots, not the leaves of the arguments."""

    changed: tuple[tuple[int, Entry], ...]  # known objects, with all of their new contents
    new: tuple[Entry, ...]  # numbered from the number of known objects
    root: Edge  # the return value
    num_slots: int


class Diff(NamedTuple):
    """A delta and what only the inside knows of it."""

    delta: Delta
    slots: list[Any]  # tracers and arrays, one for each edge to a leaf
    new: list[Any]  # objects made by the function, in the order of `delta.new`

    @property
    def numbers(self) -> list[int]:
        """The slots that hold Python numbers, which are the same in all lanes."""
        return [i for i, x in enumerate(self.slots) if _classify.rule_of(x) is NUMBER]

    def without(self, slots: Iterable[int]) -> Diff:
        """Return the diff in which the numbers of some slots are static values."""
        edges: dict[int, Edge] = {~i: _static.encode(self.slots[i]) for i in slots}
        if not edges:
            return self
        kept = [i for i in range(len(self.slots)) if ~i not in edges]
        edges |= {~old: ~new for new, old in enumerate(kept)}

        def renumbered(edge: Edge) -> Edge:
            return edges[edge] if type(edge) is int and edge < 0 else edge

        def renumber(entry: Entry) -> Entry:
            return entry._replace(edges=tuple([renumbered(edge) for edge in entry.edges]))

        changed, new, root, _ = self.delta
        delta = Delta(
            tuple([(index, renumber(entry)) for index, entry in changed]),
            tuple([renumber(entry) for entry in new]),
            renumbered(root),
            len(kept),
        )
        return Diff(delta, [self.slots[i] for i in kept], self.new)


_MUTABLE_VALUES = frozenset({_kinds.PARTIAL, _kinds.FROZEN, _kinds.PYTREE})


def diff(
    graphdef: GraphDef,
    built: Built,
    result: Any,
    *,
    lanes: bool = False,
) -> Diff:
    """Compare twins with what they were built from.

    Arguments:
        graphdef: what the twins were built from.
        built: the twins.
        result: what the function returned.
        lanes: the function runs once a lane: numbers that it leaves behind become leaves, which
            may be stacked, and values are opened, as their leaves may leave along another axis.

    Raises:
        CapturedWriteError: an object of an outer trace turned up that is no argument.
        ValueWriteError: an immutable value was changed in place.
        NodeTypeError: something is left behind that cannot be walked.
    """
    twins = built.objects
    changed = [*_changes(graphdef, built)]
    known = twins
    if lanes:
        known = [
            t if e.kind.identity else None for t, e in zip(twins, graphdef.entries, strict=True)
        ]
    walk = Walk(variable_numbers=lanes, known=known, located=_statics(built))
    name = namer(graphdef)
    variables = _variables_around(graphdef) if changed else {}
    for index, contents in changed:
        values = contents[2]
        if len(values) == 1 and _is_array_of_trace(values[0]):  # a Variable, most often
            walk.add_leaf(values[0])
        else:
            called = functools.partial(name, index)
            walk.add_contents(twins[index], contents, variables.get(index), called)
    walk.add(result, "the return value", numbers=lanes)
    check_made_here(walk.objects)
    table, edges = walk.table()
    following = iter(edges)
    entries = tuple([_entry(i, twins[i], held, following) for i, held in changed])
    shared: dict[int, Any] = {}
    new = tuple([_lasting(e, shared) if e.kind is FUNCTION else e for e in table])
    return Diff(Delta(entries, new, next(following), len(walk.leaves)), walk.leaves, walk.objects)


def _is_array_of_trace(x: Any) -> bool:
    return _jax.is_tracer(x) and not _jax.is_ref_tracer(x)


def _entry(index: int, twin: Any, contents: Contents, edges: Iterator[Edge]) -> tuple[int, Entry]:
    """Return the entry of an object that has changed, with the edges that come next."""
    extra, keys, values = contents
    kind: Any = _classify.rule_of(twin)
    return index, Entry(kind, type(twin), extra, keys, tuple(itertools.islice(edges, len(values))))


def _lasting(entry: Entry, shared: dict[int, Any]) -> Entry:
    return entry._replace(extra=lasting(entry.extra, shared))


def _statics(built: Built) -> dict[int, tuple[int, int]]:
    """Return the place of every static value whose identity may matter, by its id."""
    rules, found = _classify.RULES, dict[int, tuple[int, int]]()
    for index, (_, _, _, _, edges) in built.recipe.statics:
        for position, (edge, value) in enumerate(zip(edges, built.held[index], strict=True)):
            if type(edge) is tuple and type(value) not in EXACT_BY_TYPE:
                rule = rules.get(type(value))  # (a function that is static here has no rule)
                if rule is not NUMBER and not isinstance(rule, Kind):
                    found.setdefault(id(value), (index, position))
    return found


def _variables_around(graphdef: GraphDef) -> dict[int, str]:
    """Return the class of the Variable around each container that belongs to a value."""
    found: dict[int, str] = {}
    for entry in graphdef.entries:
        if entry.kind.is_variable:
            pending = list(entry.edges)
            while pending:
                edge = pending.pop()
                if type(edge) is int and edge >= 0 and edge not in found:
                    found[edge] = entry.cls.__name__
                    pending += graphdef.entries[edge].edges
    return found


def _changes(graphdef: GraphDef, built: Built) -> list[tuple[int, Contents]]:
    """Return the index and the contents of the twins that were changed."""
    found: list[tuple[int, Contents]] = []
    entries, held = graphdef.entries, built.held
    for index in sorted([*held, *_doubtful(built)]):
        kind, cls, extra, keys, edges = entries[index]
        obj = built.objects[index]
        values = held.get(index)
        if values is None:
            values = (built.resolve(edges[0]),)
        if kind.identity:
            same_class = type(obj) is cls
            if not (same_class and kind.holds(obj, extra, keys, values)):
                if not same_class and _classify.rule_of(obj) is not kind:
                    raise NodeTypeError(
                        f"{namer(graphdef)(index)}: its class was set to {type(obj).__name__}, "
                        f"whose objects are no nodes like those of {cls.__name__}: decorate the "
                        "class with `@graph.node`"
                    )
                found.append((index, kind.open(obj)))
        elif kind in _MUTABLE_VALUES and not kind.holds(obj, kind.open(obj)[0], keys, values):
            raise ValueWriteError(
                f"{namer(graphdef)(index)}: this {cls.__name__} is an immutable value, but "
                "it was changed in place, which cannot be brought back to the caller's "
                "object: make a new one and assign it, or decorate the class with "
                "`@graph.node` if its objects have identity"
            )
    return found


def _doubtful(built: Built) -> list[int]:
    """Return the Variables with one leaf of which it is not plain that they are as they were."""
    recipe = built.recipe
    cells = zip(recipe.cells.at, recipe.cells.classes, built.cells, built.arrays, strict=True)
    return [i for i, _, _ in recipe.variables] + [
        i
        for i, cls, cell, array in cells
        if type(cell) is not cls or cell._value is not array or cell._metadata is not NO_METADATA
    ]


def check_made_here(objects: Sequence[Any]) -> None:
    """Raise for objects of an outer trace, which would come back as copies of themselves."""
    for obj in objects:
        if isinstance(obj, FunctionType):  # what is no object in it is the same for all calls
            _classify.check_shareable(obj)
        kind: Any = _classify.rule_of(obj)
        if not kind.is_owned(obj):
            raise CapturedWriteError(
                f"a {type(obj).__name__} that was made outside of the traced function, and that "
                "is none of its arguments, is returned or was assigned to an attribute: it "
                "would come back as a copy. Pass it as an argument"
            )


class Write(NamedTuple):
    """New contents for one object."""

    obj: Any
    cls: type
    contents: Contents


def apply(delta: Delta, flat: Flat, slots: Sequence[Any]) -> Any:
    """Play a delta on the caller's objects, all or nothing, and return the result.

    Arguments:
        delta: what the function did.
        flat: what the caller's objects were when the function was called.
        slots: their values.

    Raises:
        ConcurrentWriteError: somebody else has changed an object that is to be written.
        CapturedWriteError: an object to be written belongs to another trace level.
    """
    built = _build(delta, flat, slots)
    kept = _kept_values(delta, flat, built)
    if kept:
        delta = _renamed(delta, kept)
        built = _build(delta, flat, slots)
    writes: list[Write] = []
    for index, entry in delta.changed:
        values = _resolve(built, entry, flat.content(index))
        contents = (entry.extra, entry.keys, values)
        writes.append(Write(flat.objects[index], entry.cls, contents))
    if writes:
        expected = [flat.content(index) for index, _ in delta.changed]
        commit(writes, expected, namer(flat.graphdef), [index for index, _ in delta.changed])
    return built.resolve(delta.root)


def _build(delta: Delta, flat: Flat, slots: Sequence[Any]) -> Built:
    return build(
        delta.new, slots, known=flat.objects, at=lambda i, position: flat.content(i)[2][position]
    )


def _kept_values(delta: Delta, flat: Flat, built: Built) -> dict[Edge, Edge]:
    """Return edges to immutable values that were only built anew, and those to what they equal."""
    found: dict[Edge, Edge] = {}
    for index, entry in delta.changed:
        before = flat.graphdef.entries[index].edges
        for old, new in zip(before, entry.edges, strict=False):
            if not (isinstance(old, int) and isinstance(new, int)) or old < 0 or new in found:
                continue
            if new >= len(flat.objects):
                one, other = flat.objects[old], built.resolve(new)
                if type(one) is type(other) and _are_one_value(one, other):
                    found[new] = old
    return found


def _renamed(delta: Delta, edges: Mapping[Edge, Edge]) -> Delta:
    def renamed(entry: Entry) -> Entry:
        return entry._replace(edges=tuple([edges.get(edge, edge) for edge in entry.edges]))

    return delta._replace(
        changed=tuple([(index, renamed(entry)) for index, entry in delta.changed]),
        new=tuple([renamed(entry) for entry in delta.new]),
        root=edges.get(delta.root, delta.root),
    )


def _resolve(built: Built, entry: Entry, old: Contents) -> list[Any]:
    """Return what an object is to hold: static values that are what they were stay the same."""
    _, names, held = old
    before = [*held] if (*names,) == (*entry.keys,) else []
    found: list[Any] = []
    for i, edge in enumerate(entry.edges):
        value = built.resolve(edge)
        then = before[i] if before else None
        same = type(edge) is tuple and type(then) is type(value) and _are_one_value(then, value)
        found.append(then if same else value)
    return found


def _are_one_value(one: Any, other: Any) -> bool:
    """Tell whether two immutable values hold the very same things."""
    pending = [(one, other)]
    while pending:
        a, b = pending.pop()
        if a is b:
            continue
        kind = _classify.rule_of(a)
        if type(a) is not type(b):
            return False
        if not isinstance(kind, Kind):
            if type(a) not in _COMPARED or encode(a) != encode(b):
                return False
            continue
        (extra, keys, values), (other_extra, other_keys, others) = kind.open(a), kind.open(b)
        if kind.identity or extra != other_extra or keys != other_keys:
            return False
        pending += zip(values, others, strict=True)
    return True


_COMPARED = EXACT_BY_TYPE | {float, complex}


def changed_meanwhile(where: str, cls: type) -> ConcurrentWriteError:
    """Return the error for an object that does not hold any more what was read."""
    return ConcurrentWriteError(
        f"{where}: this {cls.__name__} was changed by somebody else while the function was "
        "running; nothing was written. Guard the calls with a lock"
    )


@in_turn
def commit(
    writes: Sequence[Write],
    expected: Sequence[Contents] | None = None,
    name: Callable[[int], str] | None = None,
    indices: Sequence[int] = (),
) -> None:
    """Write new contents to objects, all or nothing.

    Arguments:
        writes: the objects and their contents.
        expected: what the objects must still hold.
        name: how an object is called in messages, given its index.
        indices: the index of each object.
    """
    collects = gc.isenabled()
    try:
        gc.disable()  # so that no finaliser writes meanwhile
        for i, (obj, _, _) in enumerate(writes):
            kind: Any = _classify.rule_of(obj)
            kind.check_writable(obj)
            if expected is not None and not kind.holds(obj, *expected[i]):
                where = name(indices[i]) if name is not None else type(obj).__name__
                raise changed_meanwhile(where, type(obj))
        _write_all(writes)
    finally:
        if collects:
            gc.enable()


def _write_all(writes: Sequence[Write]) -> None:
    done: list[Write] = []  # what there was
    COMMITS.begun += 1
    try:
        for write in writes:
            obj = write.obj
            kind: Any = _classify.rule_of(obj)
            done.append(Write(obj, type(obj), kind.open(obj)))
            _write(write)
    except BaseException:
        for before in reversed(done):
            _write(before)
        raise


def _write(write: Write) -> None:
    obj, cls, contents = write
    if cls is not type(obj):
        object.__setattr__(obj, "__class__", cls)
        STRUCTURE.renew_variables()
    kind: Any = _classify.rule_of(obj)
    kind.fill(obj, *contents)


@in_turn
def commit_values(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """Write new values to Variables of ours, all or nothing: as `commit`, with less to see to."""
    for variable in {id(v._token): v for v in variables}.values():  # one for each token
        check_owned(variable, variable._token, "write the value")
    old = [variable._value for variable in variables]
    forget_all(variables)
    COMMITS.begun += 1
    try:
        any(map(_set_value, variables, values))  # in C; each returns None
    except BaseException:
        any(map(_set_value, variables, old))
        raise


_set_value: Callable[[Any, Any], None] = vars(Variable)["_value"].__set__
