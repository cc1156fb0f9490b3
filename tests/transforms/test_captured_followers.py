"""Followers of functions that capture objects; static arguments of all sorts; results."""

from __future__ import annotations

import enum
import functools
import gc
import random
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from tests.transforms.test_followers import WRITES, Net, check, followed

SHARED: Any = None


def run(net, x):
    net.n.value += 1
    for layer in net.layers:
        x = x * layer.w + layer.b + layer.rate
        layer.b.value = layer.b + 1
    return x.sum()


class Callable(Net):
    def __call__(self, x):
        return run(self, x)

    def run(self, x):
        return run(self, x)


def of_closure(net):
    return lambda x: run(net, x)


def of_default(net):
    def call(x, own=net):
        return run(own, x)

    return call


def of_helper(net):
    def helper(x):
        return run(net, x)

    return lambda x: helper(x)  # noqa: PLW0108 - one function more


def of_global(net):
    global SHARED
    SHARED = net
    return lambda x: run(SHARED, x)


CAPTURES = {
    "a closure": of_closure,
    "a default": of_default,
    "a helper": of_helper,
    "a global": of_global,
    "a method": lambda net: net.run,
    "a partial": lambda net: functools.partial(run, net),
    "a partial by keyword": lambda net: functools.partial(lambda x, net: run(net, x), net=net),
    "a callable object": lambda net: net,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_write_to_what_a_function_captures_is_seen(capture, write):
    ours, plain = Callable(), Callable()
    jitted = ab.jit(CAPTURES[capture](ours))
    for _ in range(4):
        np.testing.assert_allclose(jitted(2.0), run(plain, 2.0))
    assert followed(jitted)
    for _ in range(2):
        WRITES[write](ours)
        WRITES[write](plain)
        check(lambda _, x: jitted(x), run, ours, plain, 3.0)


def test_an_object_that_comes_into_a_captured_container_is_seen():
    """Other values there are constants, as they are to JAX."""
    config: dict[str, Any] = {"scale": 2.0, "names": ["a"]}

    def call(net, x):
        net.n.value += 1
        return x * config["scale"] + config.get("own", 0.0)

    net, jitted = Net(), ab.jit(call)
    steps = [
        (lambda: None, 4.0),
        (lambda: config.update(own=ab.Param(jnp.array(7.0))), 11.0),
        (lambda: setattr(config["own"], "value", jnp.array(9.0)), 13.0),
        (lambda: config.update(own=ab.Param(jnp.array(1.0))), 5.0),
        (lambda: config.pop("own"), 4.0),
        (lambda: config["names"].append(ab.Param(jnp.array(1.0))), 4.0),
    ]
    for i, (write, expected) in enumerate(steps):
        write()
        for _ in range(4):
            assert float(jitted(net, 2.0)) == expected, i
        assert int(net.n) == 4 * (i + 1)
        assert i or followed(jitted)


def test_captured_variables():
    first, second = ab.Variable(jnp.array(1.0)), ab.Param(jnp.array(2.0), tag="x")

    def call(x):
        first.value = first + x
        return first * second

    jitted = ab.jit(call)
    for i in range(4):
        assert float(jitted(1.0)) == 2.0 * (2 + i)
    assert followed(jitted)
    second.value = jnp.array(3.0)
    assert float(jitted(1.0)) == 18.0
    first.value = 2
    assert float(jitted(1.0)) == 9.0
    second.set_metadata(tag="y")
    assert float(jitted(1.0)) == 12.0


def test_a_captured_object_that_is_an_argument_too():
    net = Net()
    jitted = ab.jit(lambda other, x: (other is net, run(net, x)))
    for _ in range(4):
        assert jitted(net, 1.0)[0] is True
    other = Net()
    for _ in range(4):
        assert jitted(other, 1.0)[0] is False
    assert followed(jitted)
    assert jitted(net, 1.0)[0] is True
    assert int(net.n) == 9


def test_what_is_captured_instead_is_seen_and_the_other_is_freed():
    net: Any = Net()
    net.layers.append(net)  # no cycle for long: the list goes with the rest
    del net.layers[-1]

    def call(x):
        return run(net, x)

    jitted = ab.jit(call)
    for _ in range(4):
        jitted(1.0)
    assert followed(jitted)
    gone = [weakref.ref(net), weakref.ref(net.layers[0]), weakref.ref(net.n)]
    net, plain = Net(), Net()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    for _ in range(4):
        np.testing.assert_allclose(jitted(1.0), run(plain, 1.0))
    assert int(net.n) == 4


def test_the_function_and_the_model_go_together():
    net = Callable()
    refs = [weakref.ref(net), weakref.ref(net.n)]
    for capture in CAPTURES.values():
        if capture is not of_global:
            jitted = ab.jit(capture(net))
            for _ in range(4):
                jitted(1.0)
            assert followed(jitted)
    del net, jitted
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


STATICS = [
    (Mode.TRAIN, Mode.EVAL),
    (jnp.float32, jnp.int32),
    (np.dtype("float32"), np.dtype("int32")),
    (Net, Callable),
    (jnp.tanh, jnp.sin),
    (jax.nn.relu, jax.nn.gelu),
    (len, repr),
    (0.5, 1.5),
    ("a", "b"),
]


@pytest.mark.parametrize("one, other", STATICS, ids=[str(i) for i in range(len(STATICS))])
def test_static_arguments_are_told_apart(one, other):
    jitted = ab.jit(lambda net, mode, x: (mode, run(net, x)), static_argnums=1)
    net, plain = Net(), Net()
    for mode in [one] * 4 + [other] * 4 + [one, other]:
        found, x = jitted(net, mode, 1.0)
        assert found is mode or (found == mode and type(found) is float)
        np.testing.assert_allclose(x, run(plain, 1.0))
    assert followed(jitted)


def test_static_values_beside_arrays_are_told_apart():
    jitted = ab.jit(lambda net, mode: (mode, run(net, 1.0)))
    net = Net()
    for one, other in STATICS:
        if not isinstance(one, float):  # a leaf
            for mode in [one] * 4 + [other] * 4 + [one, other]:
                assert jitted(net, mode)[0] is mode


def test_a_function_that_captures_an_object_later_is_seen():
    held: Any = 1.0

    def scale(x):
        return x * (held.n if isinstance(held, Net) else held)

    jitted = ab.jit(lambda net, f, x: f(x) + net.n)
    net = Net()
    for _ in range(4):
        assert float(jitted(net, scale, 2.0)) == 2.0
    held = Net()
    held.n.value += 5
    assert float(jitted(net, scale, 2.0)) == 10.0
    held.n.value += 1
    assert float(jitted(net, scale, 2.0)) == 12.0


def scaled(x, factor, *, shift=0.0):
    return x * factor + shift


def scaled_too(x, factor, *, shift=0.0):
    return x * factor - shift


PARTIALS = [
    functools.partial(scaled, factor=2.0),
    functools.partial(scaled, factor=3.0),
    functools.partial(scaled, factor=2.0, shift=1.0),
    functools.partial(scaled, shift=1.0, factor=2.0),
    functools.partial(scaled_too, factor=2.0, shift=1.0),
    functools.partial(scaled, factor=jnp.array(2.0)),
    functools.partial(scaled, factor=jnp.array(4.0)),
    functools.partial(scaled, factor=ab.Variable(jnp.array(5.0))),
    lambda x: x + 1,
]


@pytest.mark.parametrize("seed", range(4))
def test_functions_as_arguments_are_told_apart(seed):
    rng = random.Random(seed)
    net, plain = Callable(), Callable()
    others = Callable(), Callable()
    jitted = ab.jit(lambda net, f, x: run(net, f(x)))
    for _ in range(12):
        pairs = [*zip(PARTIALS, PARTIALS, strict=True), (others[0].run, others[1].run)]
        pairs += [(net.run, plain.run)]
        ours, theirs = rng.choice(pairs)
        for _ in range(rng.choice([1, 4])):
            np.testing.assert_allclose(jitted(net, ours, 2.0), run(plain, theirs(2.0)), rtol=1e-5)
    assert followed(jitted)
    for a, b in ((net, plain), others):
        assert int(a.n) == int(b.n)


def test_a_partial_of_an_argument_holds_it():
    net = Net()
    jitted = ab.jit(lambda net, f: (f.args[0] is net, f()))
    for _ in range(5):
        assert jitted(net, functools.partial(run, net, 1.0))[0] is True
        assert jitted(net, functools.partial(run, Net(), 1.0))[0] is False


def shared_list(x):
    both = [x]
    return {"a": both, "b": both}


RESULTS = {
    "a dict": lambda net, x: {"loss": x + 1, "n": net.n.value},
    "a list": lambda net, x: [x + 1, [x + 2, "text"], None],
    "nested": lambda net, x: {"a": (x, [x + 1, {}]), "b": (), "c": 3, "d": 2.5},
    "keys that are no strings": lambda net, x: {1: x, (2, "b"): x + 1},
    "a name with quotes": lambda net, x: {"it's": x, 'a "b" \\ {c}': x},
    "parts of the model": lambda net, x: (net, [net.layers[1], net.n], {"list": net.layers}),
    "one list twice": lambda net, x: shared_list(x),
    "new objects": lambda net, x: [ab.Param(x + 1), {"m": ab.Variable(x)}],
    "an argument": lambda net, x: (x, x, {"x": x}),
    "a static of the model": lambda net, x: [net.layers[0].rate, x],
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_of_the_plain_call(name):
    function = RESULTS[name]
    jitted = ab.jit(function)
    net, x = Net(), jnp.arange(3.0)
    first = jitted(net, x)
    for i in range(5):
        x = x + i
        net.n.value += 1
        found, expected = jitted(net, x), function(net, x)
        assert ab.graphdef((net, found)) == ab.graphdef((net, expected))
        leaves = [jax.tree.leaves(ab.state((net, r))) for r in (found, expected)]
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_array_equal(a, b)
        assert found is not first
    assert followed(jitted)
