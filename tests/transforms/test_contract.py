"""One contract for all transforms: identity, structure, failures, nesting, methods, traces."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms
from tests.transforms.contract import ALL, EXACT, READING, STEADY


class Layer(ab.Module):
    def __init__(self, scale: float = 1.0) -> None:
        self.w = ab.Param(jnp.full(2, scale))
        self.n = ab.Variable(jnp.zeros((), jnp.int32))
        self.name = "layer"

    def bump(self, by: Any = 1.0) -> None:
        self.w.value = self.w + by
        self.n.value = self.n + 1


def over(names: Any) -> Any:
    return pytest.mark.parametrize("name", list(names))


WRITING = {**EXACT, **STEADY}


@over(WRITING)
def test_values_come_back_into_the_same_objects(name):
    layer = Layer()
    w = layer.w
    WRITING[name](lambda m: m.bump())(layer)
    assert layer.w is w
    assert w.value.tolist() == [2.0, 2.0]
    assert int(layer.n.value) == 1


@over(WRITING)
def test_one_object_twice_is_one_inside(name):
    def f(a, b, *, c):
        assert a is b
        assert a.w is c
        a.bump()
        b.bump()

    layer = Layer()
    WRITING[name](f)(layer, layer, c=layer.w)
    assert layer.w.value.tolist() == [3.0, 3.0]
    assert int(layer.n.value) == 2


@over(WRITING)
def test_aliases_and_cycles_are_seen_inside(name):
    def f(m):
        assert m.me is m
        assert m.items[0] is m.w
        assert m.items[1] is m.items
        m.items[0].value = m.w * 2

    layer = Layer()
    layer.me = layer
    layer.items = [layer.w]
    layer.items.append(layer.items)
    WRITING[name](f)(layer)
    assert layer.w.value.tolist() == [2.0, 2.0]
    assert layer.items[0] is layer.w
    assert layer.me is layer


class Registry:
    """No node: nobody can see what a function reaches through it."""

    def __init__(self) -> None:
        self.v, self.module = ab.Variable(jnp.array(1.0)), Layer()


@over(EXACT)
def test_what_is_found_by_its_use_is_the_callers_own(name):
    registry = Registry()

    def f(v, d, by):
        v.value = v.value + by
        registry.v.value = registry.v.value * 2  # the same, or not
        d["v"] = registry.v
        return registry.v, v.value + 0

    d: dict[str, Any] = {"v": None}
    other = ab.Variable(jnp.array(5.0))
    for v, expected in ((other, 6.0), (registry.v, 6.0), (other, 7.0)):
        found, value = EXACT[name](f)(v, d, 1.0)
        assert found is d["v"] is registry.v
        assert float(value) == expected
    assert float(registry.v.value) == 12.0
    assert float(other.value) == 7.0


@over(WRITING)
def test_what_is_found_by_its_use_is_as_it_was_after_a_failure(name):
    registry, layer = Registry(), Layer()

    def fail(m):
        m.bump()
        registry.v.value = registry.v.value + 1
        raise ZeroDivisionError

    def write(m):
        m.bump()
        registry.v.value = registry.v.value + 1
        registry.module.name = "another"

    for f, error in ((fail, ZeroDivisionError), (write, ab.errors.CapturedWriteError)):
        for _ in range(2):
            with pytest.raises(error):
                WRITING[name](f)(layer)
            assert float(registry.v.value) == 1.0
            assert registry.module.name == "layer"
            assert layer.w.value.tolist() == [1.0, 1.0]


@over(EXACT)
def test_returned_inputs_are_the_callers_own(name):
    layer = Layer()
    items = [layer.w]
    out = EXACT[name](lambda m, items: (m, {"w": m.w}, items))(layer, items)
    assert out[0] is layer
    assert out[1]["w"] is layer.w
    assert out[2] is items


@over(EXACT)
def test_structure_changes_as_in_the_plain_call(name):
    def f(a, b):
        a.w, b.w = b.w, a.w
        a.new = ab.BatchStat(a.w * 2)
        a.alias = a.new
        a.me = a
        del b.name
        b.items.append(a)
        b.text = "x"

    a, b = Layer(1.0), Layer(2.0)
    b.items = items = []
    a_w, b_w = a.w, b.w
    EXACT[name](f)(a, b)
    assert a.w is b_w
    assert b.w is a_w
    assert a.new is a.alias
    assert type(a.new) is ab.BatchStat
    assert a.new.value.tolist() == [4.0, 4.0]
    assert a.me is a
    assert list(vars(b)) == ["w", "n", "items", "text"]
    assert b.items is items
    assert items[0] is a


@over(EXACT)
def test_a_new_object_returned_twice_is_one(name):
    def f(m):
        new = Layer(3.0)
        return new, [new.w], m

    layer = Layer()
    new, (w,), same = EXACT[name](f)(layer)
    assert type(new) is Layer
    assert new.w is w
    assert w.value.tolist() == [3.0, 3.0]
    assert same is layer


@over(EXACT)
def test_detached_objects_keep_what_was_written(name):
    def f(m):
        old = m.w
        m.w = ab.Param(jnp.zeros(2))
        old.value = old * 5

    layer = Layer()
    w = layer.w
    EXACT[name](f)(layer)
    assert w.value.tolist() == [5.0, 5.0]
    assert layer.w is not w
    assert layer.w.value.tolist() == [0.0, 0.0]


@over(STEADY)
def test_loops_refuse_another_structure_by_path(name):
    def swap(a, b):
        a.w, b.w = b.w, a.w

    def add(a, b):
        a.new = 1

    def count(a, b):
        a.k += 1

    for f in (swap, add, count):
        a, b = Layer(1.0), Layer(2.0)
        a.k = 0
        a_w = a.w
        with pytest.raises(ab.errors.StructureError) as caught:
            STEADY[name](f)(a, b)
        assert len(str(caught.value)) < 4_000
        assert "contract.py:" in str(caught.value)  # the line of the body
        assert a.w is a_w
        assert list(vars(a)) == ["w", "n", "name", "k"]
        assert a.k == 0


@over(STEADY)
def test_loops_accept_a_structure_that_is_restored(name):
    def f(a, b):
        a.w, b.w = b.w, a.w
        a.w.value = a.w + 10
        a.w, b.w = b.w, a.w

    a, b = Layer(1.0), Layer(2.0)
    STEADY[name](f)(a, b)
    assert a.w.value.tolist() == [1.0, 1.0]
    assert b.w.value.tolist() == [12.0, 12.0]


@over(READING)
def test_functions_without_order_must_not_write(name):
    layer = Layer()
    w = layer.w.value
    with pytest.raises(ab.errors.AnabranchError):
        READING[name](lambda m: m.bump())(layer)
    assert layer.w.value is w


@over(ALL)
def test_failures_change_nothing(name):
    def f(m):
        if name not in READING:
            m.bump()
            m.items.append(1)
        raise RuntimeError("in the function")

    layer = Layer()
    layer.items = []
    w, n = layer.w.value, layer.n.value
    with pytest.raises(RuntimeError, match="in the function"):
        ALL[name](f)(layer)
    assert layer.w.value is w
    assert layer.n.value is n
    assert layer.items == []
    if name not in READING:
        ALL[name](lambda m: m.bump())(layer)
        assert int(layer.n.value) == 1


@over(WRITING)
def test_a_captured_object_is_written_as_by_the_plain_call(name):
    layer, other, plain_layer, plain = Layer(), Layer(), Layer(), Layer()

    def writes(other):
        def f(m):
            other.w.value = m.w * 2 + other.w
            m.w.value = other.w + 1

        return f

    run, expected = WRITING[name](writes(other)), writes(plain)
    for _ in range(2):
        run(layer)
        expected(plain_layer)
        assert other.w.value.tolist() == plain.w.value.tolist()
        assert layer.w.value.tolist() == plain_layer.w.value.tolist()
    other.w.value = plain.w.value = jnp.full(2, 100.0)
    run(layer)
    expected(plain_layer)
    assert other.w.value.tolist() == plain.w.value.tolist()


@over(READING)
def test_writing_a_captured_object_is_told_where_order_is_undefined(name):
    layer, other = Layer(), Layer()
    value = other.w.value

    def f(m):
        other.w.value = m.w * 2

    with pytest.raises(ab.errors.StructureError, match="order"):
        READING[name](f)(layer)
    assert other.w.value is value


@over(WRITING)
def test_an_object_that_is_captured_and_passed_is_one_object(name):
    layer = Layer()

    def f(m):
        assert m is layer
        layer.n.value += 1
        m.n.value += 1

    WRITING[name](f)(layer)
    assert int(layer.n.value) == 2


@over(EXACT)
def test_the_structure_of_a_captured_object_changes_as_by_the_plain_call(name):
    layer, other = Layer(), Layer()
    other.items, n = [], other.n

    def f(m):
        other.new = m
        other.items.append(other.n)
        del other.n

    EXACT[name](f)(layer)
    assert other.new is layer
    assert len(other.items) == 1
    assert other.items[0] is n
    assert not hasattr(other, "n")


@over(WRITING)
def test_a_variable_that_nobody_can_foresee_is_found_by_its_use(name):
    layer, hidden = Layer(), types.SimpleNamespace(layer=Layer())

    def f(m):
        hidden.layer.n.value += 1
        m.w.value = m.w * hidden.layer.w

    run = WRITING[name](f)
    for calls in (1, 2):
        run(layer)
        assert int(hidden.layer.n.value) == calls
    hidden.layer.w.value = jnp.full(2, 100.0)
    run(layer)
    assert layer.w.value.tolist() == [100.0] * 2
    assert int(hidden.layer.n.value) == 3


@over(ALL)
def test_other_writes_to_what_nobody_can_foresee_are_told(name):
    layer, hidden = Layer(), types.SimpleNamespace(layer=Layer())

    def f(m):
        hidden.layer.extra = 1

    with pytest.raises(ab.errors.CapturedWriteError, match=r"attribute 'extra' of Layer"):
        ALL[name](f)(layer)
    assert not hasattr(hidden.layer, "extra")

    def delete(m):
        del hidden.layer.n

    with pytest.raises(ab.errors.CapturedWriteError, match=r"attribute 'n' of Layer"):
        ALL[name](delete)(layer)
    assert int(hidden.layer.n.value) == 0


@over(WRITING)
def test_an_escaped_twin_is_spent(name):
    kept: list[Any] = []
    layer = Layer()
    WRITING[name](lambda m: [kept.append(m)])(layer)
    assert kept[0] is not layer
    with pytest.raises(ab.errors.SpentTwinError, match="twin"):
        _ = kept[0].w


@over([name for name in WRITING if name != "pmap"])
def test_two_and_three_deep(name):
    def f(m):
        m.bump()

    layer, calls = Layer(), 0
    for outer in ("jit", "remat", "grad", "cond", "scan", "vmap"):
        WRITING[outer](WRITING[name](f))(layer)
        WRITING["jit"](WRITING[outer](WRITING[name](f)))(layer)
        calls += 2
        assert int(layer.n.value) == calls, outer
        assert layer.w.value.tolist() == [calls + 1.0] * 2, outer


def test_pmap_is_outermost():
    layer = Layer()
    for inner in ("jit", "remat", "grad", "cond", "scan", "vmap"):
        WRITING["pmap"](WRITING[inner](lambda m: m.bump()))(layer)
    assert int(layer.n.value) == 6


class Model(Layer):
    """A callable Module, with methods of the forms that loops want."""

    def __call__(self, x):
        self.bump(x)
        return x * 2.0

    def with_carry(self, carry, x):
        return carry, self(x)

    def with_index(self, i, x):
        self(x)
        return x

    def forward(self, x):
        return self(x), None

    def backward(self, residuals, ct):
        return (2.0 * ct,)

    def tangent(self, primals, tangents):
        return self(*primals), 2.0 * tangents[0]

    def small(self, x):
        return x < 2.5

    def grow(self, x):
        self(x)
        return x + 1.0


def _model_of(f: Any) -> Model:
    while not isinstance(f, Model):
        f = f.__self__ if hasattr(f, "__self__") else f.__wrapped__
    return f


def _with_rules(f: Any, kind: str) -> Any:
    wrapped, model = getattr(transforms, kind)(f), _model_of(f)
    if kind == "custom_vjp":
        wrapped.defvjp(model.forward, model.backward)
    else:
        wrapped.defjvp(model.tangent)
    return wrapped


ON_METHODS: dict[str, Any] = {
    "jit": lambda f: transforms.jit(f)(2.0),
    "vmap": lambda f: transforms.vmap(f, in_axes=None, out_axes=None, axis_size=2)(2.0),
    "pmap": lambda f: transforms.pmap(f, in_axes=None, out_axes=None, axis_size=2)(2.0),
    "shard_map": lambda f: EXACT["shard_map"](f)(2.0),
    "grad": lambda f: transforms.grad(f)(2.0),
    "value_and_grad": lambda f: transforms.value_and_grad(f)(2.0),
    "vjp": lambda f: transforms.vjp(f, 2.0),
    "jvp": lambda f: transforms.jvp(f, (2.0,), (1.0,)),
    "linearize": lambda f: transforms.linearize(f, 2.0),
    "jacfwd": lambda f: transforms.jacfwd(f)(2.0),
    "jacrev": lambda f: transforms.jacrev(f)(2.0),
    "hessian": lambda f: transforms.hessian(f)(2.0),
    "remat": lambda f: transforms.remat(f)(2.0),
    "cond": lambda f: transforms.cond(True, f, f, 2.0),
    "switch": lambda f: transforms.switch(1, [f, f], 2.0),
    "custom_vjp": lambda f: _with_rules(f, "custom_vjp")(2.0),
    "custom_jvp": lambda f: _with_rules(f, "custom_jvp")(2.0),
    "checkify": lambda f: transforms.checkify(f)(2.0),
    "lift": lambda f: transforms.lift(jax.named_call)(f)(2.0),
}
LOOPS_ON_METHODS: dict[str, Any] = {
    "scan": lambda m: transforms.scan(m.with_carry)(0.0, jnp.array([2.0])),
    "fori_loop": lambda m: transforms.fori_loop(0, 1, m.with_index, 2.0),
    "while": lambda m: transforms.while_loop(m.small, m.grow, 2.0),
}


def test_every_transform_is_tried_on_methods():
    assert {*ON_METHODS, *LOOPS_ON_METHODS} == {name for name in WRITING if "without" not in name}


@over(ON_METHODS)
def test_methods_and_callable_modules(name):
    model = Model()
    ON_METHODS[name](model)
    ON_METHODS[name](model.__call__)
    assert model.w.value.tolist() == [5.0, 5.0]
    assert int(model.n.value) == 2


@over(LOOPS_ON_METHODS)
def test_methods_as_bodies_of_loops(name):
    model = Model()
    LOOPS_ON_METHODS[name](model)
    assert model.w.value.tolist() == [3.0, 3.0]
    assert int(model.n.value) == 1


@over(EXACT)
def test_keyword_only_arguments_and_defaults(name):
    def f(m, by=2.0, *, times=3.0, flag):
        m.bump(by * times)
        return flag

    layer = Layer()
    EXACT[name](f)(layer, flag=layer.w)
    EXACT[name](f)(layer, 1.0, flag=None, times=4.0)
    assert layer.w.value.tolist() == [11.0, 11.0]


@pytest.mark.parametrize("name", ["jit", "remat", "scan", "fori_loop", "while", "cond", "switch"])
def test_what_jax_caches_is_traced_once(name):
    traces: list[int] = []

    def body(m):
        traces.append(1)
        m.bump()

    def step(i, m):
        body(m)
        return m

    def other(m):
        m.bump(2.0)

    scanned = transforms.scan(
        lambda c, m: (c, body(m)), in_axes=(ab.Carry, None), out_axes=(ab.Carry, None), length=2
    )
    run = {
        "jit": transforms.jit(body),
        "remat": transforms.remat(body),
        "scan": lambda m: scanned(0, m),
        "fori_loop": lambda m: transforms.fori_loop(0, 2, step, m),
        "while": lambda m: transforms.while_loop(_small, _body_of(step), m),
        "cond": lambda m: transforms.cond(True, body, other, m),
        "switch": lambda m: transforms.switch(0, [body, other], m),
    }[name]
    for _ in range(4):
        layer = Layer()
        run(layer)
        assert int(layer.n.value) in (1, 2)
    assert len(traces) == 1


def _small(m: Layer) -> Any:
    return m.n.value < 2


_BODIES: dict[Any, Any] = {}


def _body_of(step: Any) -> Any:
    return _BODIES.setdefault(step, lambda m: step(0, m))


@over(WRITING)
def test_models_are_collected(name):
    layer = Layer()
    layer.me = layer
    wrapped = WRITING[name](lambda m: m.bump())
    wrapped(layer)
    ref = weakref.ref(layer)
    del layer
    gc.collect()
    assert ref() is None


@over(EXACT)
def test_what_is_only_read_stays_the_same_array(name):
    layer = Layer()
    layer.table = jnp.arange(3.0)
    arrays = [layer.w.value, layer.n.value, layer.table]
    total = EXACT[name](lambda m: m.w.value.sum() + m.table.sum())(layer)
    assert float(jax.tree.leaves(total)[0].reshape(-1)[0]) == 5.0
    now = [layer.w.value, layer.n.value, layer.table]
    assert all(a is b for a, b in zip(arrays, now, strict=True))


@over([name for name in ON_METHODS if name != "pmap"])
def test_transformed_methods_are_transformed_again(name):
    """What a transformed method holds is split, as what a method holds: no read is stale."""
    model = Model()
    inner = transforms.jit(model.__call__)
    for call in range(1, 3):
        ON_METHODS[name](inner)
        ON_METHODS[name](transforms.remat(model))
        assert int(model.n.value) == 2 * call
        assert model.w.value.tolist() == [1.0 + 4.0 * call] * 2
        model.w.value = model.w.value * 1.0
