"""What exists only during a trace must not be left in places that are no objects."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import CapturedWriteError
from tests.transforms.contract import ALL, READING


class Layer(ab.Module):
    last: Any = None

    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(2))

    def remember(self) -> None:
        type(self).last = self.w * 2

    @functools.cached_property
    def doubled(self) -> Any:
        return 2.0


class Plain:
    last: Any = None

    @classmethod
    def keep(cls, x: Any) -> None:
        cls.last = x


class Slotted:
    __slots__ = ("last",)


GLOBAL: Any = None
REGISTRY = types.SimpleNamespace(last=None)
MODULE = types.ModuleType("tests.made_up")
LOCAL = threading.local()
LOCAL.last = None
TRANSFORMED = transforms.jit(abs)


def to_global(x: Any) -> None:
    global GLOBAL
    GLOBAL = x


def to_itself(x: Any) -> None:
    to_itself.last = x  # type: ignore[attr-defined]


def to_instance(x: Any) -> None:
    REGISTRY.last = x


def to_new_attribute(x: Any) -> None:
    REGISTRY.fresh = x


def to_class(x: Any) -> None:
    Plain.last = x


def by_class_method(x: Any) -> None:
    Plain.keep(x)


def to_module(x: Any) -> None:
    MODULE.last = x  # type: ignore[attr-defined]


def to_thread(x: Any) -> None:
    LOCAL.last = x


def to_transformed(x: Any) -> None:
    TRANSFORMED.last = x


def everywhere() -> list[Any]:
    found = [GLOBAL, REGISTRY, Plain.last, Layer.last, vars(to_itself), vars(MODULE).get("last")]
    found += [LOCAL.last, getattr(TRANSFORMED, "last", None)]
    return [repr(x) for x in found]


PLACES: dict[str, tuple[Callable[[Any], None], str]] = {
    "global": (to_global, r"GLOBAL \(a global of tests.transforms.test_leaks\)"),
    "function": (to_itself, r"to_itself\.last"),
    "instance": (to_instance, r"REGISTRY\.last"),
    "new attribute": (to_new_attribute, r"REGISTRY\.fresh"),
    "class": (to_class, r"Plain\.last \(an attribute of the class\)"),
    "class method": (by_class_method, r"Plain\.last \(an attribute of the class\)"),
    "module": (to_module, r"MODULE\.last"),
    "thread": (to_thread, r"LOCAL\.last"),
    "transformed function": (to_transformed, r"TRANSFORMED\.last"),
}
VALUES: dict[str, Callable[[Layer], Any]] = {
    "twin": lambda m: m,
    "variable": lambda m: m.w,
    "in a tuple": lambda m: (1, {"w": m.w}),
    "bound method": lambda m: m.remember,
    "partial": lambda m: functools.partial(print, m),
    "new object": lambda m: [Layer(), m.w],
    "closure": lambda m: lambda: m.w,
    "instance": lambda m: types.SimpleNamespace(inner=m),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ALL)
def test_a_twin_is_refused_in_every_place_and_transform(name, place):
    put, text = PLACES[place]
    layer, before = Layer(), everywhere()
    with pytest.raises(CapturedWriteError, match=text):
        ALL[name](lambda m: [put(m)])(layer)
    assert everywhere() == before
    assert layer.w.value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", VALUES)
def test_whatever_reaches_inside_is_refused(value):
    last = None

    def f(m: Layer) -> None:
        nonlocal last
        m.w.value = m.w + 1
        last = VALUES[value](m)

    layer = Layer()
    with pytest.raises(CapturedWriteError, match=r"last \(a variable of test_whatever_reaches"):
        transforms.jit(f)(layer)
    assert last is None
    assert layer.w.value.tolist() == [1.0, 1.0]  # nothing was written


TRACED = [n for n in ALL if n not in ("lift", *READING) and "without jit" not in n]


@pytest.mark.parametrize("name", TRACED)
def test_a_tracer_is_refused(name):
    last: Any = 5

    def f(m: Layer) -> Any:
        nonlocal last
        last = m.w * 2

    def loss(x: Any) -> Any:
        nonlocal last
        last = x * 2
        return x * 3

    wrap = {"grad": transforms.grad, "jvp": lambda f: lambda x: transforms.jvp(f, (x,), (x,))}
    with pytest.raises(CapturedWriteError, match="last"):
        if name in wrap:  # those whose arguments are not all traced
            wrap[name](loss)(1.0)
        elif name in ("value_and_grad", "vjp", "linearize", "jacfwd", "jacrev", "hessian"):
            transform = getattr(transforms, name)
            by_call = name in ("vjp", "linearize")
            transform(loss, 1.0) if by_call else transform(loss)(1.0)
        elif name in ("vmap", "pmap"):
            getattr(transforms, name)(loss)(jnp.ones(2))
        else:
            ALL[name](f)(Layer())
    assert last == 5


@pytest.mark.parametrize("wrap", [transforms.vmap, transforms.jit, transforms.remat])
def test_an_object_that_is_made_inside_is_refused_whatever_it_holds(wrap):
    last = None

    class Helper:
        def make(self) -> None:
            nonlocal last
            last = Static()

    class Static(ab.Module):
        name = "static"

    helper = Helper()

    def f(x: Any) -> Any:
        helper.make()
        return x

    with pytest.raises(CapturedWriteError, match="last"):
        wrap(f)(jnp.ones(2))
    assert last is None


def test_an_object_from_outside_may_be_left_anywhere():
    layer, space = Layer(), types.SimpleNamespace(last=None, hidden=Layer())

    def f(x: Any) -> Any:
        space.last = space.hidden
        return x * layer.w

    transforms.jit(f)(1.0)
    assert space.last is space.hidden


def test_methods_of_arguments_are_looked_at():
    def f(m: Layer) -> None:
        m.remember()

    with pytest.raises(CapturedWriteError, match=r"Layer\.last"):
        transforms.jit(f)(Layer())
    with pytest.raises(CapturedWriteError, match=r"Layer\.last"):
        transforms.jit(Layer().remember)()
    assert Layer.last is None


def test_the_name_of_a_place_is_how_the_code_reaches_it():
    registry = types.SimpleNamespace(runs=[types.SimpleNamespace(best={"{loss}": Slotted()})])

    def f(x: Any) -> None:
        registry.runs[0].best["{loss}"].last = x

    with pytest.raises(CapturedWriteError, match=r"registry\.runs\[0\]\.best\['\{loss\}'\]\.last"):
        transforms.jit(f)(1.0)
    assert not hasattr(registry.runs[0].best["{loss}"], "last")


def test_a_function_that_fails_leaves_nothing():
    last: Any = None

    def f(x: Any) -> None:
        nonlocal last
        last = x
        raise KeyError

    with pytest.raises(KeyError):
        transforms.jit(f)(1.0)
    assert last is None


def test_a_function_that_is_run_again_for_what_it_uses_leaves_nothing():
    layer, last = Layer(), None
    hidden = types.SimpleNamespace(layer=layer)

    def f(x: Any) -> Any:
        nonlocal last
        before, last = last, hidden.layer.w * x
        return before

    with pytest.raises(CapturedWriteError, match="last"):
        transforms.jit(f)(1.0)
    assert last is None


def test_what_a_helper_leaves_is_found_around_all_transforms():
    last: Any = None

    def helper(x: Any) -> Any:
        nonlocal last
        last = x
        return x

    def inner(x: Any) -> Any:
        return transforms.vmap(lambda x: helper(x) + 1)(x)

    def outer(x: Any) -> Any:
        return transforms.grad(lambda x: inner(x).sum())(x)

    for _ in range(2):
        with pytest.raises(CapturedWriteError, match="last"):
            transforms.jit(outer)(jnp.ones(2))
        assert last is None


def test_inside_of_another_transform_the_inner_one_is_named():
    last: Any = None

    def inner(x: Any) -> Any:
        nonlocal last
        last = x
        return x

    def outer(x: Any) -> Any:
        transforms.vmap(inner)(x)
        return last

    with pytest.raises(CapturedWriteError, match=r"in vmap of .*\n.*in jit of"):
        transforms.jit(outer)(jnp.ones(2))
    assert last is None


def test_what_belongs_to_the_trace_around_may_stay_until_that_ends():
    last: Any = None

    def outer(x: Any) -> Any:
        nonlocal last

        def inner(carry: Any, y: Any) -> Any:
            nonlocal last
            last = x  # from outside of the loop
            return carry + y, None

        total, _ = transforms.scan(inner)(0.0, jnp.ones(3))
        kept, last = last, None
        return total * kept

    assert float(transforms.jit(outer)(2.0)) == 6.0
    assert float(transforms.jit(outer)(3.0)) == 9.0


def test_plain_values_are_left_as_they_always_were():
    count, shapes, seen = 0, None, []

    def f(m: Layer) -> None:
        nonlocal count, shapes
        count += 1
        shapes = {"w": m.w.shape, "kind": type(m)}
        seen.append(m)  # a list that holds no object
        REGISTRY.text = "traced"
        Plain.array = np.ones(2)

    transforms.jit(f)(Layer())
    assert (count, shapes) == (1, {"w": (2,), "kind": Layer})
    assert len(seen) == 1
    assert REGISTRY.text == "traced"
    assert Plain.array.tolist() == [1.0, 1.0]
    del REGISTRY.text, Plain.array


def test_what_is_put_back_by_the_function_itself_is_no_leak():
    scale: Any = 1.0

    def helper(x: Any) -> Any:
        return x * scale

    def f(w: Any) -> Any:
        nonlocal scale
        before, scale = scale, w
        try:
            return helper(2.0)
        finally:
            scale = before

    assert float(transforms.grad(f)(3.0)) == 2.0
    assert float(transforms.jit(f)(3.0)) == 6.0


def test_a_variable_that_held_an_object_takes_whatever_it_is_given():
    last: Any = Layer()

    def f(m: Layer) -> None:
        nonlocal last
        last = m.w * 2

    transforms.jit(f)(Layer())
    assert last.tolist() == [2.0, 2.0]


def test_an_attribute_that_another_thread_sets_meanwhile_is_left_alone():
    space = types.SimpleNamespace(last=None, other=None)

    def f(x: Any) -> None:
        thread = threading.Thread(target=lambda: setattr(space, "other", jnp.ones(2)))
        thread.start()
        thread.join()
        space.last = x

    with pytest.raises(CapturedWriteError, match=r"space\.last"):
        transforms.jit(f)(1.0)
    assert space.last is None
    assert space.other.tolist() == [1.0, 1.0]


def test_a_dataclass_that_nobody_can_foresee_keeps_no_tracer():
    @ab.node
    class State:
        def __init__(self) -> None:
            self.x = 1.0

    space = types.SimpleNamespace(state=State())

    def f(x: Any) -> None:
        space.state.x = x

    with pytest.raises(CapturedWriteError, match=r"space\.state\.x"):
        transforms.jit(f)(2.0)
    assert space.state.x == 1.0


def test_many_places_make_a_short_message():
    space = types.SimpleNamespace()

    def f(x: Any) -> None:
        for i in range(1000):
            setattr(space, f"a{i}", x)

    with pytest.raises(CapturedWriteError, match="and 995 more") as caught:
        transforms.jit(f)(1.0)
    assert len(str(caught.value)) < 1000
    assert not vars(space)


def test_functions_set_attributes_on_themselves_also_if_they_reach_objects():
    layer = Layer()

    def f(x: Any) -> Any:
        f.calls = getattr(f, "calls", 0) + 1
        return layer.w * x

    transforms.jit(f)(1.0)
    assert f.calls == 1
    assert jax.tree.leaves(vars(f)) == [1]
