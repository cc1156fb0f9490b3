"""`checkify`: errors are values, and writes come back as in the plain call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import anabranch as ab
from anabranch import transforms


class Stock(ab.Module):
    def __init__(self, left: int) -> None:
        self.left = ab.Variable(jnp.asarray(left))
        self.log = []

    def take(self, n, *, note="taken"):
        checkify.check(self.left.value >= n, "only {left} left", left=self.left.value)
        self.left.value = self.left - n
        self.log.append(note)
        return self.left.value


def test_equals_jax_on_the_split_function():
    def pure(left, n):
        checkify.check(left >= n, "only {left} left", left=left)
        return left - n

    stock = Stock(5)
    for n in (2, 9):
        theirs, _ = checkify.checkify(pure)(stock.left.value, n)
        ours, left = transforms.checkify(Stock.take)(stock, n)
        assert (ours.get() is None) == (theirs.get() is None)
        assert (ours.get() or "")[:11] == (theirs.get() or "")[:11]
        assert left is stock.left.value
    # the second write was made, as a value
    assert int(stock.left) == -6
    assert stock.log == ["taken", "taken"]
    with pytest.raises(checkify.JaxRuntimeError, match="only 3 left"):
        ours.throw()


def test_under_jit_with_state_and_one_trace():
    runs = []

    class Child(Stock):
        @transforms.jit
        @transforms.checkify
        def step(self, n):
            runs.append(1)
            return self.take(n, note="jit")

    stock = Child(5)
    error, left = stock.step(jnp.asarray(1))
    assert error.get() is None
    assert int(left) == int(stock.left) == 4
    assert stock.log == ["jit"]
    other = Child(1)
    assert other.step(jnp.asarray(3))[0].get().startswith("only 1 left")
    assert len(runs) == 1
    assert transforms.checkify(other.take)(1)[0].get().startswith("only -2 left")
    assert other.log == ["jit", "taken"]


def test_sets_of_errors():
    v = ab.Param(jnp.asarray(0.0))

    def divide(v):
        v.value = v / v
        return v.value

    error, _ = transforms.checkify(divide, errors=checkify.float_checks)(v)
    assert "division by zero" in error.get() or "nan" in error.get()
    error, _ = transforms.checkify(divide)(ab.Param(jnp.asarray(0.0)))
    assert error.get() is None


def test_the_object_can_be_left_as_it_was():
    @transforms.jit
    def step(stock, n):
        trial = ab.clone(stock)
        error, _ = transforms.checkify(Stock.take)(trial, n)
        ok = jnp.logical_not(jnp.any(jnp.stack(jax.tree.leaves(error)[:1])))
        stock.left.value = jnp.where(ok, trial.left.value, stock.left.value)
        return error

    stock = Stock(5)
    assert step(stock, 2).get() is None
    assert step(stock, 9).get() is not None
    assert int(stock.left) == 3


def test_python_errors_change_nothing():
    def fails(stock):
        stock.take(1)
        raise KeyError("no")

    stock = Stock(5)
    with pytest.raises(KeyError):
        transforms.checkify(fails)(stock)
    assert int(stock.left) == 5
    assert stock.log == []


def test_captured_objects_are_written():
    stock, plain = Stock(5), Stock(5)
    plain.take(2)
    transforms.checkify(lambda n: stock.take(n + 1))(1)
    assert int(stock.left) == int(plain.left) != 5


def test_constants_come_back_as_arrays_through_lanes_too():
    def f(items):
        items.append(jnp.array([-4]))

    items: list = []
    rule = ab.custom_jvp(f)
    rule.defjvp(lambda primals, tangents: (f(*primals), None))
    ab.vmap(lambda items, x: ab.checkify(rule)(items)[1], in_axes=(None, 0), out_axes=None)(
        items, jnp.ones(2)
    )
    assert isinstance(items[0], jax.Array)
