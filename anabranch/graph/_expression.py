"""How the running code reaches an object, for error messages: `held.layers[0].w`."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from anabranch.graph import _classify
from anabranch.graph._function import plain_function, what_is_captured
from anabranch.graph._kinds import Kind

_HIDDEN = tuple(
    [str(path) + os.sep for path in (Path(jax.__file__).parent, Path(__file__).parents[1])]
)
_FRAMES = 4  # of the user
_MOST = 5000  # objects that are looked at in each frame


def expression_for(obj: Any) -> str | None:
    """Return an expression for an object in the code that runs, None if none is found."""
    frame = sys._getframe(1)
    left = _FRAMES
    while frame is not None and left:
        filename = frame.f_code.co_filename
        if not filename.startswith(_HIDDEN):
            left -= 1
            found = _search(obj, _names(frame))
            if found is not None:
                return _shortened(found)
        frame = frame.f_back
    return None


def expression_from(functions: Iterable[Any], obj: Any) -> str | None:
    """Return an expression for an object in the code of functions, None if none is found."""
    names: list[tuple[str, Any]] = []
    pending = [plain_function(function) for function in functions]
    seen: set[int] = set()
    while pending and len(seen) < _MOST:
        function = pending.pop(0)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            held = [(capture.name, x) for capture, x in what_is_captured(function)]
            names += held
            pending += [plain_function(x) for _, x in held]
    return _shortened(_search(obj, iter(names)))


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


def _search(obj: Any, names: Iterator[tuple[str, Any]]) -> str | None:
    """Return the shortest way to an object."""
    level = [*names]
    seen: set[int] = set()
    while level and len(seen) < _MOST:
        deeper: list[tuple[str, Any]] = []
        for name, x in level:
            if x is obj:
                return name
            if id(x) not in seen and len(seen) < _MOST:
                seen.add(id(x))
                deeper += [(f"{name}{key}", child) for key, child in _children(x)]
        level = deeper
    return None


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    rule = _classify.RULES.get(type(x))
    if isinstance(rule, Kind) and not rule.is_variable:
        try:
            _, keys, values = rule.open(x)
        except Exception:  # it is only for a message
            return
        yield from [(rule.show_key(k), child) for k, child in zip(keys, values, strict=True)]
        if rule.is_object:
            yield from [(f".{k}", child) for k, child in _class_attributes(type(x))]
    elif isinstance(x, type):
        yield from [(f".{k}", child) for k, child in _class_attributes(x)]
    elif rule is _classify.UNKNOWN:
        yield from [(f".{k}", child) for k, child in getattr(x, "__dict__", {}).items()]


def _class_attributes(cls: type) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(_classify.RULES.get(type(value)), Kind)
    ]
