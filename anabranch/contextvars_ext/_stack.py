"""What is set in the current context: for each variable, a stack of open entries.

All variables share one `contextvars.ContextVar`, which holds an immutable mapping from variable to
its innermost open entry. So threads, asyncio tasks and copied contexts behave as in the standard
library, while a variable that goes out of use is collected: a context keeps every `ContextVar`
that was ever set in it alive, and here that is only this one.

The entries of one variable form an immutable linked list. Leaving a context takes out its own
entry, wherever it lies, and in the current context only. Resetting tokens, the standard library's
way, cannot do that, and interleaved generators leave contexts in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from anabranch import _jax


@dataclass(slots=True, eq=False)
class Entry:
    """One open context of one variable. Never changed once it is made.

    Fields:
        value: what was set.
        chain: the traces that were active on entry, innermost first, held weakly.
        owner: the context manager that was entered.
        below: the entry that was current before, or None.
    """

    value: Any
    chain: _jax.TraceRefs
    owner: object
    below: Entry | None


_innermost: Final[ContextVar[Mapping[object, Entry]]] = ContextVar(
    "anabranch.contextvars_ext", default=MappingProxyType({})
)


_entries: Final = _innermost.get  # a read is on hot paths, and the attribute costs a tenth of it


def find_entry(var: object) -> Entry | None:
    """Return the innermost open entry of a variable in the current context."""
    return _entries().get(var)


def open_entry(var: object, value: Any, owner: object) -> None:
    """Put an entry on top of the stack of a variable in the current context."""
    entries = _entries()
    entry = Entry(value, _jax.record_chain(), owner, entries.get(var))
    # The token is dropped at once: it would keep the previous mapping alive.
    _innermost.set({**entries, var: entry})


def close_entry(var: object, owner: object) -> bool:
    """Take the innermost entry of an owner out; tell whether there was one."""
    entries = dict(_entries())
    above: list[Entry] = []
    entry = entries.pop(var, None)
    while entry is not None and entry.owner is not owner:
        above.append(entry)
        entry = entry.below
    if entry is None:
        return False
    rest = entry.below
    for kept in reversed(above):
        rest = Entry(kept.value, kept.chain, kept.owner, rest)
    if rest is not None:
        entries[var] = rest
    _innermost.set(entries)
    return True
