"""Layers that make their parameters at the first call, out of all traces that this call is in: C29.

What is made so depends on no step, so that loops can have it before they begin.
"""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import HoistError, StructureError


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


class Lazy(ab.Module):
    """Learns its width from its first input. `seen` is there before, and written at each call."""

    def __init__(self, seed=0):
        self.seed, self.seen = seed, ab.Variable(0)

    def __call__(self, x):
        if not hasattr(self, "w"):
            self.w = ab.Param(ab.hoist(normal, self.seed, x.shape[-1:]))
        self.seen.value += 1
        return x @ self.w


class Placeholder(Lazy):
    """The same with `None` before, and a flag."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.w, self.made = None, False

    def __call__(self, x):
        if not self.made:
            self.w = ab.Param(ab.hoist(normal, self.seed, x.shape[-1:]))
            self.made = True
        self.seen.value += 1
        return x @ self.w


class Dense(ab.Module):
    def __init__(self, seed, shape):
        self.w = ab.Param(normal(seed, shape))


class Blocks(ab.Module):
    """Makes whole layers, in a dictionary and in a list, and lets two of them share a table."""

    def __init__(self, seed=0):
        self.seed, self.blocks, self.order = seed, {}, []
        self.seen = ab.Variable(0)

    def __call__(self, x):
        with ab.hoisting():
            for i in range(2):
                if f"block{i}" not in self.blocks:
                    block = self.blocks[f"block{i}"] = Dense(self.seed + i, x.shape[-1:])
                    block.table = self.blocks["block0"].w
                    self.order.append(block)
        self.seen.value += 1
        return sum(x @ (block.w + block.table) for block in self.order)


MODELS = [Lazy, Placeholder, Blocks]
X = jnp.array([1.0, 2.0, 3.0])
XS = jnp.stack([X, 2 * X])

LOOPS = {
    "scan": lambda m, xs: ab.scan(lambda m, x: (m, m(x)))(m, xs)[1].sum(),
    "scan, broadcast": lambda m, xs: ab.scan(
        lambda c, x, m: (c + m(x), None), in_axes=(ab.Carry, 0, None)
    )(0.0, xs, m)[0],
    "scan of a method": lambda m, xs: ab.scan(m.__call__, in_axes=(0,), out_axes=0)(xs).sum(),
    "fori_loop": lambda m, xs: ab.fori_loop(
        0, 2, lambda i, s: (s[0], s[1] + s[0](xs[i])), (m, 0.0)
    )[1],
    "fori_loop, bound at run time": lambda m, xs: ab.fori_loop(
        0, jnp.argmax(xs[:, 0]) + 1, lambda i, s: (s[0], s[1] + s[0](xs[i])), (m, 0.0)
    )[1],
    "while_loop": lambda m, xs: ab.while_loop(
        lambda s: s[2] < 2, lambda s: (s[0], s[1] + s[0](xs[s[2]]), s[2] + 1), (m, 0.0, 0)
    )[1],
}


def in_python(m, xs):
    return sum(m(x) for x in xs)


def assert_same(m, other):
    assert ab.graphdef(m) == ab.graphdef(other)
    for found, expected in zip(
        jax.tree.leaves(ab.state(m)), jax.tree.leaves(ab.state(other)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, ab.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_in_a_loop_it_is_what_it_is_in_python(loop, model, wrap):
    run = wrap(LOOPS[loop])
    m, other = model(), model()
    for _ in range(2):
        np.testing.assert_allclose(run(m, XS), in_python(other, XS), rtol=1e-6)
        if not isinstance(m, Blocks):
            assert_same(m, other)
            w = m.w
    if isinstance(m, Blocks):
        assert m.order[1] is m.blocks["block1"]
        assert m.order[1].table is m.order[0].w
        assert_same(m, other)
    else:
        assert m.w is w
        assert type(w) is ab.Param


TRANSFORMS = {
    "jit": ab.jit,
    "remat": ab.remat,
    "cond": lambda f: lambda m, xs: ab.cond(True, f, lambda m, xs: f(m, 2 * xs), m, xs),
    "jit of scan": lambda f: ab.jit(
        lambda m, xs: ab.scan(lambda m, x: (m, f(m, x)))(m, xs[None])[1][0]
    ),
}


def once(m, xs):
    return m(xs[0]) + m(xs[1])


@pytest.mark.parametrize("model", [Lazy, Placeholder])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("inner", [once, LOOPS["scan"]], ids=["plain", "scan"])
def test_in_other_transforms_too(transform, model, inner):
    m, other = model(), model()
    run = TRANSFORMS[transform](inner)
    for _ in range(2):
        np.testing.assert_allclose(run(m, XS), in_python(other, XS), rtol=1e-6)
        assert_same(m, other)


@pytest.mark.parametrize("inner", [once, LOOPS["scan"]], ids=["plain", "scan"])
def test_in_lanes_a_broadcast_layer_makes_one_parameter(inner):
    m, other = Placeholder(), Placeholder()
    lanes = ab.vmap(inner, in_axes=(None, 0))
    for _ in range(2):
        found = lanes(m, jnp.stack([XS, 3 * XS]))
        one = in_python(other, XS)
        np.testing.assert_allclose(found, [one, 3 * one], rtol=1e-6)
        assert_same(m, other)


@pytest.mark.parametrize("inner", [once, LOOPS["scan"]], ids=["plain", "scan"])
@pytest.mark.parametrize("wrap", [lambda f: f, ab.jit], ids=["eager", "jit"])
def test_in_a_gradient_the_next_one_has_it(inner, wrap):
    class Scaled(Placeholder):
        def __init__(self):
            super().__init__()
            self.scale = ab.Param(2.0)

        def __call__(self, x):
            return self.scale * super().__call__(x)

    m, other = Scaled(), Scaled()
    loss = wrap(ab.grad(inner))
    first = loss(m, XS)
    np.testing.assert_allclose(first["scale"], in_python(other, XS) / 2, rtol=1e-6)
    assert [*first.flat()] == [("scale",)]
    assert_same(m, other)
    second = loss(m, XS)
    np.testing.assert_allclose(second["w"], 2 * XS.sum(0), rtol=1e-6)


def test_replicas_made_in_lanes_are_lazy_too():
    """Each lane has its own key; a draw for each is what `hoisting` gives, and `hoist` too."""

    class Keyed(ab.Module):
        def __init__(self, key):
            self.key = key

        def __call__(self, x):
            if not hasattr(self, "w"):
                self.w = ab.Param(ab.hoist(jax.random.normal, self.key, x.shape))
            return x @ self.w

    keys = jax.random.split(jax.random.key(0), 3)
    lanes = ab.vmap(Keyed)(keys)
    found = ab.jit(ab.vmap(lambda m, x: m(x), in_axes=(0, None)))(lanes, X)
    expected = jnp.stack([jax.random.normal(key, X.shape) for key in keys])
    np.testing.assert_allclose(lanes.w.value, expected, rtol=1e-6)
    np.testing.assert_allclose(found, expected @ X, rtol=1e-5)


def test_a_parameter_may_depend_on_the_trace_around_the_loop():
    def run(m, key, xs):
        def step(m, x):
            if not hasattr(m, "w"):
                m.w = ab.Param(ab.hoist(jax.random.normal, key, x.shape))
            return m, x @ m.w

        return ab.scan(step)(m, xs)[1]

    for key in jax.random.split(jax.random.key(0)):
        m = Lazy()
        with jax.checking_leaks():
            found = ab.jit(run)(m, key, XS)
        w = jax.random.normal(key, X.shape)
        np.testing.assert_allclose(found, XS @ w, rtol=1e-6)
        np.testing.assert_allclose(m.w.value, w, rtol=1e-6)


def test_a_compiled_loop_does_it_again_for_another_layer():
    traces = []

    @ab.jit
    def run(m, xs):
        traces.append(1)
        return LOOPS["scan"](m, xs)

    first, second = Lazy(), Lazy()
    for m in (first, second):
        run(m, XS)
    assert len(traces) == 1
    assert first.w is not second.w
    assert_same(first, second)
    assert int(second.seen) == 2


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_every_layer_of_a_larger_program_is_made(loop):
    """JAX keeps the trace of a step, but what it has made belongs to one layer."""
    run = LOOPS[loop]

    def step(one, two, xs):
        return run(one, xs) + run(two, 2 * xs)

    for _ in range(3):
        layers, others = [Lazy(), Lazy()], [Lazy(), Lazy()]
        found = ab.jit(lambda *args: step(*args))(*layers, XS)  # noqa: PLW0108 - a new function
        expected = in_python(others[0], XS) + in_python(others[1], 2 * XS)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert_same(layers, others)


def test_threads_make_layers_of_their_own():
    barrier = threading.Barrier(4)
    found = []

    def body(m, x):
        return m, m(x)

    def work():
        for _ in range(5):
            m = Lazy()
            barrier.wait()
            found.append((m, ab.jit(lambda m, xs: ab.scan(body)(m, xs)[1].sum())(m, XS)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = Lazy()
    expected = in_python(other, XS)
    assert len(found) == 20
    for m, total in found:
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        assert_same(m, other)


def test_the_step_is_traced_twice_and_then_no_more():
    class Counting(Lazy):
        traces = ()

        def __call__(self, x):
            Counting.traces += (1,)
            return super().__call__(x)

    def step(m, x):
        return m, m(x)

    m = Counting()
    loop = ab.scan(step)
    loop(m, XS)
    assert len(Counting.traces) == 2  # without the parameter, and with it
    other = Counting()
    loop(m, XS)
    loop(other, XS)
    assert len(Counting.traces) == 2  # what a step adds is kept with the program
    loop(other, XS)
    assert_same(m, other)


def test_a_loop_in_a_loop_hands_it_out():
    def outer(m, xs):
        return m, LOOPS["scan"](m, xs)

    m, other = Lazy(), Lazy()
    batches = jnp.stack([XS, 2 * XS])
    _, found = ab.scan(outer)(m, batches)
    np.testing.assert_allclose(found, [in_python(other, xs) for xs in batches], rtol=1e-6)
    assert_same(m, other)


def test_without_steps_nothing_is_made():
    m = Lazy()
    ab.scan(lambda m, x: (m, m(x)))(m, XS[:0])
    assert not hasattr(m, "w")
    assert ab.fori_loop(3, 3, lambda i, m: m(X), m) is m


def test_without_jit_it_is_the_same():
    for loop in LOOPS.values():
        m, other = Placeholder(), Placeholder()
        with jax.disable_jit():
            found = loop(m, XS)
        np.testing.assert_allclose(found, in_python(other, XS), rtol=1e-6)
        assert_same(m, other)


# What a loop cannot do before it begins.
def refusal(f, m, *args):
    before = ab.graphdef(m)
    leaves = jax.tree.leaves(ab.state(m))
    with pytest.raises(StructureError) as info:
        f(m, *args)
    assert ab.graphdef(m) is before
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(ab.state(m)), strict=True))
    assert len(str(info.value)) < 4000
    return str(info.value)


def scan_of(step):
    return ab.scan(lambda m, x: (m, step(m, x)))


@pytest.mark.parametrize("wrap", [lambda f: f, ab.jit], ids=["eager", "jit"])
def test_what_depends_on_a_step_is_refused_with_its_path(wrap):
    def step(m, x):
        m.w = ab.Param(x * 1)

    text = refusal(wrap(scan_of(step)), Lazy(), XS)
    assert "args[0] has no .w before the step, and .w after it" in text
    assert "hoist" in text


def test_a_key_that_is_carried_is_named():
    class Keyed(Lazy):
        def __init__(self):
            super().__init__()
            self.rngs = ab.Rngs(0)

        def __call__(self, x):
            self.w = ab.Param(ab.hoist(jax.random.normal, self.rngs.params(), x.shape))

    m = Keyed()
    with pytest.raises(HoistError, match=r"argument key: .*, traced by scan"):
        scan_of(Keyed.__call__)(m, XS)
    assert not hasattr(m, "w")
    assert int(m.rngs.default.count) == 0


@pytest.mark.parametrize("start", [lambda: jnp.zeros(()), lambda: 0], ids=["array", "number"])
def test_what_is_made_and_written_in_one_step_is_refused(start):
    """Python adds 1 to a number at trace time, so that the value does not show it."""

    def step(m, x):
        if not hasattr(m, "calls"):
            m.calls = ab.Variable(ab.hoist(start))
        m.calls.value += 1

    text = refusal(scan_of(step), Lazy(), XS)
    assert "no .calls" in text or "made by a step and written, too:\n  args[0].calls" in text


def test_what_is_made_and_replaced_is_refused():
    def step(m, x):
        m.last = ab.hoist(normal, 0, x.shape)

    text = refusal(scan_of(step), Lazy(), XS)
    assert "made by a step and written, too:\n  args[0].last" in text


def test_what_only_the_first_step_writes_is_refused():
    def step(m, x):
        if not hasattr(m, "w"):
            m.w = ab.Param(ab.hoist(normal, 0, x.shape))
            m.seen.value += 10

    text = refusal(scan_of(step), Lazy(), XS)
    assert "these are written only by the step that makes args[0].w" in text
    assert "seen" in text


def test_what_only_later_steps_write_is_refused():
    def step(m, x):
        if hasattr(m, "w"):
            m.seen.value += 10
        else:
            m.w = ab.Param(ab.hoist(normal, 0, x.shape))

    assert "or only by the others:\n  args[0].seen" in refusal(scan_of(step), Lazy(), XS)


def test_what_is_added_in_every_step_is_refused():
    def step(m, x):
        m["all"].append(ab.Param(ab.hoist(normal, 0, x.shape)))

    text = refusal(scan_of(step), {"all": []}, XS)
    assert "Started from what it adds, it fails as well" in text


def test_a_step_that_raises_once_it_has_made_something_is_refused():
    def f(c, x):
        if "made" in c:
            raise ValueError("made twice")
        c["made"] = ab.Param(ab.hoist(jnp.zeros, 2))
        return c, x

    with pytest.raises(StructureError, match="ValueError: made twice") as info:
        ab.scan(f)({}, XS[:1])  # the loop in Python has no second step
    assert isinstance(info.value.__cause__, ValueError)


def test_an_error_later_on_leaves_everything():
    def step(m, x):
        if hasattr(m, "w"):
            raise ZeroDivisionError
        m.w = ab.Param(ab.hoist(normal, 0, x.shape))

    m = Lazy()
    with pytest.raises(ZeroDivisionError):
        scan_of(step)(m, XS)
    assert not hasattr(m, "w")


def test_a_deep_model_is_made_in_one_go():
    layers = [Lazy(i) for i in range(150)]

    def step(layers, x):
        return layers, sum(layer(x) for layer in layers)

    with jax.checking_leaks():
        _, found = ab.scan(step)(layers, XS)
    ws = jnp.stack([normal(i, X.shape) for i in range(150)])
    np.testing.assert_allclose(found, XS @ ws.sum(0), rtol=1e-4)
    np.testing.assert_allclose(jnp.stack([m.w.value for m in layers]), ws, rtol=1e-6)


def test_hoisted_values_may_be_used_by_a_function_that_captures_them():
    made = functools.cache(lambda: ab.hoist(normal, 0, (3,)))
    found = ab.scan(lambda c, x: (c, x @ made()))(0, XS)[1]
    np.testing.assert_allclose(found, XS @ normal(0, (3,)), rtol=1e-6)
    np.testing.assert_allclose(made() + 0, normal(0, (3,)))


def test_a_captured_layer_is_made_before_the_loop_too():
    m, other = Lazy(), Lazy()
    hidden = {"m": m}

    def step(c, x):
        return c + m(x), None

    def by_name(c, x):
        return c + hidden["m"](x), None

    for run in (step, by_name):
        for wrap in (lambda f: f, ab.jit):
            found = wrap(ab.scan(run))(0.0, XS)[0]
            np.testing.assert_allclose(found, in_python(other, XS), rtol=1e-6)
            assert_same(m, other)
