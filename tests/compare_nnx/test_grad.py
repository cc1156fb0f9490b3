"""Gradients: of what, in which form, and what happens to writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import FilterError
from tests.compare_nnx.worlds import Library, box, mixed, outcome, paths, value


def _flat(lib: Library, state: Any) -> tuple[list[Any], list[float]]:
    return paths(lib, state), [value(x) for x in jax.tree.leaves(state)]


def test_gradients_are_of_params_by_default() -> None:
    """Rule 63."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.array(3.0)), s=lib.BatchStat(jnp.array(2.0)))
        grads = lib.grad(lambda m: m.w[...] ** 2 * m.s[...])(m)
        assert isinstance(grads, lib.State)
        return _flat(lib, grads)

    assert program(nnx) == ([("w",)], [12.0])
    assert program(ab) == ([("w",)], [12.0])
    assert program(mixed) == ([("w",)], [12.0])


def test_a_shared_param_counts_once_with_the_sum() -> None:
    """Rule 63."""

    def program(lib: Library) -> Any:
        v = lib.Param(jnp.array(3.0))
        m = box(lib, a=v, b=v)
        return _flat(lib, lib.grad(lambda m: m.a[...] * m.b[...])(m))

    assert program(nnx) == ([("a",)], [6.0])
    assert program(ab) == ([("a",)], [6.0])
    assert program(mixed) == ([("a",)], [6.0])


def test_gradients_can_be_written_with_update() -> None:
    """Rule 63."""

    def program(lib: Library) -> tuple[float, float]:
        m = box(lib, w=lib.Param(jnp.array(3.0)), s=lib.BatchStat(jnp.array(2.0)))
        lib.update(m, lib.grad(lambda m: m.w[...] ** 2)(m))
        return value(m.w), value(m.s)

    assert program(nnx) == (6.0, 2.0)
    assert program(ab) == (6.0, 2.0)
    assert program(mixed) == (6.0, 2.0)


def test_a_list_of_modules_has_a_list_of_gradients() -> None:
    """Rule 63."""

    def program(lib: Library) -> tuple[type, list[Any]]:
        models = [box(lib, w=lib.Param(jnp.array(x))) for x in (3.0, 4.0)]
        grads = lib.grad(lambda ms: ms[0].w[...] * ms[1].w[...])(models)
        return type(grads), [_flat(lib, g) for g in grads]

    assert program(nnx) == (list, [([("w",)], [4.0]), ([("w",)], [3.0])])
    assert program(ab) == (list, [([("w",)], [4.0]), ([("w",)], [3.0])])
    assert program(mixed) == (list, [([("w",)], [4.0]), ([("w",)], [3.0])])


def test_each_argument_can_have_its_own_filter() -> None:
    """Rule 63."""

    def program(lib: Library) -> list[Any]:
        def build(w: float, s: float) -> Any:
            return box(lib, w=lib.Param(jnp.array(w)), s=lib.BatchStat(jnp.array(s)))

        def loss(a: Any, b: Any) -> Any:
            return a.w[...] * b.w[...] * a.s[...] * b.s[...]

        argnums = (lib.DiffState(0, lib.Param), lib.DiffState(1, lib.BatchStat))
        grads = lib.grad(loss, argnums=argnums)(build(3.0, 5.0), build(4.0, 7.0))
        return [_flat(lib, g) for g in grads]

    assert program(nnx) == [([("w",)], [140.0]), ([("s",)], [60.0])]
    assert program(ab) == [([("w",)], [140.0]), ([("s",)], [60.0])]
    assert program(mixed) == [([("w",)], [140.0]), ([("s",)], [60.0])]


def test_nothing_to_differentiate_is_an_empty_state_in_nnx_and_an_error_here() -> None:
    """Rule 63."""

    def program(lib: Library) -> Any:
        m = box(lib, s=lib.BatchStat(jnp.array(3.0)))
        return lib.grad(lambda m: m.s[...] ** 2)(m)

    assert len(program(nnx)) == 0
    with pytest.raises(FilterError, match="BatchStat"):  # R4: a filter that matches nothing
        program(ab)
    with pytest.raises(FilterError, match="BatchStat"):
        program(mixed)


def test_the_gradient_of_a_variable_is_a_variable_in_nnx_and_a_state_here() -> None:
    """Rule 63."""

    def program(lib: Library) -> Any:
        v = lib.Param(jnp.array(3.0))
        return lib.grad(lambda v: v[...] ** 2)(v)

    found = program(nnx)
    assert (type(found), value(found)) == (nnx.Param, 6.0)
    # S7: the gradient of an object is a State; the path of a root leaf is ()
    assert program(ab).flat() == {(): 6.0}
    assert program(mixed).flat() == {(): 6.0}


def test_trees_of_arrays_are_differentiated_as_in_jax() -> None:
    """Rule 63."""

    def program(lib: Library) -> dict[str, float]:
        tree = {"a": jnp.array(3.0), "b": 2.0}
        grads = lib.grad(lambda d: d["a"] ** 2 * d["b"])(tree)
        return {name: value(g) for name, g in grads.items()}

    assert program(nnx) == {"a": 12.0, "b": 9.0}
    assert program(ab) == {"a": 12.0, "b": 9.0}
    assert program(mixed) == {"a": 12.0, "b": 9.0}


def test_without_graph_updates_nnx_differentiates_every_variable_in_place_of_params() -> None:
    """Rule 64."""
    m = box(nnx, w=nnx.Param(jnp.array(3.0)), s=nnx.BatchStat(jnp.array(2.0)))
    grads = nnx.grad(lambda m: m.w[...] ** 2 * m.s[...], graph_updates=False)(m)
    assert isinstance(grads, type(m))
    assert (value(grads.w), value(grads.s)) == (12.0, 9.0)

    # R4: there is one form and one default; other kinds are asked for
    ours = box(ab, w=ab.Param(jnp.array(3.0)), s=ab.BatchStat(jnp.array(2.0)))
    loss = ab.grad(lambda m: m.w[...] ** 2 * m.s[...], argnums=ab.DiffState(0, ...))
    assert loss(ours).flat() == {("w",): 12.0, ("s",): 9.0}


def test_integers_have_no_gradients() -> None:
    """Rule 64."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.array(3)))
        return outcome(lambda: lib.grad(lambda m: m.w[...] * 2.0)(m))

    assert program(nnx) is TypeError
    assert program(ab) is FilterError  # said by path, before JAX says it by dtype
    assert program(mixed) is FilterError


def test_states_can_be_differentiated_with_a_merge_inside() -> None:
    """Rule 64."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.array(3.0)), s=lib.BatchStat(jnp.array(2.0)))
        graphdef, params, rest = lib.split(m, lib.Param, ...)

        def loss(params: Any, rest: Any) -> Any:
            m = lib.merge(graphdef, params, rest)
            return m.w[...] ** 2 * m.s[...]

        grads = lib.grad(loss)(params, rest)
        assert isinstance(grads, type(params))
        return _flat(lib, grads)

    assert program(nnx) == ([("w",)], [12.0])
    assert program(ab) == ([("w",)], [12.0])
    assert program(mixed) == ([("w",)], [12.0])


def test_writes_come_back_once() -> None:
    """Rule 65."""

    def program(lib: Library) -> tuple[float, list[int]]:
        def loss(m: Any) -> Any:
            m.n[...] += 1
            return m.w[...] ** 2

        m = box(lib, w=lib.Param(jnp.array(3.0)), n=lib.Variable(jnp.array(0)))
        value_then, _ = lib.value_and_grad(loss)(m)
        counts = [value(m.n)]
        for run in (lib.grad(loss), lib.jit(lib.grad(loss))):
            run(m)
            counts.append(value(m.n))
        return value(value_then), counts

    assert program(nnx) == (9.0, [1, 2, 3])
    assert program(ab) == (9.0, [1, 2, 3])
    assert program(mixed) == (9.0, [1, 2, 3])


def test_a_param_written_inside_has_the_gradient_at_entry_and_the_new_value() -> None:
    """Rule 65."""

    def program(lib: Library) -> tuple[float, Any, float]:
        def loss(m: Any) -> Any:
            m.w[...] *= 2
            return m.w[...] ** 2

        m = box(lib, w=lib.Param(jnp.array(3.0)))
        found, grads = lib.value_and_grad(loss)(m)
        return value(found), value(grads["w"]), value(m.w)

    assert program(nnx) == (36.0, 24.0, 6.0)
    assert program(ab) == (36.0, 24.0, 6.0)
    assert program(mixed) == (36.0, 24.0, 6.0)


def test_a_param_replaced_inside_has_the_gradient_of_its_value_at_entry() -> None:
    """Rule 65."""

    def program(lib: Library) -> tuple[Any, float, bool]:
        def loss(m: Any) -> Any:
            found = m.w[...] ** 2
            m.w = lib.Param(jnp.array(0.0))
            return found

        old = lib.Param(jnp.array(3.0))
        m = box(lib, w=old)
        grads = lib.grad(loss)(m)
        return value(grads["w"]), value(m.w), m.w is old

    assert program(nnx) == (6.0, 0.0, False)
    assert program(ab) == (6.0, 0.0, False)
    assert program(mixed) == (6.0, 0.0, False)


def test_aux_can_hold_new_objects_and_the_input() -> None:
    """Rule 66."""

    def program(lib: Library) -> tuple[float, float, bool]:
        def loss(m: Any) -> Any:
            return m.w[...] ** 2, (box(lib, x=lib.Param(m.w[...] + 1)), m)

        m = box(lib, w=lib.Param(jnp.array(3.0)))
        grads, (new, same) = lib.grad(loss, has_aux=True)(m)
        return value(grads["w"]), value(new.x), same is m

    assert program(nnx) == (6.0, 4.0, True)
    assert program(ab) == (6.0, 4.0, True)
    assert program(mixed) == (6.0, 4.0, True)


def test_a_variable_in_a_differentiated_and_another_argument() -> None:
    """Rule 67."""

    def program(lib: Library) -> Any:
        m = box(lib, w=lib.Param(jnp.array(3.0)))
        return _flat(lib, lib.grad(lambda a, b: a.w[...] * b.w[...])(m, m))

    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        program(nnx)
    assert program(ab) == ([("w",)], [6.0])  # S7, R3: it is one Variable, and differentiated
    assert program(mixed) == ([("w",)], [6.0])


def test_a_variable_in_two_differentiated_arguments_counts_in_the_first() -> None:
    """Rule 67."""

    def program(lib: Library) -> list[Any]:
        m = box(lib, w=lib.Param(jnp.array(3.0)))
        grads = lib.grad(lambda a, b: a.w[...] * b.w[...], argnums=(0, 1))(m, m)
        return [_flat(lib, g) for g in grads]

    assert program(nnx) == [([("w",)], [6.0]), ([], [])]
    assert program(ab) == [([("w",)], [6.0]), ([], [])]
    assert program(mixed) == [([("w",)], [6.0]), ([], [])]


def test_arguments_that_can_only_be_named_are_passed_on_only_here() -> None:
    """Rule 63."""

    def program(lib: Library) -> Any:
        def loss(m: Any, *, x: Any) -> Any:
            return m.w[...] * x

        m = box(lib, w=lib.Param(jnp.array(3.0)))
        return outcome(lambda: _flat(lib, lib.grad(loss)(m, x=2.0)))

    assert program(nnx) is TypeError
    assert program(ab) == ([("w",)], [2.0])  # as in jax.grad
    assert program(mixed) == ([("w",)], [2.0])


def test_gradients_nest() -> None:
    """Rule 65."""

    def program(lib: Library) -> tuple[float, int]:
        def loss(m: Any) -> Any:
            m.n[...] += 1
            return m.w[...] ** 3

        def slope(m: Any) -> Any:
            return jax.tree.leaves(lib.grad(loss)(m))[0]

        m = box(lib, w=lib.Param(jnp.array(3.0)), n=lib.Variable(jnp.array(0)))
        (second,) = jax.tree.leaves(lib.grad(slope)(m))
        return value(second), value(m.n)

    assert program(nnx) == (18.0, 1)
    assert program(ab) == (18.0, 1)
    assert program(mixed) == (18.0, 1)


def test_gradients_per_lane() -> None:
    """Rule 65."""

    def program(lib: Library) -> tuple[list[float], list[int]]:
        def loss(m: Any, x: Any) -> Any:
            m.n[...] += 1
            return m.w[...] ** 2 * x

        m = box(lib, w=lib.Param(jnp.array([1.0, 2.0])), n=lib.Variable(jnp.zeros(2, int)))
        grads = lib.vmap(lib.grad(loss))(m, jnp.array([3.0, 4.0]))
        return value(grads["w"]), value(m.n)

    assert program(nnx) == ([6.0, 16.0], [1, 1])
    assert program(ab) == ([6.0, 16.0], [1, 1])
    assert program(mixed) == ([6.0, 16.0], [1, 1])
