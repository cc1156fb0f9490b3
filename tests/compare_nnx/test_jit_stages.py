"""Shardings, donation, and the stages of compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import anabranch as ab
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, raw, value


def _sharding(*axes: str | None) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def test_a_static_argument_given_by_position_takes_no_sharding() -> None:
    """Rule 35."""
    sharding = _sharding("d")

    def program(lib: Library) -> tuple[list[float], bool]:
        @lib.jit(static_argnames="n", in_shardings=(sharding,))
        def f(n: int, x: Any) -> Any:
            return x * n if isinstance(n, int) else None

        result = f(3, jnp.ones(8))
        return value(result), result.sharding.is_equivalent_to(sharding, 1)

    assert program(nnx) == ([3.0] * 8, True)
    assert program(ab) == ([3.0] * 8, True)
    assert program(mixed) == ([3.0] * 8, True)


def test_in_shardings_move_variables_that_are_only_read_in_nnx() -> None:
    """Rule 38."""
    sharding = _sharding("d")

    def program(lib: Library, **options: Any) -> tuple[bool, bool]:
        @lib.jit(in_shardings=(sharding,), **options)
        def f(m: Any) -> None:
            m.b[...] += m.a[...]

        m = box(lib, a=lib.Param(jnp.ones(8)), b=lib.Param(jnp.ones(8)))
        f(m)
        a, b = raw(m.a).sharding, raw(m.b).sharding
        return a.is_equivalent_to(sharding, 1), b.is_equivalent_to(sharding, 1)

    assert program(nnx) == (True, True)
    assert program(nnx, graph_updates=False) == (False, True)
    assert program(ab) == (False, True)  # R7, R2: what is only read is not touched
    assert program(mixed) == (False, True)


def test_equal_sharding_filters_on_one_object_agree_and_others_do_not() -> None:
    """Rule 38."""

    def program(lib: Library, first: Any, second: Any) -> Any:
        @lib.jit(in_shardings=(lib.StateSharding({...: first}), lib.StateSharding({...: second})))
        def f(a: Any, b: Any) -> None:
            a.w[...] += 1

        m = box(lib, w=lib.Param(jnp.ones(8)))
        return outcome(lambda: f(m, m)), value(m.w)[0]

    assert program(nnx, _sharding("d"), _sharding("d")) == (None, 2.0)
    assert program(nnx, _sharding("d"), _sharding()) == (ValueError, 1.0)
    assert program(ab, _sharding("d"), _sharding("d")) == (None, 2.0)
    assert program(mixed, _sharding("d"), _sharding("d")) == (None, 2.0)
    assert program(ab, _sharding("d"), _sharding()) == (ab.errors.AliasError, 1.0)
    assert program(mixed, _sharding("d"), _sharding()) == (ab.errors.AliasError, 1.0)
    assert issubclass(ab.errors.AliasError, ValueError)


def test_donation_leaves_valid_variables_behind() -> None:
    """Rule 39."""

    def program(lib: Library) -> tuple[bool, bool, list[float], list[float]]:
        @lib.jit(donate_argnums=0)
        def f(m: Any) -> None:
            m.w[...] += 1

        m = box(lib, w=lib.Param(jnp.ones(2)), u=lib.Param(jnp.zeros(2)))
        w, u = raw(m.w), raw(m.u)
        f(m)
        deleted = w.is_deleted(), u.is_deleted()
        f(m)
        return *deleted, value(m.w), value(m.u)

    assert program(nnx) == (True, True, [3.0, 3.0], [0.0, 0.0])
    # S9, R7: only what is written is donated, for what is only read need not come back
    assert program(ab) == (True, False, [3.0, 3.0], [0.0, 0.0])
    assert program(mixed) == (True, False, [3.0, 3.0], [0.0, 0.0])


def test_donation_by_name_is_selective() -> None:
    """Rule 39."""

    def program(lib: Library) -> tuple[bool, bool]:
        @lib.jit(donate_argnames="b")
        def f(a: Any, b: Any) -> None:
            a[...] += 1
            b[...] += 1

        a, b = lib.Param(jnp.ones(2)), lib.Param(jnp.ones(2))
        old = raw(a), raw(b)
        f(a, b=b)
        assert value(a) == value(b) == [2.0, 2.0]
        return old[0].is_deleted(), old[1].is_deleted()

    assert program(nnx) == (False, True)
    assert program(ab) == (False, True)
    assert program(mixed) == (False, True)


def test_a_clone_and_its_original_can_both_be_donated_only_here() -> None:
    """Rule 2."""

    def program(lib: Library) -> tuple[list[float], list[float]]:
        @lib.jit(donate_argnums=(0, 1))
        def f(a: Any, b: Any) -> None:
            a.w[...] += 1
            b.w[...] += 2

        m = box(lib, w=lib.Param(jnp.ones(2)))
        twin = lib.clone(m)
        f(m, twin)
        return value(m.w), value(twin.w)

    assert program(ab) == ([2.0, 2.0], [3.0, 3.0])  # S9: of two with one buffer, one is copied
    assert program(mixed) == ([2.0, 2.0], [3.0, 3.0])
    # nnx asks for a clone with buffers of its own; without, XLA refuses one buffer given twice
    m = box(nnx, w=nnx.Param(jnp.ones(2)))
    assert raw(nnx.clone(m).w) is raw(m.w)
    assert raw(nnx.clone(m, arrays=True).w) is not raw(m.w)


def test_a_compiled_stage_writes_back_at_each_call() -> None:
    """Rule 40."""

    def program(lib: Library) -> tuple[float, list[float], float, int]:
        traces: list[int] = []

        @lib.jit
        def f(m: Any) -> Any:
            traces.append(1)
            m.w[...] += 1
            return m.w * 2

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        compiled = f.lower(m).compile()
        before = value(m.w)
        return before, [value(compiled(m)), value(compiled(m))], value(m.w), len(traces)

    assert program(nnx) == (1.0, [4.0, 6.0], 3.0, 1)
    assert program(ab) == (1.0, [4.0, 6.0], 3.0, 1)
    assert program(mixed) == (1.0, [4.0, 6.0], 3.0, 1)


def test_a_compiled_stage_refuses_another_structure() -> None:
    """Rule 40."""

    def program(lib: Library) -> tuple[float, Any]:
        f = lib.jit(lambda m: m.w[...] * m.s)
        m = box(lib, w=lib.Param(jnp.array(3.0)), s=2)
        compiled = f.lower(m).compile()
        before = value(compiled(m))
        m.s = 5
        return before, outcome(lambda: compiled(m))

    assert program(nnx) == (6.0, TypeError)
    assert program(ab) == (6.0, ab.errors.StructureError)
    assert program(mixed) == (6.0, ab.errors.StructureError)


def test_eval_shape_of_a_jitted_function_changes_nothing() -> None:
    """Rule 40."""

    def program(lib: Library) -> tuple[Any, float, bool]:
        @lib.jit
        def f(m: Any) -> Any:
            m.w[...] += 1
            m.k = 1
            return jnp.stack([m.w[...], m.w[...]])

        m = box(lib, w=lib.Param(jnp.array(1.0)))
        return f.eval_shape(m).shape, value(m.w), hasattr(m, "k")

    assert program(nnx) == ((2,), 1.0, False)
    assert program(ab) == ((2,), 1.0, False)
    assert program(mixed) == ((2,), 1.0, False)


def test_eval_shape_keeps_what_is_shared() -> None:
    """Rule 69."""

    def create(lib: Library) -> Any:
        v = lib.Param(jnp.zeros((2, 3)))
        return box(lib, a=v, b=v, n=3)

    shapes = nnx.eval_shape(lambda: create(nnx))
    assert (shapes.a is shapes.b, shapes.n, paths(nnx, nnx.state(shapes))) == (True, 3, [("a",)])
    assert isinstance(shapes.a.get_raw_value(), jax.ShapeDtypeStruct)

    ours = ab.jit(lambda: create(ab)).eval_shape()
    assert (ours.a is ours.b, ours.n, ours.a.value.shape) == (True, 3, (2, 3))
    assert isinstance(ours.a.value, jax.ShapeDtypeStruct)


def test_eval_shape_leaves_its_arguments_alone() -> None:
    """Rule 69."""
    count = 7

    def f(m: Any) -> Any:
        m.n[...] += 1
        return m

    m = box(nnx, n=nnx.Variable(jnp.array(count)))
    assert (nnx.eval_shape(f, m) is m, value(m.n)) == (False, count)
    ours = box(ab, n=ab.Variable(jnp.array(count)))
    assert (ab.jit(f).eval_shape(ours) is ours, value(ours.n)) == (False, count)


def test_looking_at_the_jaxpr_changes_nothing() -> None:
    """Rule 70."""

    def f(m: Any) -> Any:
        m.n[...] += 1
        return m.n[...] * 2

    m = box(nnx, n=nnx.Variable(jnp.array(1)))
    jaxpr = nnx.make_jaxpr(f, graph=True, graph_updates=False)(m)
    assert ([str(e.primitive) for e in jaxpr.eqns], value(m.n)) == (["add", "mul"], 1)

    ours = box(ab, n=ab.Variable(jnp.array(1)))
    jaxpr = ab.jit(f).trace(ours).jaxpr
    assert ([str(e.primitive) for e in jaxpr.eqns], value(ours.n)) == (["add", "mul"], 1)
