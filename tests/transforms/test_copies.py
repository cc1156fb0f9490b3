"""Copies and pickles of transformed functions, and of objects that hold them."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab


class Stepper(ab.Module):
    def __init__(self):
        # not weakly typed: jax 0.10 takes others for weak when such an array was pickled
        self.n = ab.Variable(jnp.zeros(()))
        self.plain = self.step
        self.jit = ab.jit(self.step)
        self.twice = ab.jit(ab.remat(self.step))
        self.vmap = ab.vmap(self.step, in_axes=0)
        self.grad = ab.grad(self.step)
        self.scan = ab.scan(self.fold)
        self.lift = ab.lift(jax.jit)(self.step)
        self.split = ab.split_rngs(self.draw, splits=2)
        self.bound = self.method

    def step(self, x):
        self.n.value += 1
        return x * 2

    def fold(self, carry, x):
        self.n.value += 1
        return carry, x

    def draw(self, rngs):
        self.n.value += 1

    @ab.jit
    def method(self, x):
        self.n.value += 1
        return x


CALLS = {
    "plain": lambda f: f(1.0),
    "jit": lambda f: f(1.0),
    "twice": lambda f: f(1.0),
    "vmap": lambda f: f(jnp.ones(2)),
    "grad": lambda f: f(1.0),
    "scan": lambda f: f(0.0, jnp.ones(1)),
    "lift": lambda f: f(1.0),
    "split": lambda f: f(ab.Rngs(0)),
    "bound": lambda f: f(1.0),
}


@ab.jit
def count(variable):
    variable.value += jnp.array(1)  # reads a global, as functions do
    return variable


def multiply(a, b):
    return a * b


@ab.custom_vjp
def double(x):
    return x * 2


def through_pickle(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, ab.clone])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_copy_of_an_object_calls_transformed_methods_of_the_copy(copied, used, name):
    original = Stepper()
    if used:
        for _ in range(2):
            for each, call in CALLS.items():
                call(getattr(original, each))
    other = copied(original)
    before = float(original.n)
    for _ in range(2):
        CALLS[name](getattr(other, name))
    assert float(original.n) == before
    assert float(other.n) == before + 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
@pytest.mark.parametrize("transform", [ab.jit, ab.vmap, ab.remat, ab.lift(jax.jit)])
def test_a_copy_of_a_transformed_function_is_another_one_that_does_the_same(copied, transform):
    function = transform(functools.partial(multiply, 2.0))
    x = jnp.arange(3.0)
    function(x)
    other = copied(function)
    assert other is not function
    assert other(x).tolist() == function(x).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_what_is_found_by_its_name_is_not_copied(copied):
    assert copied(count) is count
    assert copied(Stepper.method) is Stepper.method


def test_a_copy_of_a_compiled_function_has_compiled_nothing():
    function = ab.jit(functools.partial(multiply, 2.0))
    function(1.0)
    other = copy.copy(function)
    assert len(function.recent_traces()) == 1
    assert other.recent_traces() == []


def test_functions_with_rules_can_be_copied():
    double.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 10,))
    other = copy.deepcopy(double)
    assert float(ab.grad(other)(1.0)) == 10.0
