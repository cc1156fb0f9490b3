"""Run a program in two worlds, plainly and under a transform, and compare the worlds completely.

Under a transform that runs lanes there is a plain world for each lane, and the other one is
compared with each of them, through its slices.

Two worlds are equal if a walk through both at once, from everything that the caller ever held,
finds the same types, the same attributes and keys in the same order, the same statics and arrays,
and a one-to-one correspondence between the objects: whatever object it is in one world, the
corresponding place in the other has the corresponding object, never a copy of it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from anabranch.errors import AnabranchError
from tests.property.contents import (
    Snapshot,
    edges,
    is_array,
    is_node,
    is_value,
    may_be_traced,
)
from tests.property.objects import VOCABULARY, arrays_refuse_attributes, is_no_program
from tests.property.scenario import Arguments, Call, Outside, Rebind, Scenario, arguments, rebind
from tests.property.spread import Spread, slice_of

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
_ENOUGH = 5
_PLACE = re.compile(
    r"\b(args|kwargs|init_val|the return value|the function)\b|^\s+[a-z]\w*([.\[]| is | has )", re.M
)
"""What the path in an error starts with; a name if the function captures the object."""
_EXACT_TYPES = (int, float, complex, bool, str, bytes, type(None))


@dataclass(slots=True)
class Pairing:
    """The correspondence between the objects of the plain world and those of the other one."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    index: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    leaves: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    """What every place held at the last comparison, by number of the object and label."""

    carries: bool = False
    """Whether an array may come back as an equal one: see `Case`."""

    lane: int = -1
    """Which lane the plain world is, if it is one."""

    def compare(self, plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
        """Walk both worlds from all names and from all objects that were ever seen."""
        return _Walk(self).run(plain, other)

    def name_of(self, side: int, obj: Any) -> str:
        number = self.index[side].get(id(obj))
        if number is None:
            return f"a new {type(obj).__name__}"
        return f"the {type(obj).__name__} first seen as {self.paths[number]}"


class _Walk:
    """One comparison; it moves the pairing on to the present."""

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.found: list[str] = []
        self.leaves: dict[tuple[int, str], tuple[Any, Any]] = {}
        self.todo: deque[int] = deque(range(len(pairing.pairs)))
        places = Counter(id(leaf) for leaf, _ in pairing.leaves.values())
        # An array at two places may be written over by itself, which no identity shows.
        self.unique = {number for number, count in places.items() if count == 1}

    def run(self, plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
        if list(plain) != list(other):
            self.found.append(f"names are {list(plain)} and {list(other)}")
        for name, obj in plain.items():
            self.visit(-1, name, name, obj, other.get(name))
        while self.todo and len(self.found) < _ENOUGH:
            number = self.todo.popleft()
            a, b = self.pairing.pairs[number]
            self.inside(number, "", self.pairing.paths[number], a, b)
        self.pairing.leaves = self.leaves
        return self.found

    def report(self, path: str, text: str) -> None:
        if len(self.found) < _ENOUGH:
            self.found.append(f"{path}: {text}")

    def visit(self, owner: int, label: str, path: str, a: Any, b: Any) -> None:
        if isinstance(b, jax.core.Tracer):
            self.report(path, f"a tracer leaked: {b}")
        elif is_node(a) or is_node(b):
            self.meet(path, a, b)
        elif is_value(a) or is_value(b):
            if type(a) is not type(b):
                self.report(path, f"is {a!r:.80}, got {b!r:.80}")
            else:
                self.inside(owner, label, path, a, b)
        else:
            self.leaf((owner, label), path, a, b)

    def meet(self, path: str, a: Any, b: Any) -> None:
        """Two nodes at one place: the same pair as everywhere else, or a new pair."""
        if type(a) is not type(b):
            self.report(path, f"is {a!r:.80}, got {b!r:.80}")
            return
        numbers = [self.pairing.index[side].get(id(obj)) for side, obj in enumerate((a, b))]
        if numbers[0] != numbers[1]:
            expected, got = self.pairing.name_of(0, a), self.pairing.name_of(1, b)
            self.report(path, f"is {expected}, got {got}")
        elif numbers[0] is None:
            number = len(self.pairing.pairs)
            self.pairing.pairs.append((a, b))
            self.pairing.paths.append(path)
            for side, obj in enumerate((a, b)):
                self.pairing.index[side][id(obj)] = number
            self.todo.append(number)

    def inside(self, owner: int, label: str, path: str, a: Any, b: Any) -> None:
        held_a, held_b = edges(a), edges(b)
        names_a, names_b = [name for name, _ in held_a], [name for name, _ in held_b]
        if names_a != names_b:
            self.report(path, f"{type(a).__name__} holds {names_a}, got {names_b}")
            return
        for kind in ("maxlen", "default_factory"):
            if isinstance(a, deque | defaultdict) and getattr(a, kind, 0) != getattr(b, kind, 0):
                self.report(path, f"{kind} differs")
        for (name, child_a), (_, child_b) in zip(held_a, held_b, strict=True):
            self.visit(owner, label + name, path + name, child_a, child_b)

    def leaf(self, key: tuple[int, str], path: str, a: Any, b: Any) -> None:
        self.leaves[key] = (a, b)
        seen = slice_of(b, a, self.pairing.lane) if self.pairing.lane >= 0 else b
        if not same_leaf(a, seen):
            self.report(path, f"is {describe(a)}, got {describe(seen)}")
        old_a, old_b = self.pairing.leaves.get(key, (None, None))
        unique = id(a) in self.unique and not self.pairing.carries
        if a is old_a and unique and not _same_object(a, b, old_b):
            self.report(path, f"{describe(a)} was not written, but is another object now")


def _same_object(a: Any, b: Any, old_b: Any) -> bool:
    """An unwritten array is the same object; of a number, only that it is no array now."""
    return b is old_b if is_array(a) else is_array(old_b) or not is_array(b)


def describe(leaf: Any) -> str:
    if is_array(leaf):
        weak = " (weak)" if getattr(leaf, "weak_type", False) else ""
        return f"{type(leaf).__name__} {leaf.dtype}{list(leaf.shape)} {leaf.tolist()}{weak}"
    return f"{type(leaf).__name__} {leaf!r:.80}"


def same_leaf(a: Any, b: Any) -> bool:
    """Compare two arrays or statics; `b` may be a JAX array for a number or a NumPy array (S1a)."""
    if isinstance(b, jax.Array) and not isinstance(a, jax.Array):
        if may_be_traced(a):
            return b.shape == () and b.dtype == jax.dtypes.canonicalize_dtype(type(a)) and b == a
        return isinstance(a, (np.ndarray, np.generic)) and _same_array(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, jax.Array) and a.weak_type != b.weak_type:
        return False
    if isinstance(a, (jax.Array, np.ndarray, np.generic)):
        return _same_array(a, b)
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b if type(a) in _EXACT_TYPES else a is b


def _same_array(a: Any, b: Any) -> bool:
    """Compare bit for bit but for the sign of zero: XLA simplifies `x + 0` to `x`."""
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y, equal_nan=True)


class NotAProgramError(Exception):
    """What was run is outside of what transforms have to support."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind` is "equal", "unequal", or "refused" (one of our own errors that is allowed)."""

    kind: str
    message: str = ""
    raised: int = 0
    """How many calls raised, in both worlds."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and a transform that is claimed to mean something plain."""

    scenario: Scenario
    transform: Transform
    plain: Transform = lambda function: function
    """What the transform means: the function itself, if nothing else is said."""

    lanes: Spread | None = None
    """How the lanes differ, if there are any; then `plain` is what each lane does."""

    carries: bool = False
    """Whether an array that steps have passed around may come back as an equal one."""

    may_refuse: tuple[type[AnabranchError], ...] = ()
    """What is raised where this transform cannot do what plain code does."""


class World:
    """The objects of a caller, by name, and functions, made when they are first called."""

    def __init__(self, scenario: Scenario, transform: Transform) -> None:
        self.names = scenario.world()
        self._scenario, self._transform = scenario, transform
        self._functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def function(self, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return a function, and what the transform makes of it."""
        if name not in self._functions:
            made = self._scenario.function(name, self.names)
            self._functions[name] = made, self._transform(made)
        return self._functions[name]

    def rebind(self, action: Rebind) -> None:
        """Put another object where a function reaches one."""
        new = eval(action.capture.root, VOCABULARY, self.names)
        rebind(self.function(action.function)[0], action.capture, new)

    def call(self, action: Call, given: Arguments) -> Exception | None:
        """Make a call; return what it raises."""
        args, kwargs = given
        try:
            self.names[action.result] = self.function(action.function)[1](*args, **kwargs)
        except Exception as error:
            return error
        return None


def run(case: Case) -> Outcome:
    """Run a program in all worlds and compare them after every action."""
    with arrays_refuse_attributes():
        return _Run(case).outcome()


class _Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        spread = case.lanes
        lanes = [-1] if spread is None else range(spread.size)
        self.plain = [World(case.scenario, case.plain) for _ in lanes]
        self.other = World(case.scenario, case.transform)
        if spread is not None:
            spread.apply([world.names for world in self.plain], self.other.names)
        self.pairings = [Pairing(lane=lane, carries=case.carries) for lane in lanes]

    def compare(self) -> list[str]:
        for pairing, plain in zip(self.pairings, self.plain, strict=True):
            if found := pairing.compare(plain.names, self.other.names):
                return found
        return []

    def outcome(self) -> Outcome:
        raised = 0
        if found := self.compare():
            raise AssertionError(f"a world is not reproducible: {found}")
        for action in self.case.scenario.actions:
            if isinstance(action, Outside):
                for plain in self.plain:
                    exec(action.line, VOCABULARY, plain.names)
                try:
                    exec(action.line, VOCABULARY, self.other.names)
                except Exception as error:
                    return Outcome("unequal", f"in {action.line}\nraised {error!r}")
            elif isinstance(action, Rebind):
                for world in (*self.plain, self.other):
                    world.rebind(action)
            else:
                outcome = self.call(action)
                if isinstance(outcome, Outcome):
                    return outcome
                raised += outcome
            if found := self.compare():
                return Outcome("unequal", "\n".join([f"after {action.text()}", *found]))
        return Outcome("equal", raised=raised)

    def call(self, action: Call) -> Outcome | bool:
        """Make one call in all worlds; tell whether all raised, or how they differ."""
        where = f"in {action.text()}"
        before = [Snapshot([a for a, _ in pairing.pairs]) for pairing in self.pairings]
        untouched = Snapshot([b for _, b in self.pairings[0].pairs])
        given = [arguments(action.arguments, world.names) for world in (*self.plain, self.other)]
        if before[0].changes():
            raise NotAProgramError("an argument is a path that makes an entry of a defaultdict")
        errors = [world.call(action, g) for world, g in zip(self.plain, given, strict=False)]
        expected = errors[0]
        if expected is not None and is_no_program(expected):
            raise NotAProgramError(
                "a statement takes a number or a NumPy array for something else"
            ) from expected
        args, kwargs = given[-1]
        if (spread := self.case.lanes) is not None:
            if not all(map(spread.has_axes, (*args, *kwargs.values()))):
                raise NotAProgramError("NumPy scalars in lists are arrays, and have no axis")
            args = tuple(spread.given(x) for x in args)
            kwargs = {name: spread.given(x) for name, x in kwargs.items()}
        got = self.other.call(action, (args, kwargs))
        if got is None and expected is None:
            return False
        if got is None:
            return Outcome("unequal", f"{where}\nraised nothing instead of {expected!r}")
        if type(got) is not type(expected):
            instead = f"{where}\nraised {got!r} instead of {expected!r}"
            if not isinstance(got, AnabranchError):
                return Outcome("unequal", instead)
            changes = untouched.changes()
            fits = isinstance(got, self.case.may_refuse) and _PLACE.search(str(got))
            if changes or not fits:
                return Outcome("unequal", "\n".join([instead, *changes[:_ENOUGH]]))
            return Outcome("refused", instead)
        if changes := untouched.changes():
            return Outcome("unequal", "\n".join([f"{where}\nraised, and yet", *changes[:_ENOUGH]]))
        for snapshot in before:
            snapshot.restore()
        return True
