"""What makes `jit` trace again, and structure that changes inside."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, raw, sequence, value


def test_two_objects_built_alike_share_a_trace() -> None:
    """Rule 18."""

    def program(lib: Library) -> int:
        traces: list[int] = []

        @lib.jit
        def f(m: Any) -> Any:
            traces.append(1)
            return m.w * 2

        for _ in range(2):
            f(box(lib, w=lib.Param(jnp.ones(2))))
        return len(traces)

    assert program(nnx) == 1
    assert program(ab) == 1
    assert program(mixed) == 1


def test_a_static_change_traces_again_and_going_back_does_not() -> None:
    """Rule 18."""

    def program(lib: Library) -> tuple[int, list[float]]:
        traces: list[int] = []

        @lib.jit
        def f(m: Any) -> Any:
            traces.append(1)
            return m.w[...] * (2 if m.s == "a" else 3)

        m = box(lib, w=lib.Param(jnp.array(1.0)), s="a")
        results = []
        for s in ("a", "b", "a"):
            m.s = s
            results.append(value(f(m)))
        return len(traces), results

    assert program(nnx) == (2, [2.0, 3.0, 2.0])
    assert program(ab) == (2, [2.0, 3.0, 2.0])
    assert program(mixed) == (2, [2.0, 3.0, 2.0])


def test_statics_that_are_only_equal_share_a_trace_in_nnx() -> None:
    """Rule 18."""

    def program(lib: Library) -> tuple[int, list[str]]:
        traces: list[str] = []
        results: list[str] = []

        @lib.jit
        def f(m: Any) -> Any:
            traces.append(type(m.n).__name__)
            m.seen = type(m.n).__name__

        for n in (1, True, 1.0):
            m = box(lib, w=lib.Param(jnp.array(1.0)), n=n, seen="")
            f(m)
            results.append(m.seen)
        return len(traces), results

    assert program(nnx) == (1, ["int", "int", "int"])
    assert program(ab) == (3, ["int", "bool", "float"])  # R6, and R1: as the plain call
    assert program(mixed) == (3, ["int", "bool", "float"])


def test_metadata_are_part_of_the_key() -> None:
    """Rule 20."""

    def program(lib: Library) -> int:
        traces: list[int] = []

        @lib.jit
        def f(v: Any) -> None:
            traces.append(1)

        v = lib.Param(jnp.array(1.0))
        f(v)
        v.set_metadata(note=1)
        f(v)
        f(v)
        return len(traces)

    assert program(nnx) == 2
    assert program(ab) == 2
    assert program(mixed) == 2


def test_metadata_set_inside_come_out_only_here() -> None:
    """Rule 20."""

    def program(lib: Library) -> Any:
        @lib.jit
        def f(v: Any) -> None:
            v.set_metadata(note="new")

        v = lib.Param(jnp.array(1.0), note="old")
        f(v)
        return v.note

    assert program(nnx) == "old"  # lost silently
    assert program(ab) == "new"  # R1
    assert program(mixed) == "new"


def test_a_swap_of_different_children_traces_once_for_each_order() -> None:
    """Rule 21."""

    def program(lib: Library, second: Any) -> list[int]:
        traces: list[int] = []
        counts: list[int] = []

        @lib.jit
        def swap(m: Any) -> None:
            traces.append(1)
            m.a, m.b = m.b, m.a

        m = box(lib, a=box(lib, w=lib.Param(jnp.array(1.0))), b=second)
        for _ in range(4):
            swap(m)
            counts.append(len(traces))
        return counts

    for lib in (nnx, ab):
        assert program(lib, box(lib, mean=lib.BatchStat(jnp.array(2.0)))) == [1, 2, 2, 2]
        assert program(lib, box(lib, w=lib.Param(jnp.array(2.0)))) == [1, 1, 1, 1]


def test_attributes_swapped_inside_are_swapped_outside() -> None:
    """Rule 22."""

    def program(lib: Library, **options: Any) -> tuple[bool, bool, float, float]:
        @lib.jit(**options)
        def swap(m: Any) -> None:
            m.a, m.b = m.b, m.a

        a, b = lib.Param(jnp.array(1.0)), lib.Param(jnp.array(2.0))
        m = box(lib, a=a, b=b)
        swap(m)
        return m.a is b, m.b is a, value(m.a), value(m.b)

    assert program(nnx) == (True, True, 2.0, 1.0)
    assert program(nnx, graph_updates=False) == (False, False, 1.0, 2.0)  # lost silently
    assert program(ab) == (True, True, 2.0, 1.0)  # R4: there are no modes
    assert program(mixed) == (True, True, 2.0, 1.0)


def test_modules_swapped_inside_are_swapped_outside_with_their_values() -> None:
    """Rule 22."""

    def program(lib: Library) -> tuple[bool, bool, float, float]:
        @lib.jit
        def swap(m: Any) -> None:
            m.a.w[...] += 10
            m.a, m.b = m.b, m.a

        a = box(lib, w=lib.Param(jnp.array(1.0)))
        b = box(lib, w=lib.Param(jnp.array(2.0)))
        m = box(lib, a=a, b=b)
        swap(m)
        return m.a is b, m.b is a, value(a.w), value(b.w)

    assert program(nnx) == (True, True, 11.0, 2.0)
    assert program(ab) == (True, True, 11.0, 2.0)
    assert program(mixed) == (True, True, 11.0, 2.0)


def test_attributes_added_and_deleted_inside_are_so_outside() -> None:
    """Rule 23."""

    def program(lib: Library, **options: Any) -> tuple[Any, Any, bool]:
        @lib.jit(**options)
        def f(m: Any) -> None:
            m.c = lib.Param(jnp.array(7.0))
            m.k = "x"
            del m.b

        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.Param(jnp.array(2.0)))
        f(m)
        c = value(m.c) if hasattr(m, "c") else None
        return c, getattr(m, "k", None), hasattr(m, "b")

    assert program(nnx) == (7.0, "x", False)
    assert program(nnx, graph_updates=False) == (None, None, True)  # lost silently
    assert program(ab) == (7.0, "x", False)
    assert program(mixed) == (7.0, "x", False)


def test_a_static_written_inside_is_written_outside_and_counts_in_the_next_key() -> None:
    """Rule 24."""

    def program(lib: Library, **options: Any) -> tuple[str, int]:
        traces: list[int] = []

        @lib.jit(**options)
        def f(m: Any) -> None:
            traces.append(1)
            m.s = "new"

        m = box(lib, w=lib.Param(jnp.array(1.0)), s="old")
        for _ in range(3):
            f(m)
        return m.s, len(traces)

    assert program(nnx) == ("new", 2)
    assert program(nnx, graph_updates=False) == ("old", 1)  # dropped
    assert program(ab) == ("new", 2)
    assert program(mixed) == ("new", 2)


def test_a_python_counter_compiles_once_for_each_value() -> None:
    """Rule 24."""

    def program(lib: Library) -> tuple[int, int]:
        traces: list[int] = []

        @lib.jit
        def f(m: Any) -> None:
            traces.append(1)
            m.t += 1

        m = box(lib, w=lib.Param(jnp.array(1.0)), t=0)
        for _ in range(3):
            f(m)
        return m.t, len(traces)

    assert program(nnx) == (3, 3)
    assert program(ab) == (3, 3)
    assert program(mixed) == (3, 3)


def test_an_array_attribute_written_inside_is_written_outside() -> None:
    """Rule 25."""

    def program(lib: Library, **options: Any) -> tuple[float, int]:
        traces: list[int] = []

        @lib.jit(**options)
        def f(m: Any) -> None:
            traces.append(1)
            m.x = m.x + 1

        m = box(lib, x=jnp.array(1.0))
        f(m)
        f(m)
        return value(m.x), len(traces)

    assert program(nnx) == (3.0, 1)
    assert program(nnx, graph_updates=False) == (1.0, 1)  # dropped
    assert program(ab) == (3.0, 1)
    assert program(mixed) == (3.0, 1)


def test_an_object_that_starts_to_refer_to_itself_inside() -> None:
    """Rule 26."""

    def program(lib: Library) -> tuple[list[int], bool]:
        traces: list[int] = []
        counts: list[int] = []

        @lib.jit
        def f(m: Any) -> None:
            traces.append(1)
            m.ref = m

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        for _ in range(3):
            f(m)
            counts.append(len(traces))
        return counts, m.ref is m

    assert program(nnx) == ([1, 2, 2], True)
    assert program(ab) == ([1, 2, 2], True)
    assert program(mixed) == ([1, 2, 2], True)


def test_a_variable_replaced_inside_is_a_new_one_outside() -> None:
    """Rule 31."""

    def program(lib: Library, **options: Any) -> tuple[bool, float, float]:
        @lib.jit(**options)
        def f(m: Any) -> None:
            m.a = lib.Param(m.a[...] + 10)

        old = lib.Param(jnp.array(1.0))
        m = box(lib, a=old)
        f(m)
        return m.a is old, value(m.a), value(old)

    assert program(nnx) == (False, 11.0, 1.0)
    assert program(nnx, graph_updates=False) == (True, 1.0, 1.0)  # dropped
    assert program(ab) == (False, 11.0, 1.0)
    assert program(mixed) == (False, 11.0, 1.0)


def test_what_was_written_before_it_was_detached_stays_written_only_here() -> None:
    """Rule 31."""

    def program(lib: Library) -> tuple[bool, float, float]:
        @lib.jit
        def f(m: Any) -> None:
            m.a[...] += 10
            m.a = lib.Param(jnp.array(0.0))

        old = lib.Param(jnp.array(1.0))
        m = box(lib, a=old)
        f(m)
        return m.a is old, value(m.a), value(old)

    assert program(nnx) == (False, 0.0, 1.0)
    assert program(ab) == (False, 0.0, 11.0)  # R1: a detached object is still the caller's
    assert program(mixed) == (False, 0.0, 11.0)


def test_nodes_are_found_in_dicts_and_tuples() -> None:
    """Rule 36."""

    def program(lib: Library) -> tuple[float, bool, Any]:
        @lib.jit
        def f(d: Any) -> None:
            d["pair"][0][...] += 1
            d["new"] = 1

        v = lib.Param(jnp.array(1.0))
        d = {"pair": (v, 3)}
        f(d)
        return value(v), d["pair"][0] is v, d.get("new")

    assert program(nnx) == (2.0, True, None)
    assert program(ab) == (2.0, True, 1)  # R1: a dict is an object of the caller
    assert program(mixed) == (2.0, True, 1)


def test_a_list_that_grows_inside_has_grown_outside() -> None:
    """Rule 36."""

    def program(lib: Library, items: Any) -> list[float]:
        @lib.jit
        def f(items: Any) -> None:
            items.append(lib.Param(jnp.array(2.0)))

        f(items)
        return [value(x) for x in items]

    assert program(nnx, [nnx.Param(jnp.array(1.0))]) == [1.0]  # dropped
    assert program(nnx, sequence(nnx, nnx.Param(jnp.array(1.0)))) == [1.0, 2.0]
    assert program(ab, [ab.Param(jnp.array(1.0))]) == [1.0, 2.0]  # R1
    assert program(mixed, [ab.Param(jnp.array(1.0))]) == [1.0, 2.0]


def test_what_is_only_read_keeps_its_array() -> None:
    """Rule 37."""

    def program(lib: Library, **options: Any) -> tuple[bool, bool, float]:
        @lib.jit(**options)
        def f(m: Any) -> Any:
            m.b[...] += m.a[...]

        m = box(lib, a=lib.Param(jnp.array(1.0)), b=lib.Param(jnp.array(2.0)))
        a, b = raw(m.a), raw(m.b)
        f(m)
        return raw(m.a) is a, raw(m.b) is b, value(m.b)

    assert program(nnx) == (False, False, 3.0)
    assert program(nnx, graph_updates=False) == (True, False, 3.0)
    assert program(ab) == (True, False, 3.0)  # R7: only what was written comes back
    assert program(mixed) == (True, False, 3.0)


def test_an_attribute_added_and_deleted_inside_is_not_there_outside() -> None:
    """Rule 23."""

    def program(lib: Library) -> Any:
        @lib.jit
        def f(m: Any) -> None:
            m.gone = lib.Param(jnp.array(1.0))
            del m.gone

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        f(m)
        return outcome(lambda: m.gone)

    assert program(nnx) is AttributeError
    assert program(ab) is AttributeError
    assert program(mixed) is AttributeError
