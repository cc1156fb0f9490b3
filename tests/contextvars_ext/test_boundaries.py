"""Which transforms hide values that were set outside of them, alone and nested."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from anabranch import _jax
from anabranch.contextvars_ext import JitAwareContextVar
from anabranch.errors import BehindBoundaryError, ContextValueNotSetError
from tests.contextvars_ext.nesting import BOUNDARIES, NESTABLE, TRANSPARENT

ONE = np.float32(1.0)


def reading(var):
    return lambda x: var.get() * x


def expect_refusal(hidden):
    if hidden:
        return pytest.raises(BehindBoundaryError, match="was read in")
    return contextlib.nullcontext()


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_value_from_outside_is_refused_behind(name):
    var = JitAwareContextVar("v")
    with var.set_on_enter(3.0):
        with pytest.raises(BehindBoundaryError, match=r"was read in .*set outside of all traced"):
            BOUNDARIES[name](reading(var))(ONE)
        assert var.get() == 3.0


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_value_set_inside_is_readable_inside(name):
    var = JitAwareContextVar("v")
    with var.set_on_enter(1000.0):
        result = BOUNDARIES[name](var.set_on_enter(3.0)(reading(var)))(ONE)
    np.testing.assert_allclose(result, 3.0)


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_value_from_outside_is_visible_through(name):
    var = JitAwareContextVar("v")
    for value in (3.0, 5.0):
        with var.set_on_enter(value):
            np.testing.assert_allclose(TRANSPARENT[name](reading(var))(ONE), value, rtol=1e-6)


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_value_set_inside_hides_the_one_outside_in(name):
    var = JitAwareContextVar("v")
    with var.set_on_enter(1000.0):
        result = TRANSPARENT[name](var.set_on_enter(3.0)(reading(var)))(ONE)
        assert var.get() == 1000.0
    np.testing.assert_allclose(result, 3.0, rtol=1e-6)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_fallback_is_returned_behind(name):
    var = JitAwareContextVar("v")
    with var.set_on_enter(1000.0):
        np.testing.assert_allclose(BOUNDARIES[name](lambda x: var.get(3.0) * x)(ONE), 3.0)
    np.testing.assert_allclose(BOUNDARIES[name](lambda x: var.get(3.0) * x)(ONE), 3.0)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_default_is_refused_behind(name):
    for var in (
        JitAwareContextVar("v", default=3.0),
        JitAwareContextVar("v", default_factory=lambda: 3.0),
    ):
        with pytest.raises(BehindBoundaryError, match="its default counts as set outside"):
            BOUNDARIES[name](reading(var))(ONE)
        assert var.get() == 3.0


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_default_is_visible_through(name):
    var = JitAwareContextVar("v", default=3.0)
    np.testing.assert_allclose(TRANSPARENT[name](reading(var))(ONE), 3.0, rtol=1e-6)


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(NESTABLE, NESTABLE)))
def test_two_nested_transforms(outer, inner):
    """Set outside both, between them and inside both: refused if a boundary lies between."""
    apply_outer, apply_inner = NESTABLE[outer], NESTABLE[inner]
    var = JitAwareContextVar("v")

    with expect_refusal(outer in BOUNDARIES or inner in BOUNDARIES), var.set_on_enter(3.0):
        np.testing.assert_allclose(apply_outer(apply_inner(reading(var)))(ONE), 3.0)
    with expect_refusal(inner in BOUNDARIES):
        between = apply_outer(var.set_on_enter(4.0)(apply_inner(reading(var))))
        np.testing.assert_allclose(between(ONE), 4.0)
    inside = apply_outer(apply_inner(var.set_on_enter(5.0)(reading(var))))
    np.testing.assert_allclose(inside(ONE), 5.0)
    assert var.get(None) is None


@pytest.mark.parametrize("outer", ["pmap", "shard_map"])
@pytest.mark.parametrize("inner", ["vmap", "grad", "jit", "scan"])
def test_transforms_inside_a_device_map(outer, inner):
    var = JitAwareContextVar("v")
    with pytest.raises(BehindBoundaryError, match="was read in"), var.set_on_enter(3.0):
        BOUNDARIES[outer](NESTABLE[inner](reading(var)))(ONE)
    between = BOUNDARIES[outer](var.set_on_enter(4.0)(NESTABLE[inner](reading(var))))
    with expect_refusal(inner in BOUNDARIES):
        np.testing.assert_allclose(between(ONE), 4.0)
    inside = BOUNDARIES[outer](NESTABLE[inner](var.set_on_enter(5.0)(reading(var))))
    np.testing.assert_allclose(inside(ONE), 5.0)


# jax 0.7 warns that a pmap in a jit moves data, which is not the question here.
@pytest.mark.filterwarnings("ignore:.* includes a pmap:UserWarning")
@pytest.mark.parametrize("inner", ["pmap", "shard_map"])
def test_a_device_map_inside_jit(inner):
    var = JitAwareContextVar("v")

    def program(x):
        with var.set_on_enter(4.0):
            return BOUNDARIES[inner](reading(var))(x)

    with pytest.raises(BehindBoundaryError, match="it was set in jit of program"):
        jax.jit(program)(ONE)
    inside = jax.jit(BOUNDARIES[inner](var.set_on_enter(5.0)(reading(var))))
    np.testing.assert_allclose(inside(ONE), 5.0)


def test_a_traced_value_is_read_inside_the_trace_and_the_program_is_traced_once():
    var = JitAwareContextVar("v")
    traces = []

    @jax.jit
    def program(value):
        traces.append(1)
        with var.set_on_enter(value):
            return jax.vmap(lambda x: var.get() * x)(jnp.arange(3.0))

    for value in (2.0, 3.0):
        np.testing.assert_array_equal(program(value), value * np.arange(3.0))
    assert len(traces) == 1


def test_gradients_flow_through_a_context_value():
    var = JitAwareContextVar("v")

    def loss(w):
        with var.set_on_enter(w):
            return jax.vmap(lambda x: var.get() ** 2 * x)(jnp.arange(3.0)).sum()

    np.testing.assert_allclose(jax.grad(loss)(2.0), 12.0)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(2.0), 12.0)


def test_the_message_names_variable_functions_and_remedy():
    rate = JitAwareContextVar("rate")

    def decayed(x):
        return x * rate.get()

    with rate.set_on_enter(0.5), pytest.raises(BehindBoundaryError) as info:
        jax.jit(decayed)(1.0)
    text = str(info.value)
    assert "'rate'" in text
    assert "jit of decayed at " in text
    assert "test_boundaries.py" in text
    assert "it was set outside of all traced functions" in text
    assert "plumb_and_transform(" in text
    assert "compute_extra_input_before=lambda: rate.get()" in text
    assert "[rate.set_on_enter(value)]" in text


def test_the_message_says_in_which_function_a_value_was_set():
    var = JitAwareContextVar("v")

    def outer(x):
        with var.set_on_enter(x):
            return lax.scan(lambda c, _: (c + var.get(), None), x, None, length=2)[0]

    with pytest.raises(BehindBoundaryError, match=r"read in scan of .*it was set in jit of outer"):
        jax.jit(outer)(1.0)


def test_the_message_names_eager_shard_map():
    with pytest.raises(BehindBoundaryError, match="was read in shard_map"):
        BOUNDARIES["shard_map"](reading(JitAwareContextVar("v", default=1.0)))(ONE)


def test_unset_behind_a_boundary_is_the_other_error_and_says_where():
    var = JitAwareContextVar("v")
    with pytest.raises(ContextValueNotSetError, match=r"No value is set .* in jit of"):
        jax.jit(reading(var))(1.0)


def test_a_trace_that_was_refused_is_not_cached():
    var = JitAwareContextVar("v")

    @jax.jit
    def inner(x):
        return x * var.get()

    with var.set_on_enter(2.0), pytest.raises(BehindBoundaryError, match="jit of inner"):
        inner(3.0)
    with pytest.raises(ContextValueNotSetError, match="jit of inner"):
        inner(3.0)


def test_set_around_a_jitted_function_is_refused_and_set_inside_it_is_not():
    var = JitAwareContextVar("v")
    np.testing.assert_allclose(jax.jit(var.set_on_enter(3.0)(reading(var)))(ONE), 3.0)
    with pytest.raises(BehindBoundaryError, match="set outside of all traced"):
        var.set_on_enter(3.0)(jax.jit(reading(var)))(ONE)


# Custom rules run one level further out than the function that they belong to.


def test_a_custom_jvp_rule_reads_a_value_set_in_the_same_jit():
    var = JitAwareContextVar("v")

    def plain(x):
        return x

    f = jax.custom_jvp(plain)
    f.defjvp(lambda primals, tangents: (f(*primals), var.get() * tangents[0]))

    @jax.jit
    def program(x):
        with var.set_on_enter(3.0):
            return jax.grad(f)(x)

    np.testing.assert_allclose(program(1.0), 3.0)

    @jax.jit
    def set_inside_grad(x):
        return jax.grad(var.set_on_enter(4.0)(f))(x)

    np.testing.assert_allclose(set_inside_grad(1.0), 4.0)


def test_a_custom_vjp_forward_rule_reads_a_value_set_in_the_same_jit():
    var = JitAwareContextVar("v")
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, var.get()), lambda scale, g: (scale * g,))

    @jax.jit
    def program(x):
        return jax.grad(var.set_on_enter(3.0)(f))(x)

    np.testing.assert_allclose(program(1.0), 3.0)


def test_a_custom_rule_does_not_read_a_value_from_outside_of_the_jit():
    var = JitAwareContextVar("v")
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, var.get()), lambda scale, g: (scale * g,))
    with var.set_on_enter(3.0):
        np.testing.assert_allclose(jax.grad(f)(1.0), 3.0)
        with pytest.raises(BehindBoundaryError, match="set outside of all traced"):
            jax.jit(jax.grad(f))(1.0)


def test_a_custom_jvp_function_is_staged_by_jit_and_refuses_what_was_set_around_it():
    var = JitAwareContextVar("v")

    def plain(x):
        return var.get() * x

    f = jax.custom_jvp(plain)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    with var.set_on_enter(3.0):
        np.testing.assert_allclose(f(ONE), 3.0)
        np.testing.assert_allclose(jax.vmap(f)(jnp.ones(2)), [3.0, 3.0])
    with pytest.raises(BehindBoundaryError, match="was read in"):
        jax.jit(var.set_on_enter(3.0)(f))(ONE)


def test_scan_checkpoint_and_jit_never_give_a_stale_value():
    var = JitAwareContextVar("v")

    def body(c, _):
        return c + var.get(0.0), None

    def compute(x):
        return x + var.get(0.0)

    programs = [
        lambda x: lax.scan(body, x, None, length=3)[0],
        jax.checkpoint(compute),
        jax.jit(compute),
    ]
    for value in (1.0, 100.0):
        with var.set_on_enter(value):
            assert [float(program(1.0)) for program in programs] == [1.0, 1.0, 1.0]


def test_constants_computed_at_compile_time_do_not_open_a_way_in():
    var = JitAwareContextVar("v")

    def program(x):
        with jax.ensure_compile_time_eval():
            return x * var.get()

    with var.set_on_enter(3.0), pytest.raises(BehindBoundaryError, match="jit of program"):
        jax.jit(program)(1.0)


def test_inside_an_eager_context_of_jax_the_values_from_outside_are_visible():
    var = JitAwareContextVar("v")

    def program(x):
        with jax.core.eval_context():
            constant = var.get()
        return x * constant

    with var.set_on_enter(3.0):
        np.testing.assert_allclose(jax.jit(program)(1.0), 3.0)


def test_a_default_factory_that_first_runs_under_vmap_and_grad_computes_eagerly():
    var = JitAwareContextVar("v", default_factory=lambda: jnp.arange(3.0) + 1)
    result = jax.vmap(jax.grad(lambda x: (var.get() * x).sum()))(jnp.ones(2))
    np.testing.assert_allclose(result, [6.0, 6.0])
    assert not isinstance(var.get(), jax.core.Tracer)
    np.testing.assert_allclose(var.get(), [1.0, 2.0, 3.0])


def test_a_default_factory_runs_at_the_root_whatever_is_active():
    var = JitAwareContextVar("v", default_factory=lambda: _jax.is_root(_jax.current_trace()))
    seen = []
    jax.vmap(lambda x: (seen.append((var.get(), _jax.is_root(_jax.current_trace()))), x)[1])(
        jnp.ones(2)
    )
    assert seen == [(True, False)]
