"""Rows are what objects hold, and None when names have changed, however they are read."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.transforms import _rows
from anabranch.transforms._rows import Rows

COUNT = 30
OFTEN = 5  # from then on it is read as fast as it can be


class Value:
    """Something that can be watched."""


@dataclasses.dataclass(eq=False)
class Linear:
    w: Any
    b: Any


@dataclasses.dataclass(eq=False)
class Norm:
    scale: Any
    bias: Any
    mean: Any
    var: Any


@dataclasses.dataclass(eq=False)
class Other:
    w: Any
    b: Any


class Many:
    """An object with many attributes."""


def many() -> Any:
    obj = Many()
    for i in range(20):
        setattr(obj, f"attribute_{i}", Value())
    return obj


def some_objects() -> list[Any]:
    found: list[Any] = []
    for _ in range(COUNT):
        found += [Linear(Value(), Value()), Norm(Value(), Value(), Value(), Value()), many()]
    return found


def some_dictionaries() -> list[Any]:
    return [
        {"w": Value(), "b": Value(), i: Value()} if i % 7 == 0 else {"w": Value(), "b": Value()}
        for i in range(COUNT)
    ]


def some_named() -> list[Any]:
    return [{"w": Value(), "b": Value()} for _ in range(COUNT)]


MAKERS: dict[str, Callable[[], list[Any]]] = {
    "objects": some_objects,
    "dictionaries": some_dictionaries,
    "dictionaries with names": some_named,
}


def held_by(x: Any) -> dict[Any, Any]:
    return x if isinstance(x, dict) else x.__dict__


def rows_of(objects: list[Any]) -> Rows:
    held = [held_by(x) for x in objects]
    return Rows(objects, held, are_dictionaries=isinstance(objects[0], dict))


def plain(objects: list[Any]) -> list[Any]:
    return [value for x in objects for value in held_by(x).values()]


def read_often(rows: Rows, objects: list[Any]) -> None:
    for _ in range(OFTEN):
        found = rows.read([*objects])
        assert found is not None
        assert [*map(id, found)] == [*map(id, plain(objects))]


@pytest.fixture(params=["as CPython shows it", "by comparing"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by comparing":
        monkeypatch.setattr(_rows, "IS_READABLE", False)
        monkeypatch.setattr(_rows, "HAS_TABLES", False)
    return request.param


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="nobody has looked at it yet")
def test_the_fast_way_is_found(way: str) -> None:
    for make in (some_objects, some_named):
        objects = make()
        rows = rows_of(objects)
        read_often(rows, objects)
        is_fast = rows._table is not None or bool(rows._seen)
        assert is_fast == (way == "as CPython shows it")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_values_are_the_very_objects_and_their_counts_stay(make: Any) -> None:
    objects = make()
    rows = rows_of(objects)
    read_often(rows, objects)
    before = [*map(sys.getrefcount, plain(objects))]
    for _ in range(5):
        rows.read([*objects])
    assert [*map(sys.getrefcount, plain(objects))] == before


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_new_values_are_read_and_old_ones_let_go(make: Any) -> None:
    objects = make()
    rows = rows_of(objects)
    read_often(rows, objects)
    gone = [weakref.ref(value) for value in plain(objects) if isinstance(value, Value)]
    for i, x in enumerate(objects):
        for name in [*held_by(x)]:
            if isinstance(x, dict) or i % 2:
                held_by(x)[name] = Value()
            else:
                setattr(x, name, Value())
    gc.collect()
    assert not any(ref() is not None for ref in gone)
    read_often(rows, objects)


def replace_dictionary(x: Any) -> None:
    x.__dict__ = {"w": Value(), "c": Value()}


OBJECT_WRITES: dict[str, Callable[[Any], Any]] = {
    "a new name": lambda x: setattr(x, "new", 1),
    "a new name in the dictionary": lambda x: x.__dict__.update(new=1),
    "a name that is no string": lambda x: x.__dict__.update({1: 1}),
    "one less": lambda x: delattr(x, "b"),
    "one less in the dictionary": lambda x: x.__dict__.pop("b"),
    "another name for what it holds": lambda x: x.__dict__.update(c=x.__dict__.pop("b")),
    "another order": lambda x: x.__dict__.update(w=x.__dict__.pop("w")),
    "nothing left": lambda x: x.__dict__.clear(),
    "another class": lambda x: setattr(x, "__class__", Other),
    "another dictionary": replace_dictionary,
    "many more": lambda x: [setattr(x, f"more_{i}", i) for i in range(50)],
}


def check_is_seen(objects: list[Any], write: Callable[[Any], Any], at: int, often: int) -> None:
    rows = rows_of(objects)
    for _ in range(often):
        assert rows.read([*objects]) is not None
    write(objects[at])
    assert rows.read([*objects]) is None
    assert rows.read([*objects]) is None


@pytest.mark.parametrize("often", [0, OFTEN])
@pytest.mark.parametrize("at", [0, 1, COUNT - 1])
@pytest.mark.parametrize("write", OBJECT_WRITES.values(), ids=OBJECT_WRITES.keys())
def test_a_change_of_one_object_is_seen(write: Callable[[Any], Any], at: int, often: int) -> None:
    check_is_seen([Linear(Value(), Value()) for _ in range(COUNT)], write, at, often)


DICTIONARY_WRITES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "a new name": lambda d: d.update(new=1),
    "one less": lambda d: d.pop("b"),
    "another name for what it holds": lambda d: d.update(c=d.pop("b")),
    "another order": lambda d: d.update(w=d.pop("w")),
    "nothing left": lambda d: d.clear(),
    "a name that is no string": lambda d: d.update({1: d.pop("b")}),
}


@pytest.mark.parametrize("often", [0, OFTEN])
@pytest.mark.parametrize("write", DICTIONARY_WRITES.values(), ids=DICTIONARY_WRITES.keys())
def test_a_change_of_one_dictionary_is_seen(write: Callable[[Any], Any], often: int) -> None:
    for at in (0, 1, COUNT - 1):
        check_is_seen(some_named(), write, at, often)


def test_what_was_put_back_is_the_same() -> None:
    for objects in (some_objects(), some_named()):
        rows = rows_of(objects)
        for turn in range(12):
            read_often(rows, objects)
            x = objects[turn]
            last = [*held_by(x)][-1]
            held_by(x)["new"] = 1
            assert rows.read([*objects]) is None
            del held_by(x)["new"]
            held_by(x)[last] = held_by(x).pop(last)
            read_often(rows, objects)
            held_by(x)[turn] = 1  # no string: what is left is kept in another form
            del held_by(x)[turn]
            read_often(rows, objects)


def test_objects_that_keep_their_attributes_in_a_given_dictionary_are_read() -> None:
    objects = [Linear(Value(), Value()) for _ in range(COUNT)]
    for x in objects[::3]:
        x.__dict__ = {"w": Value(), "b": Value()}
    rows = rows_of(objects)
    read_often(rows, objects)
    for x in objects:
        x.w = Value()
    read_often(rows, objects)


def test_attributes_in_an_order_of_their_own_are_read_by_name() -> None:
    first = Linear(Value(), Value())
    objects: list[Any] = [first]
    for _ in range(COUNT):
        x = object.__new__(Linear)
        x.b, x.w = Value(), Value()
        objects.append(x)
    rows = rows_of(objects)
    read_often(rows, objects)
    objects[3].w = Value()
    read_often(rows, objects)
    moved = objects[-1]
    value = moved.b
    del moved.b
    moved.b = value  # the order of the first one
    assert rows.read([*objects]) is None


def test_vars_of_objects_are_read_as_dictionaries() -> None:
    objects = [Linear(Value(), Value()) for _ in range(COUNT)]
    held = [vars(x) for x in objects]
    rows = rows_of(held)
    read_often(rows, held)
    for x in objects:
        x.w = Value()
        read_often(rows, held)
    objects[4].new = 1
    assert rows.read([*held]) is None


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_other_objects_of_the_same_form_are_read(make: Any) -> None:
    sets = [make() for _ in range(3)]
    rows = rows_of(sets[0])
    rng = random.Random(0)
    for _ in range(40):
        objects = rng.choice(sets)
        for _ in range(rng.randrange(6)):
            found = rows.read([*objects])
            assert found is not None
            assert [*map(id, found)] == [*map(id, plain(objects))]


def test_the_fast_way_is_found_for_other_objects_that_come_often(way: str) -> None:
    for make in (some_objects, some_named):
        rows = rows_of(make())
        for _ in range(4):
            objects = make()
            for _ in range(20):
                rows.read([*objects])
        read_often(rows, objects)
        ids = b"".join([id(x).to_bytes(8, sys.byteorder) for x in objects])
        held = b"".join([id(held_by(x)).to_bytes(8, sys.byteorder) for x in objects])
        known = rows._table or rows._versions
        assert (known is not None) == (way == "as CPython shows it")
        assert known is None or known.ids in (ids, held)


def test_objects_that_take_the_place_of_others_in_memory_are_read() -> None:
    rows = rows_of([Linear(Value(), Value()) for _ in range(COUNT)])
    for turn in range(200):
        # what is dropped makes room for what comes
        objects: list[Any] = [Linear(Value(), Value()) for _ in range(COUNT)]
        if turn % 3 == 1:
            objects = [Other(Value(), Value()) for _ in range(COUNT)]
        if turn % 5 == 2:
            objects[turn % COUNT].new = 1
        expected = turn % 3 != 1 and turn % 5 != 2
        for _ in range(turn % 7):
            found = rows.read([*objects])
            assert (found is not None) == expected
            if found is not None:
                assert [*map(id, found)] == [*map(id, plain(objects))]
            del found


def test_what_was_read_is_alive_if_another_thread_writes_meanwhile(way: str) -> None:
    """NumPy lets other threads run while it takes words: here one gives up all values then."""
    objects = [Linear(Value(), Value()) for _ in range(COUNT)]
    rows = rows_of(objects)
    read_often(rows, objects)
    before = [*map(id, plain(objects))]
    known: Any = rows._table or rows._versions
    assert (known is None) == (way == "by comparing")
    if known is None:
        return
    words = known.words if rows._table is None else known.guards

    def take(places: Any) -> Any:
        found = words.take(places)
        for x in objects:
            vars(x)[1] = 0  # what a table shows is out of date from here on
            del vars(x)[1]
            x.w, x.b = Value(), Value()
        return found

    if rows._table is None:
        rows._versions = known._replace(words=words._replace(take=take))
    else:
        rows._table = known._replace(guards=words._replace(take=take))
    found = rows.read([*objects])
    assert found is not None
    assert all(type(x) is Value for x in found)
    assert [*map(id, found)] in (before, [*map(id, plain(objects))])


def test_a_thread_that_gives_up_what_is_read_does_no_harm() -> None:
    """Values whose object no longer counts them may be freed while they are read."""
    objects = [Linear(Value(), Value()) for _ in range(300)]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for x in objects:
                vars(x)[1] = 0  # what a table shows is out of date from here on
                del vars(x)[1]
                x.w, x.b = Value(), Value()
            objects[:] = [Linear(Value(), Value()) for _ in range(300)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=write)
    try:
        thread.start()
        end = time.monotonic() + 2
        while time.monotonic() < end:
            held = [*objects]
            try:
                rows = rows_of(held)
            except RuntimeError:  # somebody is writing one
                continue
            for _ in range(20):
                found = rows.read(held)
                assert found is None or len(found) == len(rows._names)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_nothing_is_kept_alive() -> None:
    for objects in (some_objects(), [Linear(Value(), Value()) for _ in range(COUNT)]):
        rows = rows_of(objects)
        read_often(rows, objects)
        refs = [weakref.ref(x) for x in objects]
        refs += [weakref.ref(value) for value in plain(objects)]
        objects.clear()
        gc.collect()
        assert not any(ref() is not None for ref in refs)
        assert rows.read(some_objects()) is not None or rows.read(objects) is None
