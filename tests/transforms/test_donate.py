"""Donation by filter, of what is written, and with plans: `donate=`; see C23."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch.errors import DeletedArrayError, FilterError


class Net(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.ones(3))
        self.b = ab.Param(jnp.zeros(3))
        self.mean = ab.BatchStat(jnp.zeros(3))
        self.frozen = ab.Param(jnp.full(3, 5.0), tag="frozen")
        self.table = jnp.arange(3.0)


def step(net, x):
    net.w.value = net.w + x * net.frozen
    net.mean.value = 0.5 * net.mean + net.w
    net.table = net.table + 1
    return x * 2


NAMES = ("w", "b", "mean", "frozen", "table")


def arrays(net):
    return {n: getattr(net, n).value if n != "table" else net.table for n in NAMES}


def deleted(before):
    return {name for name, array in before.items() if array.is_deleted()}


@pytest.mark.parametrize(
    ("donate", "expected"),
    [
        ("written", {"w", "mean", "table"}),
        (ab.Param, {"w"}),
        (ab.BatchStat, {"mean"}),
        (ab.Any(ab.BatchStat, ab.PathContains("table")), {"mean", "table"}),
        (lambda path, variable: path == ("w",), {"w"}),
        (..., {"w", "mean", "table"}),
        ("frozen", set()),
    ],
)
def test_exactly_what_is_selected_and_written_is_donated(donate, expected):
    jitted, plain, net, other = ab.jit(step, donate=donate), ab.jit(step), Net(), Net()
    for _ in range(5):  # walked, by a plan, by a follower
        before, x = arrays(net), jnp.full(3, 2.0)
        assert jitted(net, x).tolist() == plain(other, jnp.full(3, 2.0)).tolist()
        assert deleted(before) == expected
        assert not x.is_deleted()
        assert {n: a.tolist() for n, a in arrays(net).items()} == {
            n: a.tolist() for n, a in arrays(other).items()
        }


def test_a_filter_that_matches_nothing_says_what_is_there():
    with pytest.raises(FilterError, match=r"(?s)donate.*BatchStat.*Param"):
        ab.jit(step, donate=ab.Cache)(Net(), jnp.ones(3))


def test_two_variables_with_one_buffer_and_a_snapshot():
    jitted = ab.jit(step, donate="written")
    net = Net()
    net.b.value = net.w.value
    before = ab.state(net)
    jitted(net, jnp.ones(3))
    assert net.b.value.tolist() == [1.0] * 3
    assert net.w.value.tolist() == [6.0] * 3
    assert before["b"][()].tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="deleted"):
        _ = before["mean"][()] + 1


def test_together_with_argnums():
    jitted, net, x = ab.jit(step, donate=ab.BatchStat, donate_argnums=1), Net(), jnp.ones(3)
    before = arrays(net)
    jitted(net, x)
    assert deleted(before) == {"mean"}
    assert x.is_deleted()


def test_other_shapes_and_lowered_calls():
    jitted = ab.jit(step, donate="written")
    for shape in ((3,), (1,), (3,)):
        net = Net()
        net.mean.value = jnp.zeros(3)
        before = arrays(net)
        jitted(net, jnp.ones(shape))
        assert deleted(before) == {"w", "mean", "table"}
    net = Net()
    compiled = jitted.lower(net, jnp.ones(3)).compile()
    before = arrays(net)
    compiled(net, jnp.ones(3))
    assert deleted(before) == {"w", "mean", "table"}
    assert net.w.value.tolist() == [6.0] * 3


def test_a_deep_copy_survives():
    """C23: a teacher, the best model so far."""
    jitted, net = ab.jit(step, donate="written"), Net()
    before, snapshot = copy.deepcopy(net), copy.deepcopy(ab.state(net))
    expected = {name: array.tolist() for name, array in arrays(net).items()}
    for _ in range(3):
        jitted(net, jnp.ones(3))
    assert {name: array.tolist() for name, array in arrays(before).items()} == expected
    assert not any(array.is_deleted() for array in snapshot.leaves)


@pytest.mark.parametrize("calls", [0, 1, 5], ids=["walked", "by the plan", "by its follower"])
def test_what_was_donated_elsewhere_is_named(calls):
    """C23: the error is ours, and names a path."""
    donating, reading = ab.jit(step, donate="written"), ab.jit(lambda m, x: m.w.value * x)
    x = jnp.ones(3)
    for jitted in (donating, reading):
        net, other = Net(), Net()
        for _ in range(calls):
            jitted(other, x)
        other.w.value = net.w.value
        held = other.mean.value
        donating(net, x)
        with pytest.raises(
            DeletedArrayError, match=r"args\[0\]\['w'\].*float32.*donated"
        ) as caught:
            jitted(other, x)
        assert isinstance(caught.value, RuntimeError)
        assert other.mean.value is held
        other.w.value = jnp.ones(3)
        jitted(other, x)
