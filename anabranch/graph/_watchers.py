"""Who is told when a Module or a Variable is written: calls that were planned for it.

To ask all Modules of a model on each call whether they have changed, and all Variables what they
hold, takes a fifth of the call. So they tell, and those who watch remember. Both refer weakly to
those who watch.

**Structure.** After a write to a Module the stamp that is the same for all objects is renewed, then
the watchers are told; who begins to watch looks at that stamp before the walk and after having
begun. So there is no write that neither the one nor the other notices, in whatever order threads
run. Both happens before the write, too: an interrupt may come right after it.

**Switches.** An attribute that says in which mode a Module is goes back and forth. So those who
watch keep what they know while switches are not as they know them, and are fresh again when all
are. Only one thread at a time writes switches of Modules that are watched, or begins to watch.

**Values.** `Memory.values` is None or exactly what the Variables hold. Values are remembered, and
Variables that are remembered written, by one thread at a time (see `_turn`), and what is remembered
is dropped *before* the write, so that an interrupt in between does no harm. A Variable that nobody
remembers is written without waiting, and looked at once more after that: somebody may have begun.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from anabranch.graph._tokens import STRUCTURE
from anabranch.graph._turn import HAS_LOCK, in_turn


class Watcher:
    """Watches Modules."""

    def __init__(self) -> None:
        self.fresh = True
        """Whether all of them are as it knows them."""
        self.ended = False
        """Whether they never will be again."""
        self.differing: dict[tuple[int, str], Any] = {}
        """The switches that are not as it knows them: the id of a Module and a name, and the value
        that it knows."""
        self.loose: Collection[tuple[int, str]] = ()
        """The attributes that it reads itself: the id of a Module, and a name."""

    def end(self) -> None:
        """Say that what it knows is out of date for good."""
        self.ended = True  # first: who sees that it is not, makes it fresh before this goes on
        self.fresh = False
        self.leave()

    def leave(self) -> None:
        """Let go of what it knows, which is out of date; others may be reading it."""


class Memory:
    """What some Variables hold; see `memory_of`."""

    __slots__ = ("__weakref__", "_overlapping", "beside", "held", "values", "variables")

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = variables
        self.values: list[Any] | None = None
        """None if one of them has been written since."""
        self.held: list[Any] | None = None
        """What will be `values`, if none is written before: the same list then."""
        self.beside: list[weakref.ref[Memory]] = []
        """Those that hold values of the same Variables."""
        self._overlapping: list[weakref.ref[Memory]] = []

    def read(self) -> list[Any]:
        """Return what the Variables hold, and remember it."""
        values = self.values
        return self._read() if values is None else values

    @in_turn
    def _read(self) -> list[Any]:
        if len(self._overlapping) > _MOST:
            return [*map(_value_of, self.variables)]
        for ref in self._overlapping:
            other = ref()
            if other is not None and not any(known() is self for known in other.beside):
                other.beside.append(weakref.ref(self))
        try:
            self.held = values = []
            values += map(_value_of, self.variables)
            self.values = values if self.held is values else None  # a finaliser may have written
            return values
        finally:
            self.held = None

    def drop_beside(self) -> None:
        """Let those beside forget; it is the turn of this thread."""
        dropped, self.beside = self.beside, []
        forget(dropped)


_MOST = 16  # memories that share Variables with one, and that it tells of itself


@in_turn
def memory_of(variables: Sequence[Any]) -> Memory:
    """Return the memory of some Variables, which is one for all who ask for the same ones."""
    for ref in (variables[0]._memories or ()) if variables else ():
        known = ref()
        if known is not None and _are_same(known.variables, variables):
            return known
    memory = Memory(variables)
    mine = weakref.ref(memory)
    found: dict[int, tuple[Memories, Memories]] = {}  # what was there, and is there now, by id
    others: dict[int, Memory] = {}
    for variable in variables:
        refs: Memories = variable._memories or ()
        if id(refs) not in found:
            alive = [(ref, other) for ref in refs if (other := ref()) is not None]
            others.update({id(other): other for _, other in alive})
            found[id(refs)] = refs, (*[ref for ref, _ in alive], mine)
        _set(variable, "_memories", found[id(refs)][1])
    for other in others.values():
        memory._overlapping.append(weakref.ref(other))
        if other.values is not None:
            memory.beside.append(weakref.ref(other))
        other._overlapping = [*[ref for ref in other._overlapping if ref() is not None], mine]
    return memory


def _are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


Memories = Sequence["weakref.ref[Memory]"]
Watchers = Sequence["weakref.ref[Watcher]"]
_set = object.__setattr__
_value_of = operator.attrgetter("_value")


@in_turn
def watch(modules: Iterable[Any], watcher: Watcher) -> None:
    """Let a watcher be told of structural writes to some Modules."""
    ref = weakref.ref(watcher)
    for module in modules:
        watchers: list[weakref.ref[Watcher]] | None = module._ab_watchers
        if watchers is None:
            _set(module, "_ab_watchers", [ref])
            continue
        count = len(watchers)
        if not count & (count - 1):  # a power of two: dead ones are dropped rarely enough
            watchers[:] = [known for known in watchers if known() is not None]
        watchers.append(ref)


def tell(watchers: Watchers, attribute: tuple[int, str] | None = None) -> None:
    """Tell those who watch a Module that it was written.

    Arguments:
        watchers: of the Module.
        attribute: the id of the Module and a name, if nothing but the value of an attribute was
            replaced; those who read that one themselves are not told.
    """
    for watcher in _alive(watchers):
        if attribute is None or attribute not in watcher.loose:
            watcher.end()


def _alive(watchers: Watchers) -> list[Watcher]:
    """Return those whom a write concerns."""
    known = [ref() for ref in [*watchers]]  # a copy: another thread may begin to watch
    return [watcher for watcher in known if watcher is not None and not watcher.ended]


SWITCHES = frozenset({bool, int, str, type(None)} if HAS_LOCK else ())
"""The types of the values of switches."""


@in_turn
def write_switch(module: Any, attributes: Mapping[str, Any], name: str, value: Any) -> None:
    """Write an attribute of a Module that is watched and may be a switch; tell of it.

    Arguments:
        module: the Module.
        attributes: of it.
        name: of the attribute.
        value: one of `SWITCHES`.
    """
    old, key = attributes.get(name), (id(module), name)
    if name not in attributes or type(old) not in SWITCHES:
        tell(module._ab_watchers)
    for watcher in _alive(module._ab_watchers):
        watcher.fresh = False
        watcher.differing.setdefault(key, old)
    STRUCTURE.stamp = object()
    _set(module, name, value)
    STRUCTURE.stamp = object()
    for watcher in _alive(module._ab_watchers):
        if key not in watcher.differing or attributes.get(name) is not value:
            watcher.end()  # a finaliser has begun to watch meanwhile; a slot has the same name
            continue
        then = watcher.differing[key]
        if type(then) is type(value) and then == value:
            del watcher.differing[key]
        watcher.fresh = not (watcher.differing or watcher.ended)  # at once; see `_turn`


def forget(memories: Memories) -> None:
    """Let memories forget; it is the turn of this thread."""
    for ref in memories:
        memory = ref()
        if memory is not None:
            memory.values = memory.held = None


def forget_all(variables: Iterable[Any]) -> None:
    """Let those who remember the values of some Variables forget; it is the turn of this thread."""
    for memories in {id(m): m for v in variables if (m := v._memories) is not None}.values():
        forget(memories)


def write_value(variable: Any, value: Any) -> None:
    """Write the value of a Variable, and see to it that nobody remembers another one."""
    if variable._memories is None:
        _set(variable, "_value", value)
        if variable._memories is None:
            return
    _write_remembered(variable, value)


@in_turn
def _write_remembered(variable: Any, value: Any) -> None:
    forget(variable._memories)
    _set(variable, "_value", value)
