"""Computations that leave the traces which they do not depend on, out of every transform."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import anabranch as ab
from anabranch import _jax
from anabranch.errors import HoistError
from tests.contextvars_ext.nesting import BOUNDARIES, TRANSPARENT

KEY = jax.random.key(1)
XS = jnp.arange(3.0)


def by_hoist(fn, *args, **kwargs):
    return ab.hoist(fn, *args, **kwargs)


def by_block(fn, *args, **kwargs):
    with ab.hoisting():
        return fn(*args, **kwargs)


both = pytest.mark.parametrize("hoist", [by_hoist, by_block])


def init(key, shape=(2,)):
    """Something with jit, custom derivatives and a loop in it."""
    noise = jax.nn.relu(jax.random.normal(key, shape))
    return noise + lax.scan(lambda c, x: (c + x, None), 0.0, XS)[0]


def split(key):
    """Split in two: unpacking an array is an operation, too."""
    first, second = jax.random.split(key)
    return first, second


def mesh():
    return jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))


def over_devices(f):
    spec = PartitionSpec("i")
    return jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=spec)


def everywhere(f):
    inner = jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])
    return lambda x: jax.jit(jax.vmap(inner))(jnp.stack([x, x]))[0]


NESTED = {
    "jit of scan": lambda f: jax.jit(BOUNDARIES["scan"](f)),
    "scan of scan": lambda f: BOUNDARIES["scan"](BOUNDARIES["scan"](f)),
    "jit of vmap of grad of scan": everywhere,
    "jit of shard_map": lambda f: lambda x: jax.jit(over_devices(f))(jnp.full(8, x))[0],
    "jit of custom_jvp": lambda f: jax.jit(TRANSPARENT["custom_jvp"](f)),
}


@both
@pytest.mark.parametrize("name", [*BOUNDARIES, *TRANSPARENT, *NESTED])
def test_what_depends_on_nothing_is_concrete(hoist, name):
    transform = (BOUNDARIES | TRANSPARENT | NESTED)[name]
    made = []

    def f(x):
        made.append(hoist(init, KEY))
        return x * made[-1].sum()

    expected = init(KEY)
    transform(f)(jnp.asarray(1.0))
    assert made
    for w in made:
        assert not _jax.is_tracer(w)
        np.testing.assert_allclose(w + 0, expected, rtol=1e-6)


@both
def test_parameters_made_in_scan_are_those_that_were_made_before_it(hoist):
    """The key is split in the body; at the end it has been split once, as the body ran once."""
    rng = jax.random.PRNGKey(1)
    params = {}

    def step(h, x):
        nonlocal rng
        rng, key = hoist(split, rng)
        w = params.setdefault("w", hoist(jax.random.uniform, key, shape=[]))
        return jnp.tanh(h + w * x), h

    last, hs = lax.scan(step, 0.0, jnp.arange(10.0))
    expected_rng, key = jax.random.split(jax.random.PRNGKey(1))
    w = jax.random.uniform(key, shape=[])
    assert params["w"] == w
    assert rng.tolist() == expected_rng.tolist()
    by_hand, hs_by_hand = lax.scan(lambda h, x: (jnp.tanh(h + w * x), h), 0.0, jnp.arange(10.0))
    assert last == by_hand
    assert hs.tolist() == hs_by_hand.tolist()


def test_zeros_in_a_body_are_zeros_as_they_are_outside():
    seen = []

    def step(h, x):
        with ab.hoisting():
            seen.append(jnp.zeros([]))
        seen.append(jnp.zeros([]))
        return h, x

    lax.scan(step, 0.0, XS)
    assert repr(seen[0]) == repr(jnp.zeros([]))
    assert _jax.is_tracer(seen[1])


@both
def test_scan_in_scan_leaves_the_inner_loop_and_stays_in_the_outer_one(hoist):
    """The draw depends on the outer slice, so it is a tracer of the outer body, usable there."""
    keys = jax.random.split(KEY, 3)

    def outer(total, key):
        params = {}

        def inner(h, x):
            if "w" not in params:
                params["w"] = hoist(init, key)
            return jnp.tanh(h + params["w"] * x), None

        h, _ = lax.scan(inner, jnp.zeros(2), XS)
        return total + h, params["w"] * 2

    total, ws = lax.scan(outer, jnp.zeros(2), keys)
    expected = jnp.stack([init(key) for key in keys])
    np.testing.assert_allclose(ws, 2 * expected, rtol=1e-6)
    h = [
        lax.scan(lambda h, x, w=w: (jnp.tanh(h + w * x), None), jnp.zeros(2), XS)[0]
        for w in expected
    ]
    np.testing.assert_allclose(total, sum(h), rtol=1e-5)

    jaxpr = jax.make_jaxpr(lambda keys: lax.scan(outer, jnp.zeros(2), keys))(keys)
    (outer_scan,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    body = outer_scan.params["jaxpr"].jaxpr
    scans = [e for e in body.eqns if e.primitive.name == "scan"]
    assert "random_bits" in str(body)
    assert "random_bits" not in "".join(str(e.params["jaxpr"]) for e in scans)


# A model that takes its key out of a context and puts its parameters into a dictionary.
KEYS = ab.JitAwareContextVar("KEYS")


class Keys:
    def __init__(self, key):
        self.key = key

    def draw(self, hoist):
        self.key, key = hoist(split, self.key)
        return key


def dense(hoist, params, x, size):
    if "w" not in params:
        params["w"] = hoist(jax.random.uniform, KEYS.get().draw(hoist), (x.shape[-1], size))
    return x @ params["w"]


def model(hoist, params, x):
    for i, size in enumerate([2, 3, 5]):
        x = jnp.tanh(dense(hoist, params.setdefault(f"layer{i}", {}), x, size))
    return x


def through(transform):
    """Run the model inside one more transform, its keys still outside."""

    def run(hoist, params, x):
        keys = KEYS.get()

        def inside(x):
            with KEYS.set_on_enter(keys):
                return model(hoist, params, x)

        return transform(inside)(x)

    return run


INNER = {
    "nothing": model,
    "scan": through(lambda f: lambda x: lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1]),
    "jit": through(jax.jit),
    "checkpoint": through(jax.checkpoint),
    "cond": through(lambda f: lambda x: lax.cond(True, f, lambda x: jnp.zeros(5), x)),
}


@both
@pytest.mark.parametrize(
    ("inner", "outer"),
    [*[(name, lambda f: f) for name in INNER], ("scan", jax.jit)],
    ids=[*INNER, "scan, all in jit"],
)
def test_replicas_are_initialised_by_vmap_over_keys(hoist, inner, outer):
    x = jnp.ones(4)

    def one(key, run=INNER[inner]):
        params = {}
        with KEYS.set_on_enter(Keys(key)):
            run(hoist, params, x)
        return params

    keys = jax.random.split(KEY, 3)
    found = outer(jax.vmap(one))(keys)
    expected = [one(key, model) for key in keys]
    assert [w["w"].shape for w in found.values()] == [(3, 4, 2), (3, 2, 3), (3, 3, 5)]
    jax.tree.map(
        lambda many, *each: np.testing.assert_allclose(many, jnp.stack(each), rtol=1e-6),
        found,
        *expected,
    )


@both
@pytest.mark.parametrize("transform", ["jit", "vmap", "pmap", "shard_map"])
def test_a_value_of_an_outer_trace_leaves_the_loop_and_stays_there(hoist, transform):
    def f(x):
        made = []

        def step(c, _):
            made.append(hoist(lambda y: jax.nn.relu(y) * 2, x))
            return c + made[-1], None

        total, _ = lax.scan(step, jnp.zeros_like(x), None, length=2)
        return total + 10 * made[0]

    run = {"jit": jax.jit, "vmap": jax.vmap, "pmap": jax.pmap, "shard_map": over_devices}
    xs = jnp.arange(8.0)
    np.testing.assert_allclose(run[transform](f)(xs), 24 * xs)


@both
def test_nothing_leaks(hoist):
    @jax.jit
    def f(key):
        made = []

        def step(c, x):
            made.append(hoist(init, key))
            return c + x, None

        lax.scan(step, 0.0, XS)
        lax.cond(True, lambda: step(0.0, 0.0)[0], lambda: 0.0)
        return made.pop() + made.pop()

    with jax.checking_leaks():
        np.testing.assert_allclose(f(KEY), 2 * init(KEY), rtol=1e-6)
        lax.scan(lambda c, x: (c + hoist(init, KEY).sum(), x), 0.0, XS)


@both
def test_derivatives_flow_through_what_is_hoisted(hoist):
    def f(x):
        def step(c, _):
            return c + hoist(lambda y: jnp.sin(y) * 3, x), None

        return lax.scan(step, 0.0, None, length=2)[0]

    cos, sin = 6 * np.cos(0.5), 6 * np.sin(0.5)
    np.testing.assert_allclose(jax.grad(f)(0.5), cos, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(0.5), cos, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(f))(0.5), -sin, rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(f)(0.5), -sin, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(f, (0.5,), (1.0,)), (sin, cos), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(f))(jnp.full(2, 0.5)), [cos] * 2, rtol=1e-6)


@both
def test_what_is_hoisted_out_of_checkpoint_is_a_residual(hoist):
    def f(x, w):
        return jnp.sin(x) * hoist(lambda w: jnp.exp(w) * 2, w)

    w = 0.3

    def g(x):
        return jax.checkpoint(lambda y: f(y, w))(x)

    np.testing.assert_allclose(jax.grad(g)(0.5), 2 * np.cos(0.5) * np.exp(0.3), rtol=1e-6)
    by_w = jax.grad(lambda w: jax.checkpoint(lambda y: f(y, w))(0.5))(0.3)
    np.testing.assert_allclose(by_w, 2 * np.sin(0.5) * np.exp(0.3), rtol=1e-6)


@both
def test_functions_with_rules_of_their_own_are_hoisted_and_may_hoist(hoist):
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, g: (10.0 * x * g,))
    scaled = jax.custom_jvp(lambda x: x * hoist(lambda: jnp.full((), 3.0)))
    scaled.defjvp(lambda p, t: (scaled(*p), 7.0 * t[0]))

    def f(x):
        return lax.scan(lambda c, _: (c + hoist(square, x), None), 0.0, None, length=2)[0]

    np.testing.assert_allclose(jax.grad(f)(3.0), 60.0)
    np.testing.assert_allclose(jax.jit(scaled)(2.0), 6.0)
    np.testing.assert_allclose(jax.jit(jax.grad(scaled))(2.0), 7.0)
    np.testing.assert_allclose(jax.vmap(scaled)(XS), 3 * XS)


def test_a_block_may_close_over_traced_values_in_a_function_with_rules():
    """JAX gets only the operands of such a function; what it closes over is met inside."""

    def f(x):
        with ab.hoisting():
            g = jax.custom_jvp(lambda y: y * x)
            g.defjvp(lambda p, t: (g(*p), t[0]))
            return g(2.0)

    np.testing.assert_allclose(jax.vmap(f)(XS), 2 * XS)


def test_python_can_decide_by_a_hoisted_value_inside_jit():
    @jax.jit
    def f(x):
        if bool(ab.hoist(lambda: jax.random.uniform(KEY) < 2)):
            return x + 1
        return x

    assert f(1.0) == 2


def test_mixed_levels_give_the_innermost_of_them():
    def f(key):
        def outer(c, x):
            made = []

            def inner(d, _):
                made.append(ab.hoist(jax.random.normal, ab.hoist(jax.random.fold_in, key, 3)))
                made.append(ab.hoist(lambda a, b: a + b, made[0], x))
                return d, None

            lax.scan(inner, 0.0, None, length=2)
            owner = [_jax.tracer_trace(w) for w in made]
            around = _jax.all_traces(_jax.current_trace())
            assert [around.index(trace) for trace in owner] == [1, 0]
            return c, made[1]

        return lax.scan(outer, 0.0, XS)[1]

    expected = jax.random.normal(jax.random.fold_in(KEY, 3)) + XS
    np.testing.assert_allclose(jax.jit(f)(KEY), expected, rtol=1e-6)


@both
def test_collectives_go_where_their_axis_is(hoist):
    """`hoist` counts operands only; an axis that is not there at that level is an error of JAX."""

    def f(x):
        def step(c, _):
            return c, hoist(lambda y: lax.psum(y, "i"), x)

        return lax.scan(step, 0.0, None, length=1)[1][0]

    np.testing.assert_allclose(jax.vmap(f, axis_name="i")(XS), [3.0] * 3)


def test_an_index_of_an_axis_has_no_operand():
    def f(hoist, x):
        return lax.scan(lambda c, _: (c, hoist(lambda: lax.axis_index("i"))), x, None, length=1)[1]

    found = jax.vmap(functools.partial(f, by_block), axis_name="i")(XS)
    assert found.tolist() == [[0], [1], [2]]
    with pytest.raises(NameError, match="unbound axis"):
        jax.vmap(functools.partial(f, by_hoist), axis_name="i")(XS)


@both
def test_under_a_mesh_that_is_set(hoist):
    spec = PartitionSpec("i")
    with jax.set_mesh(mesh()):
        f = jax.shard_map(lambda x: x + hoist(init, KEY).sum(), in_specs=spec, out_specs=spec)
        for run in (f, jax.jit(f)):
            np.testing.assert_allclose(run(jnp.zeros(8)), [init(KEY).sum()] * 8, rtol=1e-6)


# What is impossible.
def refusal(f, *args):
    with pytest.raises(HoistError) as info:
        f(*args)
    return str(info.value)


@pytest.mark.parametrize("loop", ["scan", "lax.map", "fori_loop", "while_body", "while_cond"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_what_depends_on_the_step_cannot_leave_the_loop(loop, wrap):
    def initialise(key, scale):
        return key * scale

    def f(x):
        return ab.hoist(initialise, jnp.ones(()) * 2, scale={"of": [1.0, x]}["of"][1])

    text = refusal(wrap(BOUNDARIES[loop](f)), jnp.ones((2,) if wrap is jax.vmap else ()))
    assert "initialise cannot leave" in text
    if loop != "while_cond":  # there `x` comes from outside
        assert "argument scale: float32[]" in text
    assert "argument key: float32[]" in text  # it was made in the body, from nothing that changes
    assert re.search(r"scan|fori_loop|while_body|while_cond", text)
    assert "hoisting()" in text


def test_only_arguments_that_depend_on_the_step_are_named():
    def f(outside):
        def step(c, x):
            return c, ab.hoist(lambda pair, *rest, **more: 0, (outside, {"a": x}), outside, c, z=x)

        return lax.scan(step, 0.0, XS)

    text = refusal(jax.jit(f), 1.0)
    named = re.findall(r"^  argument (.+): float32\[\], traced by scan of", text, re.MULTILINE)
    assert named == ["pair[1]['a']", "args[2]", "z"]


def test_a_captured_value_that_is_traced_is_no_argument():
    def step(c, x):
        return c, ab.hoist(lambda y: x + y, 1)

    assert "<lambda> computes with a traced value" in refusal(lax.scan, step, 0.0, XS)
    assert "it captures x." in refusal(lax.scan, step, 0.0, XS)

    def by_default(c, x):
        return c, ab.hoist(jax.jit(lambda y, z=x: y + z), 1)

    assert "it captures z." in refusal(lax.scan, by_default, 0.0, XS)

    def partly(c, x):
        return c, ab.hoist(functools.partial(lambda x, y: x + y, x), 1)

    assert "argument x of the partial: float32[]" in refusal(lax.scan, partly, 0.0, XS)


def test_a_value_may_be_captured_for_its_shape():
    made = []

    def step(c, x):
        made.append(ab.hoist(lambda: jnp.zeros(x.shape)))
        made.append(ab.hoist(lambda shape=x.shape: jnp.zeros(shape)))
        return c, x

    lax.scan(step, 0.0, jnp.ones((3, 2)))
    assert [w.tolist() for w in made] == [[0, 0], [0, 0]]


def test_what_a_partial_holds_are_arguments():
    def f(key):
        made = []

        def step(c, _):
            made.append(ab.hoist(functools.partial(jax.random.normal, key, shape=(2,))))
            return c, None

        lax.scan(step, 0.0, None, length=2)
        return made[0]

    np.testing.assert_allclose(jax.jit(f)(KEY), jax.random.normal(KEY, (2,)), rtol=1e-6)


def test_a_value_that_depends_on_the_step_stays_in_the_loop_in_a_block():
    def step(c, x):
        with ab.hoisting():
            w = jnp.exp(x) * jnp.ones(())
        return c + w, w

    last, ws = lax.scan(step, 0.0, XS)
    np.testing.assert_allclose(ws, jnp.exp(XS), rtol=1e-6)
    np.testing.assert_allclose(last, jnp.exp(XS).sum(), rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_no_concrete_value_of_a_traced_argument(transform):
    def f(x):
        return ab.hoist_concrete(lambda a, b: a * b, 2.0, b=x).sum()

    text = refusal(transform(f), jnp.ones(2))
    assert "argument b: float32[" in text
    assert "traced by" in text
    assert "argument a" not in text


def test_concrete_values_are_concrete_in_every_transform():
    seen = []

    def f(x):
        seen.append(ab.hoist_concrete(jax.random.normal, KEY))
        return x * 2.0

    jax.jit(lambda x: lax.scan(lambda c, _: (jax.vmap(f)(c), None), x, None, length=1)[0])(XS)
    assert float(seen[0]) == jax.random.normal(KEY)
    assert ab.hoist_concrete(lambda: 3) == 3


def test_a_tracer_that_hides_in_an_object_is_refused_by_hoist_and_met_in_a_block():
    class Box:
        def __init__(self, value):
            self.value = value

        def double(self):
            return self.value * 2.0

    def f(hoist, x):
        box = Box(x)
        return jax.checkpoint(lambda y: y + hoist(box.double))(x)

    assert "double computes with a traced value" in refusal(
        jax.jit(functools.partial(f, by_hoist)), 1.0
    )
    assert jax.jit(functools.partial(f, by_block))(1.0) == 3.0


def test_a_trace_that_has_ended_is_not_worked_in():
    """The chain does not lead there, so nothing is hoisted, and JAX says what it says."""
    leaked = []
    jax.jit(leaked.append)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        ab.hoist(lambda x: x + 1, leaked[0])
    with pytest.raises(jax.errors.UnexpectedTracerError), ab.hoisting():
        leaked[0] + 1


def test_a_second_loop_with_the_same_body_does_not_run_it():
    """Python runs while JAX traces. Make the store and the body in one function."""
    params = {}

    def step(c, x):
        params["w"] = ab.hoist(init, KEY)
        return c + x, None

    lax.scan(step, 0.0, XS)
    params.clear()
    lax.scan(step, 0.0, XS)
    assert params == {}


def test_a_body_that_jax_keeps_gives_out_its_old_tracers_and_jax_refuses_them():
    kept = []

    @jax.jit
    def inner(x):
        kept.append(ab.hoist(jnp.sin, hidden[0]))
        return x + kept[-1]

    hidden = []

    def outer(x):
        hidden[:] = [x]
        return inner(jnp.zeros_like(x))

    assert jax.jit(outer)(1.0) == jnp.sin(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(lambda x: outer(x) + 0)(2.0)


def test_both_branches_of_cond_are_computed():
    seen = []

    def branch(x):
        seen.append(ab.hoist(init, KEY))
        return x

    lax.cond(False, branch, lambda x: branch(x) * 2, 1.0)
    assert len(seen) == 2
    assert not any(map(_jax.is_tracer, seen))


# Contexts.
def test_context_variables_in_a_block_are_those_of_the_outside():
    var = ab.JitAwareContextVar("var")

    @jax.jit
    def f(x):
        with pytest.raises(ab.errors.BehindBoundaryError):
            var.get()
        with ab.hoisting():
            seen = var.get()
            with var.set_on_enter("inside"):
                assert jax.vmap(lambda y: (var.get() == "inside") * y)(XS)[1] == 1
        assert ab.hoist(var.get) == seen
        return x, ab.hoist(lambda: var.get() == seen)

    with var.set_on_enter("outside"):
        f(1.0)


def test_a_stream_outside_of_a_loop_gives_its_keys_to_a_block_inside():
    def draw(key, within):
        with ab.set_keystream_on_enter(ab.KeyStream(key)):
            made = []

            def step(c, _):
                with within():
                    made.append(ab.random.normal((2,)))
                return c, None

            lax.scan(step, 0.0, None, length=3)
            return made[0]

    with ab.set_keystream_on_enter(ab.KeyStream(KEY)):
        expected = ab.random.normal((2,))
    found = jax.jit(functools.partial(draw, within=ab.hoisting))(KEY)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(LookupError):
        draw(KEY, contextlib.nullcontext)


def test_blocks_nest_close_and_may_be_decorators():
    made = []

    @ab.hoisting()
    def make():
        with ab.hoisting():
            made.append(jnp.ones(2) + 1)
        made.append(ab.hoist(lambda: jnp.ones(2) + 1))
        return jnp.ones(2) + 1

    def step(c, x):
        made.append(make())
        with pytest.raises(ZeroDivisionError), ab.hoisting():
            1 / 0
        made.append(x + jnp.ones(2))
        return c, None

    lax.scan(step, 0.0, XS)
    assert [_jax.is_tracer(w) for w in made] == [False, False, False, True]
    assert _jax.is_root(_jax.current_trace())
    assert ab.hoist(_jax.current_trace) is _jax.root_trace()


def test_transforms_in_a_block_work():
    def step(c, x):
        with ab.hoisting():
            constant = jax.jit(jax.vmap(jax.grad(lambda y: jnp.tanh(y) * 2)))(XS)
            mixed = jax.vmap(lambda y: jax.grad(lambda z: z * x * y)(1.0))(XS)
            loop = lax.fori_loop(0, 3, lambda i, v: v + x, 0.0)
        return c, (jnp.stack([mixed, constant]), loop)

    _, (found, loops) = lax.scan(step, 0.0, XS)
    for x, (mixed, constant) in zip(XS, found, strict=True):
        np.testing.assert_allclose(mixed, x * XS)
        np.testing.assert_allclose(constant, 2 / np.cosh(XS) ** 2, rtol=1e-6)
    np.testing.assert_allclose(loops, 3 * XS)


def test_what_a_variable_holds_is_an_argument_and_a_module_is_not_looked_into():
    class Model(ab.Module):
        def __init__(self, w):
            self.w = ab.Param(w)

    def f(x):
        variable, module = ab.Param(x), Model(x)

        def step(c, _):
            return c + ab.hoist(lambda v: v.value * 2, variable), None

        total, _ = lax.scan(step, 0.0, None, length=2)
        assert (
            "pass"
            in refusal(
                lambda: lax.scan(
                    lambda c, _: (c, ab.hoist(lambda m: m.w.value * 2, module)), 0.0, None, length=1
                )
            ).lower()
        )
        return total

    assert jax.jit(f)(3.0) == 12
