"""Why a compiled function was traced again: the place in which two structures differ.

A structure has an entry for each object, so that two of them are unreadable side by side. What is
shown is the few places at which they differ, each on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.errors import ArgumentError, bounded, first_few
from anabranch.graph._compare import Difference, differences
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._leaf_info import call_text, path_text
from anabranch.transforms._compiled import Trace
from anabranch.transforms._jit import BoundJitFunction, JitFunction

_MOST = 100  # differences that are looked for


def explain(a: GraphDef, b: GraphDef) -> str:
    """Say where two graphdefs differ: a line for each place, with what was and what is there.

    Arguments:
        a: a graphdef, the older one.
        b: the newer one.

    Returns:
        At most five lines and the number of others; an empty text if nothing differs.

    >>> import anabranch as ab
    >>> old, new = (
    ...     ab.graphdef({"w": ab.Param(1.0), "n": 1}),
    ...     ab.graphdef({"w": ab.Param(1.0), "n": 2}),
    ... )
    >>> print(ab.debug.explain(old, new))
    ['n']: was 1, is 2
    """
    return _listed([_line(path_text(d.path), d) for d in _structural(a, b)])


def explain_retrace(function: Any) -> str:
    """Say why a function compiled by `jit` was traced the last time.

    The last trace is compared with the one before that is most like it.

    Arguments:
        function: what `jit` returned; a method that was compiled in a class body.

    Raises:
        ArgumentError: it is not compiled by `jit`.

    >>> import anabranch as ab, jax.numpy as jnp
    >>> model = {"w": ab.Param(1.0), "rate": "fast"}
    >>> step = ab.jit(lambda model, x: model["w"] * len(model["rate"]) * x)
    >>> _ = step(model, 1.0)
    >>> model["rate"] = "slow!"
    >>> _ = step(model, 1.0)
    >>> print(ab.debug.explain_retrace(step))
    args[0]['rate']: was 'fast', is 'slow!'
    >>> _ = step(model, jnp.ones(3))
    >>> print(ab.debug.explain_retrace(step))
    args[1]: was float32[] (weakly typed), is float32[3]
    """
    if isinstance(function, BoundJitFunction):
        function = function.__func__
    if not isinstance(function, JitFunction):
        raise ArgumentError(
            f"explain_retrace: a {type(function).__name__} is not compiled by `jit`; give what "
            "`jit` returned"
        )
    traces: list[Trace] = function.recent_traces()
    if not traces:
        return "it was not traced yet, or its cache was cleared"
    *before, last = traces
    if not before:
        return "it was traced once: there is nothing to compare with"
    found = min([_lines(trace, last) for trace in reversed(before)], key=len)
    return _listed(found) or (
        "nothing differs in the arguments: a setting of JAX (x64, a mesh, a context), a device, or "
        "another thread made JAX trace it again"
    )


def _lines(a: Trace, b: Trace) -> list[str]:
    """Say where two traces differ, in structure, or else in the types of their leaves."""
    lines = [_line(call_text(d.path), d) for d in _structural(a.graphdef, b.graphdef)]
    for info, old, new in zip(b.graphdef.infos, a.types, b.types, strict=False):
        if a.graphdef == b.graphdef and _type(old) != _type(new):
            lines.append(f"{call_text(info.path)}: was {_type(old)}, is {_type(new)}")
    return lines


def _structural(a: GraphDef, b: GraphDef) -> list[Difference]:
    def is_same(leaf: int, other: int) -> bool:
        return True  # of a leaf, a graphdef says only that there is one

    def show(leaf: int) -> str:
        return "an array or a number"

    found = differences(a, b, is_same, show, show) if a != b else iter(())
    return [difference for difference, _ in zip(found, range(_MOST), strict=False)]


def _line(place: str, difference: Difference) -> str:
    return f"{place}: was {difference.a}, is {difference.b}"


def _type(aval: Any) -> str:
    weak = " (weakly typed)" if getattr(aval, "weak_type", False) else ""
    shape = ",".join(map(str, aval.shape))
    sharding = getattr(aval, "sharding", None)
    spec = getattr(sharding, "spec", None)
    placed = f" sharded {spec}" if spec is not None and any(p is not None for p in spec) else ""
    return f"{aval.dtype}[{shape}]{weak}{placed}"


def _listed(lines: Sequence[str]) -> str:
    return bounded("\n".join(line.strip() for line in first_few(lines).splitlines()))
