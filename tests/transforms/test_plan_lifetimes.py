"""No plan keeps an object of the caller alive, and none outlives its function."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(2))


class Model(ab.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.count = ab.Variable(0)


def step(model: Model, *others: Any) -> Any:
    model.count.value = model.count + 1
    return model.layers[0].w.value


def plans_of(model: Model) -> list[Any]:
    return list(object.__getattribute__(model, "_ab_plans").values())


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_model_without_cycles_is_freed_at_once(no_gc):
    jitted = transforms.jit(step)
    model = Model()
    jitted(model)
    jitted(model)
    refs = [weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(model.count)]
    del model
    assert [ref() for ref in refs] == [None] * 3
    assert [*jitted._plans] == []


def test_nothing_is_alive_after_1_000_models(no_gc):
    jitted = transforms.jit(step)
    refs: list[Any] = []
    for _ in range(1000):
        model = Model()
        jitted(model)
        jitted(model)
        refs += [weakref.ref(model), weakref.ref(model.layers[1].w)]
    del model
    assert sum(ref() is not None for ref in refs) == 0
    assert [*jitted._plans] == []


def test_a_module_that_all_models_share_forgets_those_that_are_gone(no_gc):
    jitted, shared = transforms.jit(step), Layer()
    for _ in range(300):
        model = Model()
        model.layers[0] = shared
        jitted(model)
        jitted(model)
    assert len(object.__getattribute__(shared, "_ab_watchers")) < 10
    shared.extra = 1
    assert jitted(model).tolist() == [1.0, 1.0]


def test_models_in_cycles_are_collected():
    jitted = transforms.jit(step)
    refs: list[Any] = []
    for _ in range(20):
        model = Model()
        model.layers[0].up = model
        model.me = [model]
        jitted(model)
        jitted(model)
        refs.append(weakref.ref(model))
    del model
    gc.collect()
    assert sum(ref() is not None for ref in refs) == 0
    assert [*jitted._plans] == []


def test_either_of_two_roots_may_be_dropped_first():
    jitted = transforms.jit(step)
    for first in (0, 1):
        models = [Model(), Model()]
        jitted(*models)
        jitted(*models)
        refs = [weakref.ref(m) for m in models]
        assert len([*jitted._plans]) == 1
        del models[first]
        gc.collect()
        assert refs[first]() is None
        assert [*jitted._plans] == []
        assert plans_of(models[0]) == []
        jitted(models[0])
        del models
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


def test_a_function_is_dropped_while_its_model_lives(no_gc):
    model = Model()
    jitted = transforms.jit(step)
    jitted(model)
    assert len(plans_of(model)) == 1
    ref = weakref.ref(jitted)
    del jitted
    gc.collect()
    assert ref() is None
    assert plans_of(model) == []


def test_a_model_that_holds_the_function_is_collected():
    model = Model()
    model.jitted = transforms.jit(step)
    model.jitted(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_bound_method_is_collected_with_its_model():
    class Own(Model):
        def step(self):
            self.count.value = self.count + 1

    model = Own()
    jitted = transforms.jit(model.step)
    jitted()
    jitted()
    refs = [weakref.ref(model), weakref.ref(jitted)]
    del model, jitted
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_what_an_attribute_held_is_freed_at_once(no_gc):
    jitted = transforms.jit(lambda m, other: setattr(m, "other", other))
    model = Model()
    model.head = Layer()
    for _ in range(4):
        other = Layer()
        for _ in range(3):
            jitted(model, other)
        gone = [weakref.ref(other), weakref.ref(model.head)]
        model.other, model.head = None, Layer()
        del other
        assert [ref() for ref in gone] == [None, None]


def test_what_a_model_held_is_freed_at_the_next_walk():
    model = Model()
    jitted, other = transforms.jit(step), transforms.jit(step)
    jitted(model)
    other(model)
    ref = weakref.ref(model.layers[1].w)
    model.layers[1].w = ab.Param(jnp.zeros(2))
    jitted(model)
    gc.collect()
    assert ref() is None


def test_arguments_that_are_not_modules_are_not_kept(no_gc):
    jitted = transforms.jit(lambda model, d, v: v.value + d["x"])
    model, v = Model(), ab.Param(1.0)
    jitted(model, {"x": 1.0, "layer": Layer()}, v)
    ref = weakref.ref(v)
    del v
    assert ref() is None


def test_old_arrays_are_not_kept(no_gc):
    jitted = transforms.jit(step)
    model = Model()
    model.items = [jnp.ones(3), "text"]
    model.array = jnp.ones(3)
    jitted(model)
    jitted(model)
    refs = [weakref.ref(x) for x in (model.items[0], model.array, model.count.value)]
    model.items[0], model.array = jnp.zeros(3), jnp.zeros(3)
    jitted(model)
    assert [ref() for ref in refs] == [None] * 3


def test_copies_have_no_plans():
    model, jitted = Model(), transforms.jit(step)
    jitted(model)
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(AttributeError):
            plans_of(other)
        jitted(other)
        assert len(plans_of(other)) == 1


class TestRetraces:
    """C18."""

    def test_a_number_that_changes_at_every_step_is_told_once(self):
        model = Model()
        model.config = {"steps": 0}

        @transforms.jit
        def count(m):
            m.config["steps"] += 1

        with pytest.warns(
            ab.errors.RetraceWarning, match=r"args\[0\]\.config\['steps'\].*Variable"
        ):
            for _ in range(10):
                count(model)
        assert model.config["steps"] == 10

    def test_other_changes_are_not_told(self):
        jitted = transforms.jit(lambda m: m.count.value)
        model = Model()
        for i in range(8):
            model.mode = f"mode {i}"
            jitted(model)
            model.a, model.b = i, i
            jitted(model)
