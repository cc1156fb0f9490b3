"""Variables, values and traces are collected when nothing needs them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch import _jax
from anabranch.contextvars_ext import JitAwareContextVar, plumb_and_transform
from anabranch.contextvars_ext._stack import find_entry


class Value:
    """Something that can be referenced weakly."""


@pytest.fixture(autouse=True)
def without_the_cycle_collector():
    """Reference counts alone have to do: what needs the collector shows here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_variable_made_in_a_function_dies_with_it():
    def use():
        var = JitAwareContextVar("local")
        with var.set_on_enter(1):
            assert var.get() == 1
        return weakref.ref(var)

    assert use()() is None


def test_a_thousand_variables_made_in_a_loop_leave_nothing():
    refs = []
    for n in range(1000):
        var = JitAwareContextVar(default=Value())
        with var.set_on_enter(n):
            assert var.get() == n
        refs.append(weakref.ref(var))
    del var
    assert [ref for ref in refs if ref() is not None] == []


def test_the_standard_library_keeps_its_variables_which_is_why_ours_is_different():
    var = contextvars.ContextVar("kept")
    var.reset(var.set(1))
    held = contextvars.copy_context()
    var.set(2)
    assert var in contextvars.copy_context()
    assert var not in held


def test_a_value_dies_when_its_context_is_left():
    var = JitAwareContextVar()
    value = Value()
    ref = weakref.ref(value)
    with var.set_on_enter(value):
        del value
        assert ref() is var.get()
    assert ref() is None


def test_a_value_dies_also_after_contexts_left_in_the_wrong_order():
    var = JitAwareContextVar()
    values = [Value(), Value()]
    refs = [weakref.ref(value) for value in values]
    managers = [var.set_on_enter(value) for value in values]
    del values
    for manager in managers:
        manager.__enter__()
    managers.pop(0).__exit__(None, None, None)
    manager = None
    assert refs[0]() is None
    assert refs[1]() is var.get()
    managers.pop().__exit__(None, None, None)
    assert refs[1]() is None


def test_a_value_dies_after_an_exception():
    var = JitAwareContextVar()
    value = Value()
    ref = weakref.ref(value)
    with pytest.raises(KeyError, match="x"), var.set_on_enter(value):
        raise KeyError("x")
    del value
    gc.collect()  # the traceback has cycles of its own
    assert ref() is None


def test_a_finished_thread_and_a_finished_task_leave_nothing():
    var = JitAwareContextVar()
    refs = []

    def work():
        value = Value()
        refs.append(weakref.ref(value))
        with var.set_on_enter(value):
            assert var.get() is value

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    async def task():
        work()

    asyncio.run(task())
    gc.collect()  # asyncio's own cycles
    assert [ref() for ref in refs] == [None, None]


def test_a_copied_context_keeps_the_value_and_only_as_long_as_it_lives():
    var = JitAwareContextVar()
    value = Value()
    ref = weakref.ref(value)
    with var.set_on_enter(value):
        context = contextvars.copy_context()
    del value
    assert context.run(var.get) is ref()
    del context
    assert ref() is None


def test_a_trace_is_not_kept_alive_by_a_copied_context():
    var = JitAwareContextVar()
    traces, contexts = [], []

    @jax.jit
    def program(x):
        traces.append(weakref.ref(_jax.current_trace()))
        with var.set_on_enter("static"):
            contexts.append(contextvars.copy_context())
        return x

    assert program(1.0) == 1.0
    gc.collect()  # JAX's own cycles
    assert traces[0]() is None
    entry = contexts[0].run(find_entry, var)
    assert entry.chain[0]() is None
    assert contexts[0].run(var.get) == "static"


def test_a_plumbed_function_dies_with_its_variable():
    def use():
        var = JitAwareContextVar()
        fn = plumb_and_transform(
            lambda x: var.get() * x,
            transform_to_apply=jax.vmap,
            compute_extra_input_before=var.get,
            create_context_managers_after=lambda value: [var.set_on_enter(value)],
        )
        with var.set_on_enter(jnp.ones(2)):
            np.testing.assert_allclose(fn(jnp.arange(2.0)), [0.0, 1.0])
        return weakref.ref(var), weakref.ref(fn)

    refs = use()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_jax_finds_no_leaked_tracers():
    var = JitAwareContextVar()

    @jax.jit
    def program(x):
        with var.set_on_enter(x):
            return jax.vmap(lambda y: var.get() * y)(jnp.arange(2.0))

    with jax.checking_leaks():
        np.testing.assert_allclose(program(3.0), [0.0, 3.0])
