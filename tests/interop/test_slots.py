"""Many Variables of flax are read in memory: a change of one is seen, and no count is lost."""

from __future__ import annotations

import gc
import operator
import sys
import types
import weakref
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import anabranch as ab
from anabranch.graph._kind import Cell
from anabranch.interop import _layout
from anabranch.transforms import _words
from anabranch.transforms._slots import Slots, slots_of

COUNT = 60


class Own(nnx.Param[Any]):
    """A class with room for attributes, as most have."""


def some() -> list[Any]:
    kinds = (nnx.Param, nnx.BatchStat, Own)
    return [kinds[i % 3](jnp.array(i), tag=i) for i in range(COUNT)]


def slots_for(variables: list[Any]) -> Slots:
    slots = slots_of(_layout.CELL, variables)
    assert slots is not None
    return slots


def test_values_are_the_very_objects_and_their_counts_stay() -> None:
    variables = some()
    slots = slots_for(variables)
    held = [_layout.raw_value(variable) for variable in variables]
    before = [*map(sys.getrefcount, held)]
    for _ in range(5):
        found = slots.values.as_objects()
        assert [*map(id, found)] == [*map(id, held)]
        assert slots.are_same()
        del found
    assert [*map(sys.getrefcount, held)] == before


def test_values_are_read_anew_and_old_ones_let_go() -> None:
    variables = some()
    slots = slots_for(variables)
    gone = [weakref.ref(_layout.raw_value(variable)) for variable in variables]
    slots.values.as_objects()
    for i, variable in enumerate(variables):
        _layout.set_value(variable, jnp.array(-i))
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    assert [int(x) for x in slots.values.as_objects()] == [-i for i in range(COUNT)]
    assert slots.are_same()


def change_class(variable: Any) -> None:
    variable.__class__ = nnx.Cache


def change_metadata(variable: Any) -> None:
    variable.set_metadata(tag=-1)


def add_metadata(variable: Any) -> None:
    variable.set_metadata(more=None)


def replace_metadata(variable: Any) -> None:
    _layout.set_metadata(variable, dict(_layout.metadata_of(variable)))


def change_owner(variable: Any) -> None:
    _layout._set_trace_state(variable, nnx.tracers.TraceState())


CHANGES = [change_class, change_metadata, add_metadata, replace_metadata, change_owner]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, COUNT // 2, COUNT - 1])
def test_a_change_of_one_is_seen(change: Any, which: int) -> None:
    variables = some()
    slots = slots_for(variables)
    change(variables[which])
    assert not slots.are_same()
    assert not slots.are_same()


def test_metadata_that_were_put_back_are_the_same() -> None:
    variables = some()
    slots = slots_for(variables)
    metadata = _layout.metadata_of(variables[7])
    then = metadata["tag"]
    metadata["tag"] = "other"
    assert not slots.are_same()
    metadata["tag"] = then
    assert slots.are_same()


class Wide(nnx.Module):
    def __init__(self, count: int) -> None:
        self.items = nnx.List(some()[:count])

    def add(self) -> None:
        for variable in self.items:
            variable[...] += 1


@pytest.mark.parametrize("count", [COUNT, 10], ids=["many", "few"])
@pytest.mark.parametrize("absent", ["", "_slots.IS_READABLE", "_slots.ARE_TOLD"])
def test_a_compiled_call_sees_each_change(
    absent: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent:
        monkeypatch.setattr(f"anabranch.transforms.{absent}", False)
    if absent.endswith("ARE_TOLD"):
        monkeypatch.setattr("anabranch.transforms._versions.ARE_TOLD", False)
    model = Wide(count)
    tags: list[list[Any]] = []

    @ab.jit
    def step(model: Any) -> None:
        tags.append([(type(v).__name__, v.get_metadata().get("tag")) for v in model.items])
        model.add()

    for _ in range(5):
        step(model)
    assert len(tags) == 1
    for i, change in enumerate([change_class, change_metadata, add_metadata]):
        change(model.items[i + 3])
        for _ in range(5):
            step(model)
        assert len(tags) == i + 2
        assert tags[-1] == [(type(v).__name__, v.get_metadata().get("tag")) for v in model.items]
    model.items[9][...] = jnp.array(100)
    step(model)
    assert [int(v[...]) for v in model.items] == [101 if i == 9 else i + 21 for i in range(count)]


class Part(nnx.Module):
    def __init__(self, depth: int) -> None:
        self.param, self.mode, self.other = nnx.Param(jnp.array(0)), "a", 1
        if depth:
            self.parts = nnx.List([Part(depth - 1) for _ in range(3)])


class OtherPart(Part):
    """Of the same form."""


def parts_of(model: Any) -> list[Any]:
    found = [model]
    for part in found:
        found += getattr(part, "parts", ())
    return found


def described(model: Any) -> list[Any]:
    """Return what is to be seen of objects, but for values of Variables."""
    index: dict[int, int] = {}
    return [
        (
            type(part).__name__,
            type(part.mode).__name__,
            part.mode,
            index.setdefault(id(part.param), len(index)),
            [name for name in vars(part) if not name.startswith("_")],
        )
        for part in parts_of(model)
    ]


def share(part: Any) -> None:
    part.parts[0].param = part.parts[1].param


def put_again(part: Any) -> None:
    mode = part.mode
    del part.mode
    part.mode = mode


def replace_attributes(part: Any) -> None:
    held = {**vars(part), "mode": "d"}
    object.__setattr__(part, "__dict__", held)


AROUND: dict[str, Any] = {
    "another value": lambda part: setattr(part, "mode", "b"),
    "an equal one of another type": lambda part: setattr(part, "mode", True),
    "another value, behind the back of flax": lambda part: vars(part).update(mode="c"),
    "a new name": lambda part: setattr(part, "new", None),
    "one less": lambda part: delattr(part, "other"),
    "another order": put_again,
    "other attributes": replace_attributes,
    "another class": lambda part: setattr(part, "__class__", OtherPart),
    "another Variable": lambda part: setattr(part, "param", nnx.Param(jnp.array(5))),
    "a shared Variable": share,
    "one part less": lambda part: part.parts.pop(),
    "one part more": lambda part: part.parts.append(Part(0)),
    "parts in another order": lambda part: part.parts.reverse(),
}


@pytest.mark.parametrize("absent", ["", "IS_READABLE", "HAS_TABLES", "ATTRIBUTES_ARE_TOLD"])
@pytest.mark.parametrize("change", AROUND.values(), ids=AROUND.keys())
def test_a_compiled_call_sees_each_change_of_what_is_around_them(
    change: Any, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent:
        monkeypatch.setattr(f"anabranch.transforms._slots.{absent}", False)

    def look(model: Any) -> Any:
        for i, part in enumerate(parts_of(model)):
            part.param[...] += i
        seen.append(described(model))

    for at in (0, 2):
        model = Part(2)
        seen: list[Any] = []
        step = ab.jit(look)
        for _ in range(5):
            step(model)
        assert len(seen) == 1
        change(parts_of(model)[at])
        values = [int(part.param[...]) for part in parts_of(model)]
        for _ in range(5):
            step(model)
        if change is not AROUND["parts in another order"] and (
            change is not AROUND["another Variable"]
        ):
            assert seen[-1] == described(model)
            assert len(seen) == 2
        expected = [0] * len(values)
        known = [part.param for part in parts_of(model)]
        for i, variable in enumerate(known):
            first = next(j for j, other in enumerate(known) if other is variable)
            expected[first] += i
        for i, variable in enumerate(known):
            first = next(j for j, other in enumerate(known) if other is variable)
            assert int(variable[...]) == values[i] + 5 * expected[first]


def test_attributes_that_were_put_back_are_followed_again() -> None:
    traces: list[None] = []

    @ab.jit
    def step(model: Any) -> None:
        traces.append(None)
        model.param[...] += 1

    model = Part(2)
    for i in range(20):
        part = parts_of(model)[i % 4]
        part.mode, part.parts[0].mode = "b", "b"
        part.mode = part.parts[0].mode = "a"
        if i % 4 == 0:
            object.__setattr__(part, "__dict__", {**vars(part)})
        step(model)
    assert len(traces) == 1
    model.mode = "b"
    step(model)
    assert len(traces) == 2
    assert int(model.param[...]) == 21


def test_a_model_is_freed_with_what_is_known_of_it() -> None:
    step = ab.jit(lambda model: model.param[...].sum())
    model = Part(2)
    for _ in range(5):
        step(model)
    refs = [weakref.ref(part) for part in parts_of(model)]
    refs += [weakref.ref(_layout.raw_value(part.param)) for part in parts_of(model)]
    gc.collect()
    gc.disable()
    try:
        del model
        # `nnx` itself has no cycles here, and neither have we
        assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()


def test_memory_is_readable_where_there_is_one_lock() -> None:
    assert getattr(sys, "_is_gil_enabled", lambda: True)() == _words.IS_READABLE
    assert _words.offset_of(some()[0], object()) is None


class Plain:
    __slots__ = ("value", "metadata", "owner")

    def __init__(self) -> None:
        self.value, self.metadata, self.owner = [0], {}, object()


class Odd(Plain):
    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        held = object.__getattribute__(self, name)
        return [*held] if name == "value" else held


def test_those_that_hold_something_elsewhere_are_not_read_in_memory() -> None:
    def none(*_: Any) -> None:
        pass

    names = ("value", "metadata", "owner")
    read, metadata, owner = [operator.attrgetter(name) for name in names]
    cell = Cell("value", read, none, metadata, owner)
    plain = [Plain() for _ in range(COUNT)]
    slots = slots_of(cell, plain)
    assert slots is not None
    assert slots.values.as_objects() == [[0]] * COUNT
    assert slots_of(cell, [*plain, Odd()]) is None
    assert slots_of(cell, [Odd(), *plain]) is None
    plain[-1].metadata = types.MappingProxyType({})
    assert slots_of(cell, plain) is None
