"""How the running code reaches an object, for error messages: `held.layers[0].w`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from anabranch.graph._search import search
from anabranch.graph._ways import ways_to

_HIDDEN = tuple(
    [str(path) + os.sep for path in (Path(jax.__file__).parent, Path(__file__).parents[1])]
)
_FRAMES = 4  # of the user


def expression_for(obj: Any) -> str | None:
    """Return an expression for an object in the code that runs, None if none is found."""
    frame = sys._getframe(1)
    left = _FRAMES
    while frame is not None and left:
        filename = frame.f_code.co_filename
        if not filename.startswith(_HIDDEN):
            left -= 1
            (found,) = search([obj], [*_names(frame)])
            if found is not None and found.text is not None:
                return _shortened(found.text)
        frame = frame.f_back
    return None


def expression_from(functions: Iterable[Any], obj: Any) -> str | None:
    """Return an expression for an object in the code of functions, None if none is found."""
    found = ways_to(functions, [obj])
    return _shortened(found[0].text) if found[0] is not None else None


def _shortened(found: str | None) -> str | None:
    return found if found is None or len(found) <= 200 else f"{found[:120]}...{found[-70:]}"


def _names(frame: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the code of a frame calls by name: captured and global things first."""
    code = frame.f_code
    inner = code.co_freevars
    local = frame.f_locals
    yield from [(name, local[name]) for name in inner if name in local]
    scope = frame.f_globals
    yield from [(name, scope[name]) for name in code.co_names if name in scope]
    yield from [(name, value) for name, value in local.items() if name not in inner]
