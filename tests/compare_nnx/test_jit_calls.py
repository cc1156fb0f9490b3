"""How `jit` is called: methods, keywords, results, nesting, errors, plain JAX, threads."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, value


def test_jit_makes_methods() -> None:
    """Rule 34."""

    def program(lib: Library) -> tuple[bool, float, int]:
        traces: list[int] = []

        class Model(lib.Module):
            def __init__(self) -> None:
                self.w = lib.Param(jnp.array(1.0))

            @lib.jit
            def step(self, x: Any) -> Any:
                traces.append(1)
                self.w[...] += x
                return self

        m = Model()
        returned = m.step(2.0)
        Model.step(m, 3.0)
        return returned is m, value(m.w), len(traces)

    assert program(nnx) == (True, 6.0, 1)
    assert program(ab) == (True, 6.0, 1)
    assert program(mixed) == (True, 6.0, 1)


def test_jit_can_compile_a_constructor() -> None:
    """Rule 34."""

    def program(lib: Library) -> tuple[list[float], type, int]:
        traces: list[int] = []

        class Model(lib.Module):
            @lib.jit
            def __init__(self, x: Any) -> None:
                traces.append(1)
                self.w = lib.Param(x * 2)
                self.n = 3

        a, b = Model(jnp.array(1.0)), Model(jnp.array(2.0))
        return [value(a.w), value(b.w)], type(a.n), len(traces)

    assert program(nnx) == ([2.0, 4.0], int, 1)
    assert program(ab) == ([2.0, 4.0], int, 1)
    assert program(mixed) == ([2.0, 4.0], int, 1)


def test_keyword_arguments_carry_objects() -> None:
    """Rule 35."""

    def program(lib: Library) -> float:
        @lib.jit
        def f(x: Any, *, m: Any) -> None:
            m.w[...] += x

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        f(2.0, m=m)
        return value(m.w)

    assert program(nnx) == 3.0
    assert program(ab) == 3.0
    assert program(mixed) == 3.0


def test_static_values_can_be_returned_only_here() -> None:
    """Rule 30."""

    def program(lib: Library) -> Any:
        f = lib.jit(lambda x: (x + 1, "text", jnp.tanh))
        return outcome(lambda: f(jnp.array(1.0)))

    assert program(nnx) is TypeError
    assert program(ab) == (2.0, "text", jnp.tanh)  # R1, S1 a: as the plain call
    assert program(mixed) == (2.0, "text", jnp.tanh)


def test_python_numbers_in_variables_are_traced() -> None:
    """Rule 41."""

    def program(lib: Library) -> tuple[float, int]:
        traces: list[int] = []

        @lib.jit
        def f(v: Any) -> None:
            traces.append(1)
            v[...] += 1

        v = lib.Param(1)
        for _ in range(3):
            f(v)
        return value(v), len(traces)

    assert program(nnx) == (4, 1)
    assert program(ab) == (4, 1)
    assert program(mixed) == (4, 1)


def test_a_jitted_function_may_call_itself() -> None:
    """Rule 42."""

    def program(lib: Library) -> float:
        @lib.jit(static_argnums=1)
        def f(m: Any, n: int) -> None:
            m.w[...] += 1
            if n:
                f(m, n - 1)

        m = box(lib, w=lib.Param(jnp.array(0.0)))
        f(m, 3)
        return value(m.w)

    assert program(nnx) == 4.0
    assert program(ab) == 4.0
    assert program(mixed) == 4.0


def test_writes_of_an_inner_call_are_seen_in_the_outer_one() -> None:
    """Rule 42."""

    def program(lib: Library) -> tuple[int, int]:
        @lib.jit
        def inner(m: Any) -> None:
            m.n[...] += 1

        @lib.jit
        def outer(m: Any) -> Any:
            inner(m)
            between = m.n[...]
            inner(m)
            return between

        m = box(lib, n=lib.Variable(jnp.array(0)))
        return value(outer(m)), value(m.n)

    assert program(nnx) == (1, 2)
    assert program(ab) == (1, 2)
    assert program(mixed) == (1, 2)


def test_an_exception_leaves_everything_as_it_was() -> None:
    """Rule 43."""

    def program(lib: Library) -> tuple[Any, float, bool, float]:
        fail = [True]

        @lib.jit
        def f(m: Any) -> None:
            m.w[...] += 1
            m.k = 2
            if fail:
                raise KeyError("inside")

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        raised = outcome(lambda: f(m))
        after = value(m.w), hasattr(m, "k")
        fail.clear()
        f(m)  # nothing is left open
        return raised, *after, value(m.w)

    assert program(nnx) == (KeyError, 1.0, False, 2.0)
    assert program(ab) == (KeyError, 1.0, False, 2.0)
    assert program(mixed) == (KeyError, 1.0, False, 2.0)


def test_plain_jax_jit_takes_modules_in_nnx_and_states_here() -> None:
    """Rule 73."""

    def f(m: Any) -> Any:
        m.w[...] += 1
        return m

    m = box(nnx, w=nnx.Param(jnp.array(1.0)))
    returned = jax.jit(f)(m)
    # the write is local: it shows in the new object that is returned, and nowhere else
    assert (returned is m, value(returned.w), value(m.w)) == (False, 2.0, 1.0)

    ours = box(ab, w=ab.Param(jnp.array(1.0)))
    # R4, R3: a Module is no pytree, or a write inside would be lost and an alias duplicated
    assert outcome(lambda: jax.jit(f)(ours)) is TypeError
    graphdef, state = ab.split(ours)
    changed = jax.jit(lambda state: ab.split(f(ab.merge(graphdef, state)))[1])(state)
    assert (value(changed["w"]), value(ours.w)) == (2.0, 1.0)


def test_threads_may_call_one_function() -> None:
    """Rule 74."""

    def program(lib: Library) -> list[float]:
        f = lib.jit(_count_up)
        models = [box(lib, w=lib.Param(jnp.array(float(i)))) for i in range(4)]
        start = threading.Barrier(len(models))

        def work(m: Any) -> None:
            start.wait()
            for _ in range(5):
                f(m)

        threads = [threading.Thread(target=work, args=(m,)) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [value(m.w) for m in models]

    assert program(nnx) == [5.0, 6.0, 7.0, 8.0]
    assert program(ab) == [5.0, 6.0, 7.0, 8.0]
    assert program(mixed) == [5.0, 6.0, 7.0, 8.0]


def _count_up(m: Any) -> None:
    m.w[...] += 1
