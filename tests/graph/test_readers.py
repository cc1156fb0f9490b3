"""Functions that read objects for a walk find what the walk finds by itself."""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import NodeTypeError, StaticValueError
from anabranch.graph import _readers
from anabranch.graph._classify import READERS
from anabranch.graph._walk import Walk


class Linear(ab.Module):
    def __init__(self, features: int = 3, *, bias: bool = True) -> None:
        self.features = features
        self.w = ab.Param(jnp.ones((2, features)))
        self.b = ab.Param(jnp.zeros(features)) if bias else None
        self.activation = jax.nn.relu


class Norm(ab.Module):
    def __init__(self) -> None:
        self.scale, self.mean = ab.Param(jnp.ones(2)), ab.BatchStat(jnp.zeros(2))
        self.momentum = 0.9


class Block(ab.Module):
    def __init__(self, *after: Any) -> None:
        self.linear, self.norm = Linear(), Norm()
        self.extra = {"gate": ab.Param(jnp.ones(1)), "names": ["a", "b"]}
        self.after = [*after]


@dataclasses.dataclass
class Cell:
    weight: Any
    inner: Any


class Other:
    pass


class Empty(ab.Module):
    pass


@ab.graph.node
class EmptyObject:
    pass


class Text(str):
    __slots__ = ()


@ab.graph.node(static=True)
class Static:
    def __init__(self, x: int) -> None:
        self.x = x


class WithSlot(ab.Module):
    __slots__ = ("held",)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let functions be written for the first objects of a class already."""
    monkeypatch.setattr(_readers, "_FEW", 1)
    READERS.clear()
    yield
    READERS.clear()


def walked(x: Any) -> Walk:
    walk = Walk()
    walk.add(x, "x")
    return walk


def switch_off(patch) -> None:
    """Let a walk take all objects by itself."""
    patch.setattr("anabranch.graph._walk.READERS", {})
    patch.setattr("anabranch.graph._walk.add_reader", lambda kind, cls: None)


def by_itself(x: Any, monkeypatch) -> Walk:
    with monkeypatch.context() as patch:
        switch_off(patch)
        return walked(x)


def assert_same(found: Walk, expected: Walk) -> None:
    assert found.tokens == expected.tokens
    for of in ("objects", "leaves"):
        assert [*map(id, getattr(found, of))] == [*map(id, getattr(expected, of))]
    assert found.ids == expected.ids
    for index, x in enumerate(expected.objects):
        if not isinstance(x, ab.Variable):
            assert [*map(id, found.held[index])] == [*map(id, expected.held[index])]
    assert not found.rest


def written(cls: type) -> bool:
    return bool(READERS[cls]._variants)


def missed(x: Any, monkeypatch) -> int:
    """Return how many objects of a walk are not read by functions."""
    count = 0
    otherwise = _readers.Reader.read_otherwise

    def counted(*args: Any) -> int:
        nonlocal count
        count += 1
        return otherwise(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_readers.Reader, "read_otherwise", counted)
        walked(x)
    return count


SHARED = Norm()
GRAPHS: dict[str, Any] = {
    "alike": lambda: [Block() for _ in range(4)],
    "lists of several lengths": lambda: [Block(*range(i)) for i in range(4)],
    "with and without a bias": lambda: [Linear(bias=i % 2 == 0) for i in range(6)],
    "other numbers": lambda: [Linear(i % 3) for i in range(1, 7)],
    "shared by all": lambda: [Block(SHARED, i) for i in range(4)],
    "one object again": lambda: [Linear()] * 4 + [Block(SHARED)] * 2,
    "dataclasses": lambda: [Cell(ab.Param(jnp.ones(1)), Norm()) for _ in range(4)],
    "arrays": lambda: [Cell(jnp.ones(1), np.ones(2)) for _ in range(4)],
    "trees in Variables": lambda: [Cell(ab.Param({"a": jnp.ones(1)}), Norm()) for _ in range(4)],
    "numbers in Variables": lambda: [Cell(ab.Param(1.0), ab.Param(2)) for _ in range(4)],
    "metadata": lambda: [Cell(ab.Param(jnp.ones(1), axis=i), Norm()) for i in range(4)],
    "tuples": lambda: [Cell(Norm(), (Norm(), 1)) for _ in range(4)],
    "floats that are equal": lambda: [Cell(0.0, i) for i in (0.0, -0.0, float("nan"), 0.0)],
    "numbers that are equal": lambda: [Cell(i, Norm()) for i in (1, True, 1.0, np.int32(1), 1)],
    "functions": lambda: [Cell(f, Norm()) for f in (len, jax.nn.relu, functools.partial(len), len)],
    "functions with objects": lambda: [Cell(lambda m=Norm(): m, SHARED) for _ in range(4)],  # noqa: B008
    "other keys": lambda: [Cell({"a": 1, **({"b": 2} if i > 3 else {})}, i) for i in range(6)],
    "fewer keys": lambda: [Cell({"a": 1, **({"b": 2} if i < 3 else {})}, i) for i in range(6)],
    "another order": lambda: [Cell(dict.fromkeys("ab" if i < 3 else "ba", 1), i) for i in range(6)],
    "keys of a class": lambda: [Cell({("a" if i < 3 else Text("a")): 1}, i) for i in range(6)],
    "empty lists": lambda: [Cell([], 1), Cell([], 1), Cell([], 1), Cell([1], 1), Cell([], 1)],
    "arrays of text": lambda: [Cell(np.ones(1), Static(i)) for i in range(5)],
    "keys of other kinds": lambda: [Cell({1: 2}, {"a": i}) for i in range(4)],
}


def deeper(depth: int = 30) -> Any:
    x: Any = Norm()
    for _ in range(depth):
        x = Cell(ab.Param(jnp.ones(1)), x)
    return [x, x]


GRAPHS["deep"] = deeper


def emptied(cls: type, at: int) -> Any:
    graph = [Cell(Norm(), cls()) for _ in range(8)]
    graph[at].inner.late = ab.Variable(jnp.zeros(1))
    return graph


GRAPHS["empty ones, and one that is not"] = lambda: emptied(Empty, 6)
GRAPHS["the first is not empty"] = lambda: emptied(Empty, 0)
GRAPHS["empty objects"] = lambda: emptied(EmptyObject, 6)
NOT_WRITTEN = {"numbers in Variables", "keys of other kinds"}  # what comes first is not known


@pytest.mark.parametrize("name", GRAPHS)
def test_a_walk_finds_the_same(name, monkeypatch):
    graph = GRAPHS[name]()
    expected = by_itself(graph, monkeypatch)
    for _ in range(6):
        assert_same(walked(graph), expected)
    assert any(map(written, READERS)) or name in NOT_WRITTEN


def test_objects_that_are_alike_are_all_read_by_functions(monkeypatch):
    graph = [Block() for _ in range(20)]
    walked(graph)
    assert missed(graph, monkeypatch) == 0
    assert missed([Block() for _ in range(20)], monkeypatch) == 0


def test_what_is_shared_is_left_to_the_walk(monkeypatch):
    graph = [SHARED, *(Block(SHARED, i) for i in range(20))]
    for _ in range(2):
        walked(graph)
    assert missed(graph, monkeypatch) == 20
    cells = [SHARED, *(Cell(Norm(), [SHARED]) for _ in range(20))]
    for _ in range(2):
        walked(cells)
    assert missed(cells, monkeypatch) == 20


def test_objects_of_two_kinds_are_all_read_by_functions():
    graph = [Linear(bias=i % 2 == 0) for i in range(20)]
    for _ in range(20):
        walked(graph)
    READERS[Linear]._storage = None  # what is read without a function is read with that
    walked(graph)


def test_few_functions_are_written_for_a_class_whose_objects_all_differ(monkeypatch):
    written: list[Any] = []
    write = _readers._Writer.__init__
    monkeypatch.setattr(
        _readers._Writer,
        "__init__",
        lambda self, shape: (written.append(shape), write(self, shape))[1],
    )
    for i in range(1000):
        node = Linear()
        setattr(node, f"a{i}", ab.Param(jnp.ones(1)))
        walked(node)
    assert 1 <= len(written) <= 6


def test_functions_keep_no_large_values():
    class Named(ab.Module):
        def __init__(self, name: bytes) -> None:
            self.name = name

    walked([Named(b"a" * 10_000) for _ in range(8)])
    assert written(Named)
    kept = READERS[Named].read.__globals__.values()
    assert not [x for x in kept if isinstance(x, bytes) and len(x) > 1000]


def test_functions_of_many_classes_are_forgotten(monkeypatch):
    monkeypatch.setattr(_readers, "_CLASSES", 16)
    for i in range(100):
        cls = type(f"Net{i}", (Linear,), {})
        graph = [cls() for _ in range(3)]
        assert_same(walked(graph), by_itself(graph, monkeypatch))
        assert len(READERS) <= 16


def _array(random_: random.Random) -> Any:
    make = random_.choice([jnp.ones, np.ones, jnp.zeros])
    return make(random_.randrange(1, 3))


def _thing(random_: random.Random, pool: list[Any]) -> Any:
    choice = random_.randrange(14)
    if choice < 4:
        return ab.Param(_array(random_))
    if choice == 4:
        return ab.BatchStat(_array(random_), tag=random_.choice("ab"))
    if choice == 5:
        return random_.choice([1, True, 1.0, -0.0, None, "a", (1, 2), jax.nn.relu, np.float32(1)])
    if choice == 6:
        return _array(random_)
    if choice == 7:
        return [_thing(random_, pool) for _ in range(random_.randrange(3))]
    if choice == 8:
        return {k: _thing(random_, pool) for k in random_.sample(["a", "b", 1, True], 2)}
    if choice == 9 and pool:
        return random_.choice(pool)
    return random_.choice([Norm, Linear, Other])()


def _change(random_: random.Random, pool: list[Any]) -> None:
    node = random_.choice(pool)
    names = [*vars(node)] if not isinstance(node, WithSlot) else ["held"]
    match random_.randrange(6):
        case 0 if names and not isinstance(node, Cell):
            name = random_.choice(names)
            if hasattr(node, name):
                value = getattr(node, name)
                delattr(node, name)
                if random_.random() < 0.5:
                    setattr(node, name, value)  # the last one now
        case 1:
            variables = [v for n in names if isinstance(v := getattr(node, n, 0), ab.Variable)]
            for variable in variables:
                variable.value = random_.choice([_array(random_), 1.0, {"a": _array(random_)}])
        case 2:
            variables = [v for n in names if isinstance(v := getattr(node, n, 0), ab.Variable)]
            for variable in variables:
                variable.set_metadata(tag=random_.choice("ab"))
        case _:
            setattr(node, random_.choice([*names, "new"][:6]), _thing(random_, pool))


@pytest.mark.parametrize("seed", range(12))
def test_a_walk_finds_the_same_whatever_is_written(seed, monkeypatch):
    random_ = random.Random(seed)
    ab.graph.register_node(Other)
    pool: list[Any] = [*(Block() for _ in range(3)), *(Linear() for _ in range(3)), WithSlot()]
    pool += [Cell(_thing(random_, pool), _thing(random_, pool)) for _ in range(4)]
    for node in [*pool]:
        if isinstance(node, Block):
            pool += [node.linear, node.norm]
    graph = [*pool]
    for _ in range(60):
        for _ in range(random_.randrange(4)):
            _change(random_, pool)
        assert_same(walked(graph), by_itself(graph, monkeypatch))
    assert sum(map(written, READERS)) > 2


class TestWhatCannotBeWalked:
    @pytest.mark.parametrize(
        "bad", [np.array(["text"]), {1, jnp.ones}.__iter__(), ab.Param], ids=["dtype", "it", "ok"]
    )
    def test_says_where(self, bad, monkeypatch):
        graph = [Block() for _ in range(8)]
        walked(graph)
        graph[5].norm.mean = bad

        def outcome(walk: Any) -> Any:
            try:
                return walk(graph).tokens
            except NodeTypeError as error:
                return str(error)

        expected = outcome(lambda x: by_itself(x, monkeypatch))
        assert outcome(walked) == expected
        assert bad is ab.Param or expected.startswith("x[5].norm.mean: ")

    def test_a_numpy_array_of_text(self):
        graph = [Cell(np.ones(1), i) for i in range(8)]
        walked(graph)
        graph[6].weight = np.array(["text"])
        with pytest.raises(NodeTypeError, match=r"x\[6\].weight: .* dtype <U4"):
            walked(graph)

    def test_a_numpy_array_of_text_in_a_variable(self):
        graph = [Norm() for _ in range(8)]
        walked(graph)
        graph[6].mean.value = np.array([None])
        with pytest.raises(NodeTypeError, match=r"x\[6\].mean: .* dtype object"):
            walked(graph)

    def test_metadata_that_cannot_be_hashed(self):
        class Hidden(ab.Param):
            pass

        graph = [Cell(Hidden(jnp.ones(1), tag="a"), i) for i in range(8)]
        walked(graph)
        object.__setattr__(graph[6].weight, "_metadata", {"tag": [1]})
        for _ in range(3):
            with pytest.raises(StaticValueError, match=r"^x\[6\].weight: a list is static"):
                walked(graph)

    def test_a_key_that_is_an_object(self):
        graph = [Cell({ab.Param(1.0): 1}, 2)]
        for _ in range(4):
            with pytest.raises(NodeTypeError, match=r"^x\[0\].weight: a Param is a key"):
                walked(graph)


def test_tracers_of_arrays_and_of_refs_are_of_one_class():
    @jax.jit
    def run(x: Any) -> Any:
        for _ in range(4):
            walked(Cell(x, x))
            walked([ab.Param(x), ab.Param(x)])
        assert written(Cell)
        ref = jax.new_ref(x)
        assert len(walked(Cell(ref, ref)).leaves) == 1
        assert len(walked([ab.Param(x), ab.Param(ref), ab.Param(ref)]).leaves) == 2
        return ref[...]

    run(jnp.ones(2))


def test_a_walk_beside_a_thread_that_writes_sees_what_was_there_at_a_moment(monkeypatch):
    graph = [Linear() for _ in range(4)]
    walked(graph)
    ended = False

    def write() -> None:
        node = graph[1]
        while not ended:
            w, b = node.w, node.b
            del node.b
            node.late = 5
            node.b = b
            del node.late
            del node.w
            node.w = w

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=write)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for walk in (walked(graph), by_itself(graph, monkeypatch)):
                entries, _ = walk.table()
                for entry in entries:
                    assert len(entry.keys) == len(entry.edges)
                    if entry.cls is Linear:
                        edges = dict(zip(entry.keys, entry.edges, strict=True))
                        for name in {"w", "b"} & edges.keys():
                            assert type(edges[name]) is int
    finally:
        ended = True
        thread.join()
        sys.setswitchinterval(interval)


def test_what_a_class_is_may_change(monkeypatch):
    @dataclasses.dataclass(eq=False)
    class Late:
        x: int = 1

    class Early:
        pass

    ab.graph.register_node(Early)
    graph = [Cell(Norm(), Late()) for _ in range(8)]
    walked(graph)
    assert written(Cell)
    before = len(walked(graph).objects)
    ab.graph.register_node(Late, static=True)
    found = walked(graph)
    assert_same(found, by_itself(graph, monkeypatch))
    assert len(found.objects) == before - len(graph)


def test_what_was_walked_before_is_known(monkeypatch):
    graph = [Block() for _ in range(6)]
    walked(graph)
    walk, other = Walk(), Walk()
    for each in (walk, other):
        with monkeypatch.context() as patch:
            if each is other:
                switch_off(patch)
            each.add(graph[1].norm)
            each.add(graph)
            each.add(graph[0])
    assert_same(walk, other)


def test_splits_in_a_trace_and_of_twins(monkeypatch):
    graph = [Block() for _ in range(6)]
    ab.split(graph)

    @ab.jit
    def step(blocks: Any) -> Any:
        for block in blocks:
            block.norm.mean.value += 1
        graphdef, state = ab.split(blocks)
        return ab.merge(graphdef, state)[0]

    copy = step(graph)
    assert ab.graphdef(copy) == ab.graphdef(graph[0])
    assert float(graph[3].norm.mean[0]) == 1.0
    assert float(copy.norm.mean[0]) == 1.0
    step(graph)
    assert float(graph[3].norm.mean[0]) == 2.0
