"""Arguments that hang on a Module which is passed, too, and arguments that are passed twice."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from tests.transforms.plan_worlds import Point, Walks, look, same


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.arange(2.0))
        self.rows = [jnp.ones(2), {"k": jnp.zeros(2)}]


class Net(ab.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.count = ab.Variable(jnp.array(0.0))
        self.table = {"a": ab.Variable(jnp.ones(2)), "b": jnp.ones(2)}
        self.point = Point(jnp.ones(2), [jnp.ones(1)])


def step(*args: Any) -> Any:
    """Write every argument, and say what is seen."""
    for i, x in enumerate(args):
        if isinstance(x, ab.Variable):
            x.value = (2 * x.value + i + 1) % 61
        elif isinstance(x, Net):
            x.count.value = (x.count.value + i + 1) % 61
            x.table["b"] = (x.table["b"] + i) % 61
        elif isinstance(x, dict):
            x.update({k: (v + 3) % 61 for k, v in x.items() if isinstance(v, jax.Array)})
        elif isinstance(x, Point):
            x.x = (x.x + i + 1) % 61
        elif isinstance(x, list):
            for child in x:
                step(child)
    return look(*args)


FORMS: dict[str, Callable[[Net, Net], tuple[Any, ...]]] = {
    "a Variable after": lambda n, _: (n, n.count),
    "a Variable before": lambda n, _: (n.count, n),
    "a Variable between": lambda n, _: (n.layers[0].w, jnp.ones(2), n),
    "parts before": lambda n, _: (n.count, n.layers, n.point, jnp.ones(2), n),
    "all Variables": lambda n, _: (n, [layer.w for layer in n.layers], n.count),
    "many Variables": lambda n, _: (n, [n.layers[i % 2].w for i in range(12)]),
    "a list": lambda n, _: (n, n.layers),
    "a list before": lambda n, _: (n.layers, n),
    "a list of arrays": lambda n, _: (n, n.layers[0].rows, jnp.ones(2)),
    "a list that holds another": lambda n, _: (n, [n.layers[0].rows, n.layers[0].rows[1]]),
    "a dict": lambda n, _: (n, jnp.ones(2), n.table),
    "a dict, and what is in it": lambda n, _: (n, n.table, n.table["a"]),
    "a dataclass": lambda n, _: (n, n.point, n.point.y),
    "of two Modules": lambda n, m: (n, m, m.count, n.count),
    "of a part": lambda n, _: (n.layers[1], n.layers[1].w, n),
    "the same Variable": lambda n, _: (n.count, n.count),
    "the same dict": lambda n, _: (n.table, jnp.ones(2), n.table),
    "the same, and what is in it": lambda n, _: (n.table, n.table["a"], n.table),
    "in a pytree": lambda n, _: ({"net": n}, (n.count, [n.table])),
    "nothing": lambda n, m: (n, m.count),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_shared_argument_is_one_object(form, monkeypatch):
    walks = Walks(monkeypatch)
    jitted = ab.jit(step)
    ours, plain = (Net(), Net()), (Net(), Net())
    for _ in range(7):
        args, expected = FORMS[form](*ours), FORMS[form](*plain)
        walked = walks.of(jitted, *args)
        step(*expected)
        assert same(look(*ours), look(*plain))
    assert walked == 0
    assert jitted._followers


@pytest.mark.parametrize("one_function", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_calls_in_turn_are_not_walked(form, one_function, monkeypatch):
    """As a generator and a discriminator are trained: they share a Module, and differ in others."""
    walks = Walks(monkeypatch)
    first = ab.jit(step)
    second = first if one_function else ab.jit(functools.partial(step))
    net, layer, others = Net(), Layer(), (Net(), Net(), Net())
    walked = 0
    for _ in range(7):
        walked = walks.of(first, *FORMS[form](net, others[0]), layer)
        walked += walks.of(second, *FORMS[form](net, others[1]), layer)
        walked += walks.of(second, others[2], net)
    assert walked == 0


WRITES: tuple[Callable[[Net, Net], None], ...] = (
    lambda n, m: setattr(n, "count", ab.Variable(jnp.array(5.0))),
    lambda n, m: setattr(n, "count", m.count),
    lambda n, m: setattr(n.count, "value", jnp.array(7.0)),
    lambda n, m: setattr(m, "count", ab.Variable(jnp.array(0.0))),
    lambda n, m: setattr(n, "layers", [*n.layers]),
    lambda n, m: n.layers.reverse(),
    lambda n, m: n.layers.__setitem__(0, m.layers[0]),
    lambda n, m: n.layers.__setitem__(0, Layer()),
    lambda n, m: setattr(n.layers[0], "w", n.layers[1].w),
    lambda n, m: setattr(n.layers[0], "w", ab.Param(jnp.ones(2))),
    lambda n, m: setattr(n, "table", {"a": ab.Variable(jnp.ones(2)), "b": jnp.ones(2)}),
    lambda n, m: setattr(n, "table", m.table),
    lambda n, m: n.table.update(a=n.count),
    lambda n, m: n.table.update(a=ab.Variable(jnp.ones(2))),
    lambda n, m: setattr(n, "point", Point(jnp.ones(2), n.layers[0].rows)),
    lambda n, m: setattr(n.point, "y", [jnp.ones(1)]),
    lambda n, m: n.layers[0].rows.__setitem__(1, {"k": jnp.ones(2)}),
)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_shared_may_change_between_calls(seed):
    rng = random.Random(seed)
    jitted = ab.jit(step)
    ours, plain = (Net(), Net()), (Net(), Net())
    history: list[Any] = []
    for _ in range(25):
        forms = rng.sample([*FORMS], 2)
        for _ in range(rng.randrange(1, 5)):
            for form in forms:
                history.append(form)
                found = jitted(*FORMS[form](*ours))
                assert same(found, step(*FORMS[form](*plain))), history
                assert same(look(*ours), look(*plain)), history
        at, turn = rng.randrange(len(WRITES)), rng.choice((1, -1))
        history.append((at, turn))
        for nets in (ours, plain):
            WRITES[at](*nets[::turn])


def test_a_shared_argument_may_be_another_object_in_the_next_call():
    """It looks the same, and is another one: only identity tells."""

    def write(net: Net, count: Any, rows: Any) -> Any:
        count.value += 1
        return jnp.asarray((count is net.count) + 2 * (rows is net.layers[0].rows))

    jitted, net = ab.jit(write), Net()
    rows = net.layers[0].rows
    like = [rows[0], {"k": rows[1]["k"]}]
    for i in range(4):
        assert int(jitted(net, net.count, rows)) == 3
        other = ab.Variable(jnp.array(0.0))
        assert int(jitted(net, other, rows)) == 2
        assert float(other.value) == 1.0
        assert int(jitted(net, net.count, like)) == 1
        assert int(jitted(net, other, like)) == 0
        assert float(net.count.value) == 2.0 * (i + 1)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("form", ["a list", "a list before", "nothing", "all Variables"])
def test_what_a_list_has_lost_is_freed_at_the_next_call(form):
    jitted = ab.jit(step)
    net, other = Net(), Net()
    gone: list[weakref.ref[Any]] = []
    for i in range(6):
        for _ in range(4):
            jitted(*FORMS[form](net, other))
        gone.append(weakref.ref(net.layers[-1]))
        if i % 2:
            net.layers[-1] = Layer()
        else:
            net.layers.pop()
            net.layers.append(Layer())
        jitted(*FORMS[form](net, other))
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
