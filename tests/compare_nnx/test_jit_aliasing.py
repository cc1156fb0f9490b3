"""Aliases among arguments and results under `jit`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, value


def test_aliasing_of_arguments_is_part_of_the_key() -> None:
    """Rule 19."""

    def program(lib: Library) -> tuple[list[int], float, float]:
        traces: list[int] = []
        counts: list[int] = []

        @lib.jit
        def f(a: Any, b: Any) -> None:
            traces.append(1)
            a[...] += 1
            b[...] += 1

        v, w = lib.Param(jnp.array(0.0)), lib.Param(jnp.array(0.0))
        for pair in ((v, w), (v, v), (w, v), (w, w)):
            f(*pair)
            counts.append(len(traces))
        return counts, value(v), value(w)

    assert program(nnx) == ([1, 2, 2, 2], 4.0, 4.0)
    assert program(ab) == ([1, 2, 2, 2], 4.0, 4.0)
    assert program(mixed) == ([1, 2, 2, 2], 4.0, 4.0)


def test_an_input_that_is_returned_is_the_caller_s_object() -> None:
    """Rule 27."""

    def program(lib: Library, **options: Any) -> Any:
        @lib.jit(**options)
        def f(m: Any) -> Any:
            m.w[...] += 1
            return m, (m.w, {"deep": m})

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        returned, (w, deep) = f(m)
        return returned is m, w is m.w, deep["deep"] is m, value(m.w)

    assert program(nnx) == (True, True, True, 2.0)
    assert outcome(lambda: program(nnx, graph_updates=False)) is ValueError
    assert program(ab) == (True, True, True, 2.0)  # R3
    assert program(mixed) == (True, True, True, 2.0)


def test_a_state_that_is_returned_holds_variables_in_nnx_and_arrays_here() -> None:
    """Rule 27."""

    def program(lib: Library) -> tuple[bool, float]:
        @lib.jit
        def f(m: Any) -> Any:
            return lib.state(m)

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        state = f(m)
        return state["w"] is m.w, value(state["w"])

    assert program(nnx) == (True, 1.0)
    assert program(ab) == (False, 1.0)  # a State is a snapshot, inside as outside
    assert program(mixed) == (False, 1.0)


def test_a_clone_that_is_returned_is_a_new_object() -> None:
    """Rule 27."""

    def program(lib: Library) -> tuple[bool, bool, float, float]:
        @lib.jit
        def f(m: Any) -> Any:
            twin = lib.clone(m)
            twin.w[...] += 1
            return twin

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        twin = f(m)
        return twin is m, twin.w is m.w, value(m.w), value(twin.w)

    assert program(nnx) == (False, False, 1.0, 2.0)
    assert program(ab) == (False, False, 1.0, 2.0)
    assert program(mixed) == (False, False, 1.0, 2.0)


def test_one_object_as_two_arguments_is_one_object_inside() -> None:
    """Rule 28."""

    def program(lib: Library) -> tuple[list[bool], float]:
        inside: list[bool] = []

        @lib.jit
        def f(a: Any, b: Any) -> None:
            inside.append(a is b)
            a.w[...] += 1
            inside.append(b.w is a.w)
            b.w[...] *= 10

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        f(m, m)
        return inside, value(m.w)

    assert program(nnx) == ([True, True], 20.0)
    assert program(ab) == ([True, True], 20.0)
    assert program(mixed) == ([True, True], 20.0)


def test_a_variable_and_its_owner_can_both_be_arguments() -> None:
    """Rule 29."""

    def program(lib: Library, **options: Any) -> tuple[list[bool], float]:
        inside: list[bool] = []

        @lib.jit(**options)
        def f(var: Any, owner: Any) -> None:
            inside.append(owner.w is var)
            var[...] += 1

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        f(m.w, m)
        return inside, value(m.w)

    assert program(nnx) == ([True], 2.0)
    assert outcome(lambda: program(nnx, graph=False, graph_updates=False)) is ValueError
    assert program(ab) == ([True], 2.0)  # R4: there is no mode in which it is refused
    assert program(mixed) == ([True], 2.0)


def test_one_list_as_two_arguments_is_one_list_only_here() -> None:
    """Rule 28."""

    def program(lib: Library) -> tuple[list[bool], list[float]]:
        inside: list[bool] = []

        @lib.jit
        def f(a: Any, b: Any) -> None:
            inside.append(a is b)
            a[0], a[1] = b[1], b[0]

        items = [lib.Param(jnp.array(1.0)), lib.Param(jnp.array(2.0))]
        f(items, items)
        return inside, [value(x) for x in items]

    assert program(nnx) == ([False], [1.0, 2.0])  # two copies, and the swap is lost
    assert program(ab) == ([True], [2.0, 1.0])  # R3, R1
    assert program(mixed) == ([True], [2.0, 1.0])


def test_a_new_object_returned_twice_is_one_object() -> None:
    """Rule 30."""

    def program(lib: Library) -> tuple[bool, bool, float]:
        @lib.jit
        def f(x: Any) -> Any:
            m = box(lib, w=lib.Param(x + 1))
            return {"x": m, "y": [m, m.w]}

        found = f(jnp.array(1.0))
        m, w = found["y"]
        return found["x"] is m, m.w is w, value(w)

    assert program(nnx) == (True, True, 2.0)
    assert program(ab) == (True, True, 2.0)
    assert program(mixed) == (True, True, 2.0)


def test_a_new_object_can_be_hung_on_two_arguments() -> None:
    """Rule 30."""

    def program(lib: Library) -> tuple[bool, float]:
        @lib.jit
        def tie(a: Any, b: Any) -> None:
            a.w = b.w = lib.Param(a.w[...] + b.w[...])

        a = box(lib, w=lib.Param(jnp.array(1.0)))
        b = box(lib, w=lib.Param(jnp.array(2.0)))
        tie(a, b)
        return a.w is b.w, value(b.w)

    assert program(nnx) == (True, 3.0)
    assert program(ab) == (True, 3.0)
    assert program(mixed) == (True, 3.0)
