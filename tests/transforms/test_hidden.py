"""What a function reaches in hidden ways may be something else in every call."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms

Place = tuple[Callable[[], Any], Callable[[Any], None]]
"""What reads a place, and what puts something there."""


class Layer(ab.Module):
    def __init__(self, scale: float) -> None:
        self.w = ab.Param(jnp.array(scale))
        self.n = ab.Variable(jnp.array(0.0))


def of_attribute(holder: Any) -> Place:
    return lambda: holder.model, lambda model: setattr(holder, "model", model)


def of_item(holder: Any, items: Any) -> Place:
    return lambda: holder.items["model"], lambda model: items.__setitem__("model", model)


def a_class() -> Place:
    return of_attribute(type("Holder", (), {}))


def a_function() -> Place:
    def holder() -> None: ...

    return of_attribute(holder)


def slots() -> Place:
    return of_attribute(type("Holder", (), {"__slots__": ("model",)})())


def a_context_variable() -> Place:
    var = contextvars.ContextVar[Any]("model")
    return var.get, lambda model: (var.set(model), None)[1]


def a_weak_reference() -> Place:
    holder = types.SimpleNamespace(model=None)
    return (
        lambda: holder.model(),  # noqa: PLW0108
        lambda model: setattr(holder, "model", weakref.ref(model)),
    )


def a_method_that_reads_a_variable() -> Place:
    model: Any = None

    class Registry:
        def find(self) -> Any:
            return model

    def put(new: Any) -> None:
        nonlocal model
        model = new

    registry = Registry()
    return lambda: registry.find(), put  # noqa: PLW0108 - what is captured is the registry


def a_property() -> Place:
    class Registry:
        _model: Any = None

        @property
        def model(self) -> Any:
            return type(self)._model

    registry = Registry()
    return lambda: registry.model, lambda model: setattr(Registry, "_model", model)


def a_subclass_of_dict() -> Place:
    class Items(dict[str, Any]):
        pass

    items = Items()
    return of_item(types.SimpleNamespace(items=items), items)


def a_dict_like() -> Place:
    items: Any = collections.UserDict()
    return of_item(types.SimpleNamespace(items=items), items)


def a_view() -> Place:
    items: dict[str, Any] = {}
    return of_item(types.SimpleNamespace(items=types.MappingProxyType(items)), items)


def a_cached_function() -> Place:
    model: Any = None

    @functools.lru_cache
    def find() -> Any:
        return model

    def put(new: Any) -> None:
        nonlocal model
        model = new
        find.cache_clear()

    return lambda: find(), put  # noqa: PLW0108


def two_namespaces() -> Place:
    """Both lead to the model, and it is replaced in one of them."""
    one, other = types.SimpleNamespace(model=None), types.SimpleNamespace(model=None)
    both = types.SimpleNamespace(a=one, z=other)

    def put(model: Any) -> None:
        if one.model is None:
            one.model = model
        other.model = model

    return lambda: both.z.model, put


def nowhere() -> Place:
    """No search finds it."""
    module: Any = types.ModuleType("elusive")
    sys.modules["anabranch_tests_elusive"] = module
    _, put = of_attribute(module)
    return lambda: sys.modules["_".join(("anabranch", "tests", "elusive"))].model, put


PLACES: dict[str, Callable[[], Place]] = {
    "a namespace": lambda: of_attribute(types.SimpleNamespace()),
    "a module": lambda: of_attribute(types.ModuleType("settings")),
    "a thread-local": lambda: of_attribute(threading.local()),
    **{
        make.__name__.replace("_", " "): make
        for make in (
            a_class,
            a_function,
            slots,
            a_context_variable,
            a_weak_reference,
            a_method_that_reads_a_variable,
            a_property,
            a_subclass_of_dict,
            a_dict_like,
            a_view,
            a_cached_function,
            two_namespaces,
            nowhere,
        )
    },
}


def in_scan(function: Any) -> Any:
    scanned = transforms.scan(lambda _, x: (None, function(x)), in_axes=(ab.Carry, 0))
    return lambda x: scanned(None, jnp.asarray([x]))[1][0]


WRITES: tuple[Callable[[list[Layer]], None], ...] = (
    lambda layers: layers.reverse(),
    lambda layers: layers.__setitem__(0, Layer(3.0)),
    lambda layers: setattr(layers[0], "w", ab.Param(jnp.array(7.0))),
    lambda layers: setattr(layers[0], "n", ab.Variable(jnp.array(2.0))),
    lambda layers: setattr(layers[0], "n", layers[1].n),
    lambda layers: setattr(layers[0].w, "value", layers[0].w.value + 1),
    lambda layers: (gc.collect(), None)[1],
)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("wrap", [transforms.jit, transforms.remat, in_scan])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_put_there_calls_do_what_plain_calls_do(place, wrap):
    def run(wrap: Any) -> list[Any]:
        rng = random.Random(0)
        get, put = PLACES[place]()

        def call(x: Any) -> Any:
            found = get()
            found.n.value = found.n.value * x + found.w.value
            return found.w.value * x - found.n.value

        wrapped = wrap(call)
        layers, seen = [Layer(1.0), Layer(2.0)], []
        for _ in range(12):
            rng.choice(WRITES)(layers)
            put(layers[0])
            for _ in range(rng.randrange(1, 4)):
                seen.append(float(wrapped(2.0)))
                seen += [(float(layer.w.value), float(layer.n.value)) for layer in layers]
        return seen

    assert run(wrap) == run(lambda function: function)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_known_is_not_traced_again(place):
    get, put = PLACES[place]()
    traces = []

    @transforms.jit
    def call(x: Any) -> Any:
        traces.append(1)
        found = get()
        found.n.value += x
        return found.n.value * found.w.value

    layer = Layer(2.0)
    put(layer)
    for i in range(6):
        assert float(call(1.0)) == 2.0 * (i + 1)
        if i == 2:
            settled = len(traces)
    assert settled == (4 if place == "nowhere" else 2)
    assert len(traces) == settled + (3 if place == "nowhere" else 0)  # each call has to look


def test_a_variable_that_is_replaced_keeps_its_place_among_the_inputs():
    """Two of one kind and shape: a trace for one order must not serve the other one."""
    layer = Layer(1.0)
    layer.n = ab.Param(jnp.array(100.0))
    hidden = types.SimpleNamespace(layer=layer)

    @transforms.jit
    def call(x: Any) -> Any:
        return hidden.layer.w.value * x + hidden.layer.n.value

    assert [float(call(7.0)) for _ in range(3)] == [107.0] * 3
    layer.w = ab.Param(jnp.array(5.0))
    assert [float(call(7.0)) for _ in range(3)] == [135.0] * 3
    layer.w, layer.n = layer.n, layer.w
    assert [float(call(7.0)) for _ in range(3)] == [705.0] * 3


def test_what_is_no_longer_hidden_is_freed():
    hidden = types.SimpleNamespace(layer=Layer(1.0))
    call = transforms.jit(lambda x: hidden.layer.w.value * x)
    gone = []
    for _ in range(5):
        for _ in range(3):
            call(1.0)
        gone.append(weakref.ref(hidden.layer))
        hidden.layer = Layer(2.0)
    call(1.0)
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
