"""What JAX calls the things it is given: the user's functions, and where each leaf comes from.

JAX's messages name the function that was traced, and its arguments by parameter and index. A
function of ours that takes leaves gets a parameter `leaves_17`, and when an error leaves the
transform, `leaves_17[0]` in its text becomes `args[0]['w']`. Paths are found only then: those of
all leaves may take longer than the trace.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from anabranch._boundary import rewriters
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaf_info import LeafInfo, call_text

F = TypeVar("F", bound=Callable[..., Any])
Numbers = Callable[[Sequence[int]], int]


_SIGNATURES: dict[types.CodeType, inspect.Signature] = {}


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of one of our own functions, which takes long to find."""
    signature = getattr(function, "__signature__", None) or _SIGNATURES.get(function.__code__)
    if signature is None:
        signature = _SIGNATURES[function.__code__] = inspect.signature(function)
    return signature


def name_inside(run: F, function: Callable[..., Any], graphdef: GraphDef | None = None) -> F:
    """Let JAX's messages name the user's function and line, not the function that it is given.

    Arguments:
        run: what JAX is given.
        function: the user's.
        graphdef: of the call whose leaves are the parameter `leaves` of `run`, if it has one.
    """
    signature = signature_of(run)
    functools.update_wrapper(run, function, updated=())
    run.__signature__ = signature  # type: ignore[attr-defined]  # jit looks at the parameters
    return run if graphdef is None else number_leaves(run, graphdef)


def number_leaves(run: F, graphdef: GraphDef, numbers: Mapping[str, Numbers] | None = None) -> F:
    """Let JAX's messages tell where a leaf comes from.

    Arguments:
        run: what JAX is given.
        graphdef: of a call.
        numbers: for parameters of `run` that are lists of leaves, or containers of such lists: from
            the indices of a leaf in the parameter to its number. Those of `leaves` are numbers.
    """
    function: Any = run
    names: dict[str, str] = {}
    for parameter, number in (numbers or _LEAVES).items():
        places = _Places(graphdef, number)
        names[parameter] = f"{parameter}_{(key := next(_NUMBERS))}"
        _PLACES[key] = places
        function.__dict__.setdefault("__places__", []).append(places)  # as long as it lives
    signature = signature_of(function)
    function.__signature__ = signature.replace(
        parameters=[
            p.replace(name=names[p.name]) if p.name in names else p
            for p in signature.parameters.values()
        ]
    )
    return run


def leaf_name(info: LeafInfo) -> str:
    """Return where a leaf of a call is, as the call is written: `args[0]['w']`."""
    return call_text(info.path)


class _Places:
    __slots__ = ("__weakref__", "graphdef", "numbers")

    def __init__(self, graphdef: GraphDef, numbers: Numbers) -> None:
        self.graphdef, self.numbers = graphdef, numbers

    def name(self, indices: Sequence[int]) -> str:
        return leaf_name(self.graphdef.infos[self.numbers(indices)])


_LEAVES: Mapping[str, Numbers] = {"leaves": operator.itemgetter(0)}
_NUMBERS = itertools.count()
_PLACES: weakref.WeakValueDictionary[int, _Places] = weakref.WeakValueDictionary()
_PATTERN = re.compile(r"\b(?:leaves|carried|slices|state)_(\d+)((?:\[\d+\])+)")


def _with_paths(text: str) -> str:
    return _PATTERN.sub(_path_of, text)


def _path_of(match: re.Match[str]) -> str:
    places = _PLACES.get(int(match[1]))
    try:
        indices = [int(index) for index in match[2][1:-1].split("][")]
        return match[0] if places is None else places.name(indices)
    except IndexError:  # a text of the user that looks like ours
        return match[0]


rewriters.append(_with_paths)
