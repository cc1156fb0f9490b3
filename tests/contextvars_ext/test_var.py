"""`JitAwareContextVar` where no transform is in sight: as the standard library's, and more."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.contextvars_ext import JitAwareContextVar
from anabranch.errors import BehindBoundaryError, ContextExitError, ContextValueNotSetError


def test_reading_an_unset_variable_is_a_lookup_error_that_says_how_to_set_it():
    var = JitAwareContextVar("depth")
    with pytest.raises(LookupError, match=r"No value is set.*'depth'") as info:
        var.get()
    assert type(info.value) is ContextValueNotSetError
    assert "with depth.set_on_enter(value):" in str(info.value)


def test_the_two_errors_are_told_apart():
    assert not issubclass(ContextValueNotSetError, BehindBoundaryError)
    assert not issubclass(BehindBoundaryError, ContextValueNotSetError)


def test_a_value_is_there_inside_the_block_and_gone_after_it():
    var = JitAwareContextVar()
    with var.set_on_enter(1) as entered:
        assert entered == 1
        assert var.get() == 1
    assert var.get("gone") == "gone"


def test_blocks_nest_and_restore_the_outer_value_even_when_they_raise():
    var = JitAwareContextVar()
    with var.set_on_enter(1):
        with pytest.raises(KeyError, match="inner"), var.set_on_enter(2):
            assert var.get() == 2
            raise KeyError("inner")
        assert var.get() == 1


def test_the_value_is_the_object_itself():
    var = JitAwareContextVar()
    value = [1]
    with var.set_on_enter(value):
        var.get().append(2)
        with var.set_on_enter(var.get()):
            var.get().append(3)
        assert var.get() is value
    assert value == [1, 2, 3]


def test_variables_do_not_see_each_other():
    first, second = JitAwareContextVar("same"), JitAwareContextVar("same")
    with first.set_on_enter(1):
        assert second.get(None) is None
        with second.set_on_enter(2):
            assert (first.get(), second.get()) == (1, 2)


def test_none_is_a_value():
    var = JitAwareContextVar(default=3)
    with var.set_on_enter(None):
        assert var.get() is None
        assert var.get("fallback") is None


def test_a_fallback_comes_before_the_default_and_after_a_set_value():
    var = JitAwareContextVar(default="default")
    assert var.get() == "default"
    assert var.get("fallback") == "fallback"
    with var.set_on_enter("set"):
        assert var.get("fallback") == "set"


def test_none_is_a_fallback_and_a_default():
    assert JitAwareContextVar().get(None) is None
    assert JitAwareContextVar(default=None).get() is None


def test_a_default_factory_runs_once_also_when_threads_race_for_it():
    calls = []
    barrier = threading.Barrier(8)

    def factory():
        calls.append(1)
        return object()

    var = JitAwareContextVar(default_factory=factory)
    assert calls == []

    def read():
        barrier.wait()
        return var.get()

    with ThreadPoolExecutor(8) as pool:
        values = [future.result() for future in [pool.submit(read) for _ in range(8)]]
    assert len(calls) == 1
    assert len(set(map(id, values))) == 1


def test_a_failing_default_factory_is_tried_again():
    attempts = []

    def factory():
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return 7

    var = JitAwareContextVar(default_factory=factory)
    with pytest.raises(OSError, match="not yet"):
        var.get()
    assert var.get() == 7


def test_default_and_default_factory_together_are_refused():
    with pytest.raises(TypeError, match="not both"):
        JitAwareContextVar(default=1, default_factory=lambda: 1)
    with pytest.raises(TypeError, match="must be callable"):
        JitAwareContextVar(default_factory=3)
    with pytest.raises(TypeError, match="string or None"):
        JitAwareContextVar(3)


def test_repr_shows_the_name_and_the_address():
    var = JitAwareContextVar("mesh")
    assert repr(var) == f"<JitAwareContextVar 'mesh' at {id(var):#x}>"
    assert var.name == "mesh"
    unnamed = JitAwareContextVar()
    assert repr(unnamed) == f"<JitAwareContextVar at {id(unnamed):#x}>"
    assert unnamed.name is None
    assert "'mesh'" in repr(var.set_on_enter(1))


def test_a_name_that_is_no_identifier_is_not_used_in_code():
    with pytest.raises(ContextValueNotSetError, match=r"with var\.set_on_enter"):
        JitAwareContextVar("my value").get()


def test_an_endless_name_does_not_make_an_endless_message():
    with pytest.raises(ContextValueNotSetError) as info:
        JitAwareContextVar("x" * 100_000).get()
    assert len(str(info.value)) <= 4_000


def test_a_variable_is_not_copied_or_pickled():
    var = JitAwareContextVar("v")
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(var)


def test_a_variable_can_be_subscripted_with_its_type():
    var = JitAwareContextVar[int]("n", default=1)
    assert isinstance(var, JitAwareContextVar)
    assert var.get() == 1


# The context manager


def test_a_context_manager_can_be_used_again_and_inside_itself():
    var = JitAwareContextVar()
    manager = var.set_on_enter(5)
    for _ in range(2):
        with manager, var.set_on_enter(6):
            with manager:
                assert var.get() == 5
            assert var.get() == 6
        assert var.get(None) is None


def test_leaving_a_context_that_is_not_open_raises_and_changes_nothing():
    var = JitAwareContextVar("v")
    with var.set_on_enter(1):
        with pytest.raises(ContextExitError, match="not open"):
            var.set_on_enter(2).__exit__(None, None, None)
        assert var.get() == 1
    with pytest.raises(RuntimeError, match="not open"):
        var.set_on_enter(2).__exit__(None, None, None)


def test_contexts_left_in_the_wrong_order_leave_the_right_value_at_every_moment():
    var = JitAwareContextVar()
    first, second, third = (var.set_on_enter(n) for n in (1, 2, 3))
    with var.set_on_enter(0):
        for manager in (first, second, third):
            manager.__enter__()
        second.__exit__(None, None, None)
        assert var.get() == 3
        third.__exit__(None, None, None)
        assert var.get() == 1
        first.__exit__(None, None, None)
        assert var.get() == 0
    assert var.get(None) is None


def test_interleaved_generators_heal():
    var = JitAwareContextVar()

    def hold(value):
        with var.set_on_enter(value):
            yield
            yield

    with var.set_on_enter("outer"):
        a, b = hold("a"), hold("b")
        next(a)
        next(b)
        a.close()
        assert var.get() == "b"
        b.close()
        assert var.get() == "outer"


def test_it_decorates_functions_and_keeps_their_looks():
    var = JitAwareContextVar()

    @var.set_on_enter(2)
    def scaled(x: int, *, plus: int = 0) -> int:
        """Scale."""
        return var.get() * x + plus

    assert scaled(3, plus=1) == 7
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scale.")
    assert var.get(None) is None


def test_it_decorates_methods_partials_and_callable_objects():
    var = JitAwareContextVar()

    class Model:
        factor = 10

        @var.set_on_enter(2)
        def scaled(self, x):
            return self.factor * var.get() * x

        def __call__(self, x):
            return var.get() + x

    assert Model().scaled(3) == 60
    assert var.set_on_enter(5)(Model())(1) == 6
    assert var.set_on_enter(5)(functools.partial(Model(), 2))() == 7


def test_a_decorated_function_may_call_itself():
    var = JitAwareContextVar(default=0)

    @var.set_on_enter(1)
    def depth(n):
        return var.get() + (depth(n - 1) if n else 0)

    assert depth(3) == 4
    assert var.get() == 0


def test_it_decorates_coroutine_functions_for_as_long_as_they_run():
    var = JitAwareContextVar()

    @var.set_on_enter("inside")
    async def read_late():
        await asyncio.sleep(0)
        return var.get()

    class Late:
        async def __call__(self):
            await asyncio.sleep(0)
            return var.get()

    assert inspect.iscoroutinefunction(read_late)
    assert asyncio.run(read_late()) == "inside"
    assert asyncio.run(var.set_on_enter("object")(Late())()) == "object"


def test_it_refuses_generator_functions():
    var = JitAwareContextVar("v")

    def numbers():
        yield 1

    async def async_numbers():
        yield 1

    class Numbers:
        def __call__(self):
            yield 1

    for fn in (numbers, async_numbers, functools.partial(numbers), Numbers()):
        with pytest.raises(TypeError, match="is a generator function") as info:
            var.set_on_enter(1)(fn)
        assert "with v.set_on_enter(value):" in str(info.value)


def test_it_refuses_what_is_no_function():
    var = JitAwareContextVar()
    for thing in (3, staticmethod(len), classmethod(len)):
        with pytest.raises(TypeError, match="decorates functions, not"):
            var.set_on_enter(1)(thing)


# Threads, tasks, copied contexts


def test_a_new_thread_starts_without_values():
    var = JitAwareContextVar()
    seen = []
    with var.set_on_enter(1):
        thread = threading.Thread(target=lambda: seen.append(var.get("empty")))
        thread.start()
        thread.join()
        assert var.get() == 1
    assert seen == ["empty"]


def test_threads_share_a_context_manager_without_mixing_values():
    var = JitAwareContextVar()
    manager = var.set_on_enter("shared")
    failures = []

    def work(n):
        for _ in range(100):
            with var.set_on_enter(n), manager:
                if var.get() != "shared":
                    failures.append(n)
            if var.get(None) is not None:
                failures.append(n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert failures == []


def test_tasks_see_what_was_set_when_they_were_made_and_keep_theirs_to_themselves():
    var = JitAwareContextVar()

    async def child(n):
        seen = [var.get()]
        with var.set_on_enter(n):
            await asyncio.sleep(0)
            seen.append(var.get())
            await asyncio.sleep(0)
        seen.append(var.get())
        return seen

    async def main():
        with var.set_on_enter("parent"):
            tasks = [asyncio.create_task(child(n)) for n in range(3)]
        # The tasks run only now, when the parent has left the context.
        assert var.get(None) is None
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [["parent", n, "parent"] for n in range(3)]


def test_a_copied_context_keeps_its_values_and_changes_nothing_outside():
    var = JitAwareContextVar()
    manager = var.set_on_enter("copied")
    with manager:
        context = contextvars.copy_context()
    assert var.get(None) is None
    assert context.run(var.get) == "copied"

    def leave():
        manager.__exit__(None, None, None)
        return var.get("left")

    assert context.run(leave) == "left"
    with manager:
        assert contextvars.copy_context().run(leave) == "left"
        assert var.get() == "copied"


def test_leaving_in_an_unrelated_context_raises():
    var = JitAwareContextVar()
    manager = var.set_on_enter(1)
    with manager:
        with pytest.raises(ContextExitError, match="another thread or task"):
            contextvars.Context().run(manager.__exit__, None, None, None)
        assert var.get() == 1


def test_many_variables_at_once_keep_apart():
    variables = [JitAwareContextVar(f"v{n}") for n in range(50)]
    managers = [var.set_on_enter(n) for n, var in enumerate(variables)]
    for manager in managers:
        manager.__enter__()
    assert [var.get() for var in variables] == list(range(50))
    for manager in managers[::2]:
        manager.__exit__(None, None, None)
    expected = [None if n % 2 == 0 else n for n in range(50)]
    assert [var.get(None) for var in variables] == expected
    for manager in managers[1::2]:
        manager.__exit__(None, None, None)
    assert [var.get(None) for var in variables] == [None] * 50


def test_a_message_names_the_address_that_repr_shows():
    var = JitAwareContextVar()
    with pytest.raises(ContextValueNotSetError, match=re.escape(repr(var))):
        var.get()
