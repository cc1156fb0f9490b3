"""Lists and dicts that a function captures, and that hold no object: constants, or nodes.

To JAX they are constants, and mostly that is what they are to us: a table, a configuration. But one
that is a node of the same call, too, is one object, and one that the function returns or assigns
must not come back as another one. When that is seen, what the function captures there is a node for
good, and is split like any other.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable
from typing import Any

from anabranch.graph import _classify, _kinds
from anabranch.graph._function import (
    TAKEN_FOR_NODES,
    Capture,
    is_library,
    is_mutable_container,
    plain_function,
    reaches_object,
    what_is_captured,
)

_MOST = 4096  # functions, and elements of one container
_BOUND = frozenset({types.MethodType, functools.partial})

Constants = dict[int, list[tuple[types.FunctionType, Capture]]]
"""By the id of a container, the captures that lead to it."""


def captured_constants(functions: Iterable[Any]) -> Constants:
    """Return the containers without objects that functions capture, and what is in them.

    Arguments:
        functions: of the user; those that they capture are looked at, too.
    """
    found: Constants = {}
    pending, seen = [*functions], set[int]()
    while pending and len(seen) < _MOST:
        function = plain_function(pending.pop())
        plain = isinstance(function, types.FunctionType)
        if not plain or id(function) in seen or is_library(function.__globals__):
            continue
        seen.add(id(function))
        nodes = TAKEN_FOR_NODES.get(function, ())
        for capture, value in what_is_captured(function):
            cls = type(value)
            if cls in _classify.LOOK or cls in _BOUND:
                pending.append(value)
            elif cls in _kinds.EXACT and capture not in nodes and not reaches_object(value):
                _add(found, value, (function, capture))
    return found


def _add(found: Constants, value: Any, capture: tuple[types.FunctionType, Capture]) -> None:
    pending: list[Any] = [value]
    seen = set[int]()
    while pending and len(seen) < _MOST:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if is_mutable_container(x):
            found.setdefault(id(x), []).append(capture)
        elif type(x) is not tuple:
            continue
        values = x.values() if isinstance(x, dict) else x
        pending += [v for v in itertools.islice(values, _MOST) if type(v) in _kinds.EXACT]


def take_for_nodes(constants: Constants, objects: Iterable[Any]) -> bool:
    """Let those constants be nodes that are among some objects; return whether there are any.

    Arguments:
        constants: what functions capture.
        objects: nodes of a call, or what a function leaves behind.
    """
    captures = [each for x in objects for each in constants.get(id(x), ())]
    for function, capture in captures:
        TAKEN_FOR_NODES.setdefault(function, set()).add(capture)
    return bool(captures)
