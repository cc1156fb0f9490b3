"""Constants of a compiled function that have changed since: found by comparing before and after.

Objects that a function captures are inputs, as far as they can be seen. Arrays that it captures,
lists and dicts without objects, and what hangs on instances that are no nodes are constants of its
trace, as they are for JAX: a compiled function goes on with the old ones.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from anabranch.errors import StaleCaptureError, StaticValueError, bounded, first_few
from anabranch.graph import _classify, _static
from anabranch.graph._function import captures_of, plain_function, what_is_captured
from anabranch.graph._kinds import Kind

_MOST = 100_000  # things that are looked at
_ABSENT = "<absent>"


@contextlib.contextmanager
def check_captures(function: Any) -> Generator[None]:
    """Raise at the end of a `with` block if a constant of a function was changed in it.

    What is compared is what the function captures besides its inputs: arrays (by identity, numpy
    arrays by their contents), static values, lists and dicts, attributes of instances that are no
    nodes, and arrays and static values of Modules that are reached through such instances.

    Arguments:
        function: a function, or one that was transformed.

    Raises:
        StaleCaptureError: something has changed, which a compiled function would not see.

    >>> import anabranch as ab
    >>> table = {"rate": 0.1}
    >>> step = ab.jit(lambda x: x * table["rate"])
    >>> with ab.debug.check_captures(step):
    ...     _ = step(1.0)
    >>> with ab.debug.check_captures(step):  # doctest: +ELLIPSIS
    ...     table["rate"] = 0.5
    Traceback (most recent call last):
    ...
    anabranch.errors.StaleCaptureError: ...table['rate']: was 0.1, is 0.5...
    """
    before = _constants(function)
    yield
    now = _constants(function)
    changed = [
        f"{path}: was {_shown(before.get(path))}, is {_shown(now.get(path))}"
        for path in {**before, **now}
        if not _is_same(before.get(path), now.get(path))
    ]
    if changed:
        raise StaleCaptureError(
            bounded(
                "these are constants of the trace of a compiled function, and have changed:\n"
                f"{first_few(changed)}\n"
                "hold them in a Module, a list or a dict that the function captures together with "
                "an object, or pass them as arguments"
            )
        )


def _constants(function: Any) -> dict[str, tuple[Any, Any]]:
    """Return by path what is there and its comparable form; the first keeps ids valid."""
    found: dict[str, tuple[Any, Any]] = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", plain_function(function))]
    while pending and len(found) < _MOST:
        path, x = pending.pop()
        children: dict[str, Any] = {}
        if isinstance(x, types.FunctionType):
            own = set(captures_of(x)) if id(x) not in seen else set()
            for capture, value in what_is_captured(x) if id(x) not in seen else ():
                plain = plain_function(value)
                if capture not in own or isinstance(plain, types.FunctionType):
                    children[f"{path}.{capture.name}" if path else capture.name] = plain
            form: Any = x
        else:
            form, children = _open(path, x)
        if path:
            found[path] = (x, form)
        if id(x) not in seen:
            seen.add(id(x))
            pending += reversed(children.items())
    return found


def _open(path: str, x: Any) -> tuple[Any, dict[str, Any]]:
    """Return a comparable form of a thing, and what is in it."""
    if isinstance(x, np.ndarray):
        return (x.dtype, x.shape, x.tobytes()), {}
    if isinstance(x, (types.ModuleType, type, jax.Array)):
        return x, {}
    if type(x) in (list, tuple, deque):
        return (type(x), len(x)), {f"{path}[{i}]": child for i, child in enumerate(x)}
    if isinstance(x, dict):
        return (type(x), tuple(x)), {f"{path}[{key!r}]": child for key, child in x.items()}
    rule = _classify.rule_of(x)
    if isinstance(rule, Kind) and rule.is_variable:
        return x, {}  # found by its use
    if isinstance(rule, Kind) and rule.is_object:
        _, keys, values = rule.open(x)
        shown = [f"{path}{rule.show_key(key)}" for key in keys]
        return (type(x), tuple(keys)), dict(zip(shown, values, strict=True))
    if rule is _classify.UNKNOWN and getattr(x, "__dict__", None):
        attributes = vars(x)
        return (x, tuple(attributes)), {f"{path}.{k}": child for k, child in attributes.items()}
    try:
        return (_static.encode(x),), {}
    except StaticValueError:
        return x, {}


def _is_same(before: Any, now: Any) -> bool:
    if before is None or now is None:
        return False
    a, b = before[1], now[1]
    return a is b or (isinstance(a, tuple) and isinstance(b, tuple) and a == b)


def _shown(found: Any) -> str:
    if found is None:
        return _ABSENT
    x = found[0]
    if isinstance(x, (jax.Array, np.ndarray)):
        kind = "numpy" if isinstance(x, np.ndarray) else "array"
        return f"{kind} {x.dtype}[{','.join(map(str, x.shape))}]"
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."
