"""The door to JAX: what it reads, and that its self-check notices when JAX changes."""

from __future__ import annotations

import contextlib
import threading
import weakref

import jax
import jax.core
import jax.numpy as jnp
import pytest

from anabranch import _jax, _jax_check
from anabranch.errors import UnsupportedJaxError


def run_in(transform, look):
    """Return what `look` returns inside a transform, at trace time."""
    seen = []
    transform(lambda x: (seen.append(look()), x * 2.0)[1])
    return seen[0]


def in_jit(look):
    return run_in(lambda f: jax.jit(f)(1.0), look)


def in_vmap(look):
    return run_in(lambda f: jax.vmap(f)(jnp.ones(2)), look)


def test_the_self_check_passes_outside_and_inside_transforms():
    _jax_check.self_check()
    in_jit(_jax_check.self_check)
    in_vmap(_jax_check.self_check)
    with jax.disable_jit():
        _jax_check.self_check()


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        ("_staging_type", lambda: int, "the traces seen in"),
        ("is_boundary", lambda trace: True, "the traces seen in"),
        ("trace_chain", lambda trace: iter([trace]), "the traces seen in"),
        ("current_trace", lambda: None, "disagree"),
        ("tracer_trace", lambda tracer: None, "argument of another trace"),
        ("is_loop_body", lambda trace: False, "the traces seen in"),
        ("at_trace", lambda trace: contextlib.nullcontext(), "the traces seen in"),
        ("innermost", lambda traces, around: _jax.root_trace(), "UnexpectedTracerError"),
        ("hoisting_trace", contextlib.nullcontext, "the traces seen in"),
        ("describe_boundary", lambda trace: "jit", "what it was opened for"),
        ("describe_boundary", lambda trace: 1 / 0, "ZeroDivisionError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_self_check_notices(monkeypatch, name, broken, message):
    monkeypatch.setattr(_jax, name, broken)
    with pytest.raises(UnsupportedJaxError, match=message) as info:
        _jax_check.self_check()
    assert jax.__version__ in str(info.value)


def test_a_current_trace_that_does_not_move_is_noticed_on_first_use(monkeypatch):
    _jax._staging_type.cache_clear()
    monkeypatch.setattr(_jax, "current_trace", _jax.root_trace)
    with pytest.raises(UnsupportedJaxError, match="cannot be read"):
        _jax._staging_type()
    monkeypatch.undo()
    assert _jax._staging_type() is type(in_jit(_jax.current_trace))


def test_the_fast_and_the_public_way_read_the_same_trace():
    public = _jax.public_getter()
    for inside in (in_jit, in_vmap, lambda look: look()):
        assert inside(lambda: (_jax.current_trace() is public(), public() is not None)) == (
            True,
            True,
        )


def test_the_root_is_current_outside_and_in_new_threads():
    assert _jax.current_trace() is _jax.root_trace()
    assert _jax.is_root(_jax.current_trace())
    seen = []

    def in_thread():
        thread = threading.Thread(target=lambda: seen.append(_jax.current_trace()))
        thread.start()
        thread.join()

    in_jit(in_thread)
    assert seen == [_jax.root_trace()]


def test_chains_go_from_the_inside_out():
    def chain():
        return [_jax.is_boundary(trace) for trace in _jax.trace_chain(_jax.current_trace())]

    assert chain() == [False]
    assert in_jit(chain) == [True, False]
    assert in_jit(lambda: in_vmap(chain)) == [False, True, False]
    assert in_vmap(chain) == [False, False]
    assert list(_jax.trace_chain(None)) == []
    assert in_jit(lambda: _jax.parent_trace(_jax.current_trace())) is _jax.root_trace()
    assert _jax.parent_trace(_jax.root_trace()) is None


def test_a_recorded_chain_is_weak():
    recorded = in_jit(_jax.record_chain)
    assert all(isinstance(ref, weakref.ref) for ref in recorded)
    assert recorded[-1]() is _jax.root_trace()
    assert _jax.record_chain() is _jax.ROOT_REFS


def test_the_crossed_boundary_is_the_innermost_one():
    def crossed():
        return _jax.find_crossed_boundary(_jax.ROOT_REFS) is _jax.current_trace()

    assert _jax.find_crossed_boundary(_jax.ROOT_REFS) is None
    assert in_jit(crossed)
    assert in_jit(lambda: in_jit(crossed))
    assert in_vmap(lambda: _jax.find_crossed_boundary(_jax.ROOT_REFS)) is None
    inside = in_jit(lambda: _jax.find_crossed_boundary(_jax.record_chain()))
    assert inside is None


def test_a_trace_without_a_parent_is_a_boundary():
    class Parentless:
        pass

    assert _jax.is_boundary(Parentless())
    with pytest.MonkeyPatch.context() as patch:
        parentless = Parentless()
        patch.setattr(_jax, "current_trace", lambda: parentless)
        assert _jax.find_crossed_boundary(_jax.ROOT_REFS) is parentless
    assert _jax.describe_boundary(Parentless()) == "Parentless"


def test_without_a_current_trace_only_values_set_there_are_visible(monkeypatch):
    monkeypatch.setattr(_jax, "current_trace", lambda: None)
    assert _jax.record_chain() == ()
    assert _jax.find_crossed_boundary(()) is None
    crossed = _jax.find_crossed_boundary(_jax.ROOT_REFS)
    assert crossed is _jax.UNTRACED
    assert "no trace" in _jax.describe_boundary(crossed)


def test_tracers_are_told_from_values_and_know_their_trace():
    assert not _jax.is_tracer(jnp.ones(2))
    assert not _jax.is_tracer(1.0)
    seen = []
    jax.jit(lambda x: seen.append((_jax.is_tracer(x), _jax.tracer_trace(x))) or x)(1.0)
    assert seen[0][0] is True
    assert _jax.is_boundary(seen[0][1])


def test_boundaries_are_described():
    def describe():
        return _jax.describe_boundary(_jax.current_trace())

    def named(x):
        seen.append(describe())
        return x

    seen = []
    jax.jit(named)(1.0)
    jax.checkpoint(named)(1.0)
    jax.pmap(named)(jnp.ones(8))
    assert seen[0].startswith("jit of named at ")
    assert "checkpoint" in seen[1]
    # jax 0.8 and 0.9 make pmap out of shard_map, and 0.8 does not tell.
    assert seen[2].split()[0] in {"pmap", "shard_map"}
    assert "_src" not in seen[2]


def test_transforms_that_are_no_boundaries_are_described_too():
    def describe():
        return _jax.describe_boundary(_jax.current_trace())

    assert in_vmap(describe) == "vmap"
    assert run_in(lambda f: jax.jvp(f, (1.0,), (1.0,)), describe) == "jvp"
    assert run_in(lambda f: jax.grad(f)(1.0), describe).startswith("grad")
