"""Check that JAX's traces look as `_jax` expects: on tiny transforms, in a fresh thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import jax

from anabranch import _jax

_EXPECTED: Final = {
    "thread": "root",
    "staged": "boundary root",
    "nested": "boundary boundary root",
    "checkpoint": "boundary boundary root",
    "scan": "loop boundary root",
    "while body": "loop boundary root",
    "while cond": "loop boundary root",
    "fori_loop": "loop boundary root",
    "hoisting": "open root",
    "grad in jit": "open boundary root",
    "hoisted constant": "there",
    "hoisted operand": "there",
    "hoisted outside": "there",
    "vmap": "open root",
    "grad": "open root",
    "jvp": "open root",
}


def _observe_level(name: str, value: Any, expected: _jax.Trace, seen: dict[str, str]) -> None:
    """Write down whether a value that was computed elsewhere belongs there."""
    found = _jax.tracer_trace(value) if _jax.is_tracer(value) else _jax.root_trace()
    seen[f"hoisted {name}"] = "there" if found is expected else "elsewhere"


def _observe_chains(seen: dict[str, str]) -> None:
    """Run tiny transforms and write down the chain that the function inside sees."""

    def kind(trace: _jax.Trace) -> str:
        if _jax.is_loop_body(trace):
            return "loop"
        return "root" if _jax.is_root(trace) else "boundary" if _jax.is_boundary(trace) else "open"

    def probe(name: str) -> Callable[[Any], Any]:
        def fn(x: Any) -> Any:
            trace = _jax.current_trace()
            seen[name] = " ".join(map(kind, _jax.trace_chain(trace)))
            if _jax.is_tracer(x) and _jax.tracer_trace(x) is not trace:
                seen[name] += " (argument of another trace)"
            return x * 2.0

        return fn

    api: Any = jax  # the transforms are called on probes, whose types are of no interest

    def staged(x: Any) -> Any:
        probe("staged")(x)
        seen["described"] = _jax.describe_boundary(_jax.current_trace())
        api.jit(probe("nested"))(x)
        api.checkpoint(probe("checkpoint"))(x)
        api.lax.scan(lambda c, _: (probe("scan")(c), None), x, None, length=1)
        api.lax.fori_loop(0, 1, lambda _, c: probe("fori_loop")(c), x)
        less = api.numpy.less
        api.lax.while_loop(lambda c: less(probe("while cond")(c), 1.0), probe("while body"), x)
        with _jax.hoisting_trace():
            probe("hoisting")(1.0)
            _observe_level("constant", api.numpy.zeros(1) + 1.0, _jax.root_trace(), seen)
            _observe_level("operand", api.nn.relu(x), _jax.tracer_trace(x), seen)
        with _jax.at_trace(_jax.root_trace()):
            _observe_level("outside", api.numpy.zeros(1) + 1.0, _jax.root_trace(), seen)
        return api.grad(probe("grad in jit"))(x)

    probe("thread")(1.0)
    with jax.disable_jit(False):
        api.eval_shape(staged, 1.0)
        api.vmap(probe("vmap"))(api.numpy.ones(1))
        api.grad(probe("grad"))(1.0)
        api.jvp(probe("jvp"), (1.0,), (1.0,))


def self_check() -> None:
    """Check on tiny transforms that JAX's traces look as this module expects.

    Raises:
        UnsupportedJaxError: something looks different in the installed JAX.
    """
    seen: dict[str, str] = {}
    failures: list[Exception] = []

    public = _jax.public_getter()
    agree: list[bool] = [public() is _jax.current_trace()]

    def observe() -> None:
        try:
            jax.make_jaxpr(lambda: agree.append(public() is _jax.current_trace()))()
            if all(agree):
                _observe_chains(seen)
        except Exception as error:  # whatever JAX raises, it is the finding
            failures.append(error)

    # A fresh thread has no transforms around it, whatever the caller is in.
    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    if failures:
        raise _jax.unsupported(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
    if not all(agree):
        raise _jax.unsupported("the public and the private way to the current trace disagree")
    for name, chain in _EXPECTED.items():
        if seen.get(name) != chain:
            raise _jax.unsupported(
                f"the traces seen in {name!r} are {seen.get(name)!r}, not {chain!r}"
            )
    if " of " not in seen["described"]:
        raise _jax.unsupported("a trace does not say what it was opened for")
