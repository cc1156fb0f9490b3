"""Who is told when the structure of a Module is written: calls that were planned for it.

To ask all Modules of a model on each call whether they have changed takes a tenth of the call. So
they tell. A Module refers weakly to those who watch it. A write comes first, then the stamp that is
the same for all objects is renewed, then the watchers are told; who begins to watch looks at that
stamp before the walk and after having begun. So there is no write that neither the one nor the
other notices, in whatever order threads run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any


class Watcher:
    """Watches Modules."""

    def __init__(self) -> None:
        self.fresh = True
        """Whether none of them has been written since."""


Watchers = list["weakref.ref[Watcher]"]
_WATCHING = threading.Lock()


def watch(modules: Iterable[Any], watcher: Watcher) -> None:
    """Let a watcher be told of structural writes to some Modules."""
    ref = weakref.ref(watcher)
    with _WATCHING:
        for module in modules:
            watchers: Watchers | None = module._ab_watchers
            if watchers is None:
                object.__setattr__(module, "_ab_watchers", [ref])
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
