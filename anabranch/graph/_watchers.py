"""Who is told when a Module or a Variable is written: calls that were planned for it.

To ask all Modules of a model on each call whether they have changed, and all Variables what they
hold, takes a fifth of the call. So they tell, and those who watch remember. Both refer weakly to
those who watch.

**Structure.** A write to a Module comes first, then the stamp that is the same for all objects is
renewed, then the watchers are told; who begins to watch looks at that stamp before the walk and
after having begun. So there is no write that neither the one nor the other notices, in whatever
order threads run.

**Values.** `Watcher.values` is None or exactly what the Variables hold. Values are remembered, and
Variables that are watched written, under one lock, and what is remembered is dropped *before* the
write, so that an interrupt in between does no harm. A Variable that nobody watches is written
without the lock, and looked at once more after that: somebody may have begun.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any


class Watcher:
    """Watches Modules and Variables."""

    def __init__(self) -> None:
        self.fresh = True
        """Whether no Module has been written since."""
        self.values: list[Any] | None = None
        """What the Variables hold, None if one of them has been written since."""
        self.beside: list[weakref.ref[Watcher]] = []
        """Those who remember values of the same Variables."""
        self._overlapping: list[weakref.ref[Watcher]] = []

    def remember(self, variables: Sequence[Any]) -> list[Any]:
        """Return what the Variables that it watches hold, and remember it."""
        with LOCK:
            for ref in self._overlapping:
                other = ref()
                if other is not None and not any(known() is self for known in other.beside):
                    other.beside.append(weakref.ref(self))
            self.values = values = [variable._value for variable in variables]
            return values

    def drop_beside(self) -> None:
        """Let those beside forget what they remember; `LOCK` is held."""
        dropped, self.beside = self.beside, []
        forget(dropped)

    def watch_values(self, variables: Sequence[Any]) -> None:
        """Be told of writes to the values of some Variables."""
        mine: weakref.ref[Watcher] = weakref.ref(self)
        found: dict[int, tuple[weakref.ref[Watcher], ...]] = {}
        others: dict[int, Watcher] = {}
        with LOCK:
            for variable in variables:
                known: Watchers = variable._watchers or ()
                if id(known) not in found:
                    alive = [(ref, watcher) for ref in known if (watcher := ref()) is not None]
                    others.update({id(watcher): watcher for _, watcher in alive})
                    found[id(known)] = (*[ref for ref, _ in alive], mine)
                _set(variable, "_watchers", found[id(known)])
            for other in others.values():
                self._overlapping.append(weakref.ref(other))
                other._overlapping = [
                    *[ref for ref in other._overlapping if ref() is not None],
                    mine,
                ]


Watchers = Sequence["weakref.ref[Watcher]"]
LOCK = threading.RLock()
"""Held while Variables are written of which somebody may remember the values, and by commits."""
_set = object.__setattr__


def watch(modules: Iterable[Any], watcher: Watcher) -> None:
    """Let a watcher be told of structural writes to some Modules."""
    ref = weakref.ref(watcher)
    with LOCK:
        for module in modules:
            watchers: list[weakref.ref[Watcher]] | None = module._ab_watchers
            if watchers is None:
                _set(module, "_ab_watchers", [ref])
                continue
            count = len(watchers)
            if not count & (count - 1):  # a power of two: dead ones are dropped rarely enough
                watchers[:] = [known for known in watchers if known() is not None]
            watchers.append(ref)


def tell(watchers: Watchers) -> None:
    """Tell those who watch a Module that it was written."""
    for ref in [*watchers]:  # a copy: another thread may begin to watch
        watcher = ref()
        if watcher is not None:
            watcher.fresh = False
            watcher.values = None


def forget(watchers: Watchers) -> None:
    """Let those who watch a Variable forget what they remember; `LOCK` is held."""
    for ref in watchers:
        watcher = ref()
        if watcher is not None:
            watcher.values = None


def forget_all(variables: Iterable[Any]) -> None:
    """Let those who watch some Variables forget what they remember; `LOCK` is held."""
    for watchers in {id(w): w for v in variables if (w := v._watchers) is not None}.values():
        forget(watchers)


def write_value(variable: Any, value: Any) -> None:
    """Write the value of a Variable, and see to it that nobody remembers another one."""
    if variable._watchers is None:
        _set(variable, "_value", value)
        if variable._watchers is None:
            return
    with LOCK:
        forget(variable._watchers)
        _set(variable, "_value", value)
