"""Which names the code of a function looks up and binds: read off the code, without running it."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple


class Names(NamedTuple):
    """Names in code, and in code nested in it."""

    used: tuple[str, ...]  # globals that it may look up or bind
    stored: tuple[str, ...]  # globals that it binds
    rebound: tuple[str, ...]  # variables of the functions around it that it binds
    mentioned: frozenset[str]  # globals, attributes, and strings that may be names


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names in code."""
    used, stored, rebound = dict[str, None](), dict[str, None](), dict[str, None]()
    free, mentioned = code.co_freevars, set[str]()
    pending = [code]
    while pending:
        code = pending.pop()
        for instruction in dis.get_instructions(code):  # `co_names` has names of attributes, too
            name = instruction.opname
            if name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
                used[instruction.argval] = None
            if name == "STORE_GLOBAL":
                stored[instruction.argval] = None
            elif name in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free:
                rebound[instruction.argval] = None
        mentioned.update(code.co_names, [c for c in code.co_consts if isinstance(c, str)])
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return Names((*used,), (*stored,), (*rebound,), frozenset(mentioned))
