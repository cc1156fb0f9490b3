"""What the first step of a loop adds to its objects, from values of outside of the loop.

A step must leave the structure that it started from. One thing can be added all the same: what is
made when it is first needed, of values that do not depend on the step (`hoist`), a parameter of a
lazy layer for one. So the first trace of a step may end with a `Prologue`: its static half is kept
with the compiled program, like any report, and its values come out of it. It is played on twins,
and then the loop runs on them, traced from what it finds there. All of it comes back in one delta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from anabranch import _jax
from anabranch.errors import AnabranchError, StructureError, bounded, first_few
from anabranch.graph._build import build
from anabranch.graph._delta import Delta, Write, commit
from anabranch.graph._flatten import Flat, flatten, namer
from anabranch.graph._graphdef import Edge, Entry
from anabranch.graph._kind import Kind, is_same
from anabranch.graph._walk import Contents
from anabranch.transforms._box import ONE_GROUP, finish, run_inside
from anabranch.transforms._call import flatten_call
from anabranch.transforms._lifting import lifting
from anabranch.transforms._runners import Targets


class Addition(NamedTuple):
    """Something that a step adds to an object, or puts in the place of a static value."""

    owner: int
    key: Any
    edge: Edge  # of the delta
    name: str


class Additions(NamedTuple):
    """What a step adds, and what it does besides."""

    all: Sequence[Addition]
    written: frozenset[int]  # leaves
    text: str
    """What to say if it cannot be done."""


class Prologue:
    """What is added, as static data.

    Edges to leaves count the values, and new objects are numbered from the number of objects that
    there were. Values that are constants of the program stay here, so that they are constants
    outside of it as well, whatever trace the loop runs in.
    """

    __slots__ = ("additions", "entries", "is_repeated", "text", "values", "written")

    def __init__(
        self,
        additions: Additions,
        entries: tuple[Entry, ...],
        values: list[Any],
        *,
        is_repeated: bool,
    ) -> None:
        self.additions, self.written, self.text = additions
        self.is_repeated = is_repeated  # the step, as far as is known
        self.entries = entries
        self.values: list[Any] | None = values

    def outputs(self) -> list[Any]:
        """Return what has to come out of the program."""
        return [*self.values] if self.values and any(map(_jax.is_tracer, self.values)) else []

    def take(self, outputs: list[Any]) -> list[Any]:
        """Return the values; tracers of an outer trace are there when they have just been found."""
        values = self.values
        if values is None:
            return outputs
        if any(map(_jax.is_tracer, values)):
            self.values = None  # it may be kept for longer than the trace lives
        return values


jax.tree_util.register_static(Prologue)


class _FoundError(Exception):
    """Ends a loop that runs step by step in Python."""

    def __init__(self, prologue: Prologue) -> None:
        self.prologue = prologue


class FirstStep:
    """Notes what a step adds. To be made where the loop begins.

    An exception would do the same, but JAX never frees a trace that ends with one (jax 0.10).

    Arguments:
        steps: how many there are; None if that is not known.
    """

    def __init__(self, steps: int | None = None) -> None:
        self._is_repeated = steps is not None and steps > 1
        self._around = _jax.all_traces(_jax.current_trace())
        self.prologue: Prologue | None = None

    def note(self, known: int, additions: Additions, delta: Delta, slots: Sequence[Any]) -> None:
        """Keep what a step adds.

        Arguments:
            known: how many objects there were before the step.
            additions: what is added.
            delta: of the step.
            slots: of the step.

        Raises:
            StructureError: it depends on the step.
        """
        entries = {known + i: entry for i, entry in enumerate(delta.new)}
        reached: set[int] = set()
        numbers: dict[int, int] = {}  # of slots, then of entries
        values: list[Any] = []
        pending = [addition.edge for addition in additions.all]
        while pending:
            edge = pending.pop()
            if type(edge) is not int or edge in numbers or edge in reached:
                continue
            if edge < 0:
                numbers[edge] = ~len(values)
                values.append(slots[~edge])
            elif edge >= known:
                reached.add(edge)
                pending += entries[edge].edges
        tracers = filter(_jax.is_tracer, values)
        if not all(_jax.tracer_trace(tracer) in self._around for tracer in tracers):
            raise StructureError(additions.text)
        # in their order: children of values come after the values
        numbers |= {index: known + i for i, index in enumerate(sorted(reached))}

        def renumbered(edge: Edge) -> Edge:
            return numbers.get(edge, edge) if type(edge) is int else edge

        every = [a._replace(edge=renumbered(a.edge)) for a in additions.all]
        new = [entries[index] for index in sorted(reached)]
        new = [e._replace(edges=tuple([renumbered(x) for x in e.edges])) for e in new]
        additions = additions._replace(all=every)
        self.prologue = Prologue(additions, tuple(new), values, is_repeated=self._is_repeated)
        config: Any = jax.config
        if config.jax_disable_jit:
            raise _FoundError(self.prologue)


Attempt = Callable[[Targets, Sequence[Any], dict[str, Any]], Any]


def run_with_prologue(
    name: str, attempt: Attempt, functions: Sequence[Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """Run a loop; if a step adds to its objects, do that before the loop.

    Arguments:
        name: what the loop is called in messages.
        attempt: runs the loop, for functions and arguments like those given, and returns its
            result, or a `Prologue` and its values.
        functions: of the user.
        args: what the loop is called with.
        kwargs: the same by name.

    Raises:
        StructureError: a step adds more, writes something else, or raises, when it starts from what
            was added.
    """
    targets = Targets(functions)
    found = _try(attempt, targets, args, kwargs)
    if not _is_prologue(found):
        return found
    prologue, outputs = found
    values = prologue.take(outputs)
    # as it was: nothing has been written
    flat = flatten_call(targets.shown, args, kwargs, targets.functions)
    played = _Played(prologue, flat, values)

    def call(made: Any) -> Any:
        resolved = [Targets.resolve(function, targets.refs) for function in made.function]
        try:
            result = _try(lifting(attempt), Targets(resolved), made.args, made.kwargs)
        except StructureError as error:
            raise _not_enough(prologue, str(error)) from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            refused = isinstance(error, AnabranchError) and not isinstance(error, AttributeError)
            if refused or prologue.is_repeated:
                raise  # the loop in Python does so, too
            text = f"{type(error).__name__}: {error}"
            raise _not_enough(prologue, text) from error
        if _is_prologue(result):
            raise _not_enough(prologue, result[0].text)
        played.check(name)
        return result

    inside = run_inside(flat.graphdef, flat.leaves, ONE_GROUP, call=call, prepare=played.play)
    return finish(flat, inside.report, inside.groups)


def _try(attempt: Attempt, targets: Targets, args: Sequence[Any], kwargs: Any) -> Any:
    try:
        return attempt(targets, args, kwargs)
    except _FoundError as error:
        return error.prologue, []


def _is_prologue(found: Any) -> bool:
    return type(found) is tuple and len(found) == 2 and type(found[0]) is Prologue


def _not_enough(prologue: Prologue, text: str) -> StructureError:
    return StructureError(
        bounded(f"{prologue.text}\nStarted from what it adds, it fails as well: {text}")
    )


class _Played:
    """A prologue that is played on twins.

    Arguments:
        prologue: what is added.
        flat: what the twins are made of, numbered like the objects of the step.
        values: what the leaves are.
    """

    def __init__(self, prologue: Prologue, flat: Flat, values: Sequence[Any]) -> None:
        self._prologue, self._flat, self._values = prologue, flat, values
        self._twins: Sequence[Any] = ()
        self._added: list[tuple[Addition, Any]] = []
        self._made: list[tuple[Any, Kind, Contents]] = []

    def play(self, twins: Sequence[Any]) -> None:
        """Write what is added to the twins."""
        flat, prologue = self._flat, self._prologue
        self._twins = twins
        built = build(
            prologue.entries,
            self._values,
            twins,
            at=lambda index, position: flat.contents[index][2][position],
        )
        new: dict[int, dict[Any, Any]] = {}
        for addition in prologue.additions:
            value = built.resolve(addition.edge)
            self._added.append((addition, value))
            new.setdefault(addition.owner, {})[addition.key] = value
        writes: list[Write] = []
        for index, added in new.items():
            entry = flat.graphdef.entries[index]
            held = self._held(index) | added
            contents = (entry.extra, tuple(held), [*held.values()])
            writes.append(Write(twins[index], entry.cls, contents))
        commit(writes)
        pairs = zip(built.objects[len(twins) :], prologue.entries, strict=True)
        self._made = [
            (obj, entry.kind, entry.kind.open(obj)) for obj, entry in pairs if entry.kind.identity
        ]

    def check(self, loop: str) -> None:
        """Raise unless every step would do what the first one did, had it not been the first."""
        made = self._made
        changed = {id(obj) for obj, kind, before in made if not is_same(kind.open(obj), before)}
        both: list[str] = []
        for addition, value in self._added:
            now = self._held(addition.owner).get(addition.key)
            if now is not value or any(id(obj) in changed for obj in flatten((value,)).objects):
                both.append(addition.name)
        if both:
            raise StructureError(
                bounded(
                    f"{loop}: these are made by a step and written, too:\n{first_few(both)}\n"
                    "make them before the loop, by one call for instance"
                )
            )
        unequal = self._unequal()
        if unequal:
            made = ", ".join([addition.name for addition, _ in self._added[:5]])
            raise StructureError(
                bounded(
                    f"{loop}: these are written only by the step that makes {made}, or only by "
                    f"the others:\n{first_few(unequal)}\n"
                    "make what is missing before the loop, by one call for instance"
                )
            )

    def _unequal(self) -> list[str]:
        """Return what the first step has written and the others have not, or the reverse."""
        flat = self._flat
        name = namer(flat.graphdef)
        found: list[str] = []
        for index, entry in enumerate(flat.graphdef.entries):
            if not entry.kind.identity:
                continue
            held = self._held(index)
            for key, edge in zip(entry.keys, entry.edges, strict=True):
                if type(edge) is int and edge < 0:
                    later = held[key] is not flat.leaves[~edge]
                    if later != (~edge in self._prologue.written):
                        found.append(entry.kind.show_below(name(index), key))
        return found

    def _held(self, index: int) -> dict[Any, Any]:
        """Return what a twin holds now."""
        _, keys, values = self._flat.graphdef.entries[index].kind.open(self._twins[index])
        return dict(zip(keys, values, strict=True))
