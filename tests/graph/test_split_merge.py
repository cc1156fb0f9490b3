"""Split, merge, clone and equal: structure, values and aliases."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
import functools
import gc
import pickle
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab


class Block(ab.Module):
    def __init__(self, scale: float = 1.0) -> None:
        self.w = ab.Param(jnp.full(3, scale))
        self.stat = ab.BatchStat(jnp.zeros(()))
        self.name = "block"


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Cell:
    v: Any
    n: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    v: Any


class Color(enum.Enum):
    RED = 1


@ab.graph.node
class Slotted:
    __slots__ = ("__hidden", "v", "unset")

    def __init__(self, v: Any) -> None:
        self.v = v
        self.__hidden = 3

    def hidden(self) -> int:
        return self.__hidden


def round_trip(x: Any) -> Any:
    return ab.merge(*ab.split(x))


class TestMergeOfSplit:
    def test_gives_new_objects_with_equal_contents(self):
        block = Block(2.0)
        again = round_trip(block)
        assert again is not block
        assert again.w is not block.w
        assert again.w.value is block.w.value  # immutable, so it is shared
        assert again.name == "block"
        assert ab.equal(block, again)

    def test_keeps_aliases(self):
        v = ab.Param(1.0)
        again = round_trip({"a": v, "b": [v, (v,)]})
        assert again["a"] is again["b"][0] is again["b"][1][0]

    def test_keeps_cycles(self):
        block = Block()
        block.me = block
        block.items = [block]
        again = round_trip(block)
        assert again.me is again
        assert again.items[0] is again

    def test_keeps_every_kind_of_container(self):
        v = ab.Param(1.0)
        box = Block()
        box.everything = [
            {"z": v, 3: 1, (1, True): 2, "a": 0},
            collections.OrderedDict(b=v, a=1),
            collections.defaultdict(list, x=v),
            collections.Counter("aab"),
            collections.deque([v, 1], maxlen=2),
            {1, "x"},
            (v, 1, 2.5),
            Pair(v, 2),
            Cell(v, 4),
            Frozen(v),
            Slotted(v),
            functools.partial(max, v, default=3),
            box.__repr__,
        ]
        again = round_trip(box).everything
        assert list(again[0]) == ["z", 3, (1, True), "a"]
        assert type(again[1]) is collections.OrderedDict
        assert list(again[1]) == ["b", "a"]
        assert again[2].default_factory is list
        assert again[2]["new"] == []
        assert again[3] == collections.Counter("aab")
        assert again[4].maxlen == 2
        assert again[5] == {1, "x"}
        assert again[6][1:] == (1, 2.5)
        assert type(again[7]) is Pair
        assert type(again[8]) is Cell
        assert again[8].n == 4
        assert type(again[9]) is Frozen
        assert again[10].hidden() == 3
        assert not hasattr(again[10], "unset")
        assert again[11].keywords == {"default": 3}
        assert again[12].__self__.everything is again
        shared = [
            again[0]["z"],
            again[1]["b"],
            again[2]["x"],
            again[4][0],
            again[6][0],
            again[7].a,
            again[8].v,
            again[9].v,
            again[10].v,
            again[11].args[0],
        ]
        assert all(x is shared[0] for x in shared)

    def test_runs_no_code_of_the_class(self):
        made = []

        class Loud(ab.Module):
            def __init__(self):
                made.append("init")
                self.v = ab.Param(1.0)

            def __setattr__(self, name, value):
                made.append(name)
                super().__setattr__(name, value)

            @property
            def prop(self):
                raise AssertionError("properties are not read")

        loud = Loud()
        made.clear()
        again = round_trip(loud)
        assert made == []
        assert again.v.value == 1.0

    def test_twice_gives_disjoint_worlds(self):
        parts = ab.split([ab.Param(np.ones(2)), np.zeros(2)])
        first, second = ab.merge(*parts), ab.merge(*parts)
        first[0].value[0] = 5.0
        first[1][0] = 5.0
        assert second[0].value.tolist() == [1.0, 1.0]
        assert second[1].tolist() == [0.0, 0.0]

    def test_a_state_is_a_snapshot(self):
        array = np.ones(2)
        v = ab.Param(array)
        _, state = ab.split(v)
        array[0] = 7.0
        v.value = 3.0
        assert state[()].tolist() == [1.0, 1.0]

    def test_static_roots_and_leaves_are_split_too(self):
        assert round_trip(42) == 42
        assert round_trip("x") == "x"
        array = jnp.ones(2)
        assert round_trip(array) is array

    def test_filters_divide_the_leaves(self):
        block = Block()
        graphdef, params, rest = ab.split(block, ab.Param, ...)
        assert params.paths == (("w",),)
        assert rest.paths == (("stat",),)
        assert ab.equal(ab.merge(graphdef, params, rest), block)
        assert ab.equal(ab.merge(graphdef, rest, params), block)

    def test_filters_have_to_be_exhaustive(self):
        with pytest.raises(ab.errors.FilterError, match=r"'stat'.*BatchStat"):
            ab.split(Block(), ab.Param)

    def test_merge_is_strict_about_paths(self):
        graphdef, state = ab.split(Block())
        with pytest.raises(ab.errors.UpdateError, match=r"'stat'.*missing"):
            ab.merge(graphdef, state.filter(ab.Param))
        with pytest.raises(ab.errors.UpdateError, match="given twice"):
            ab.merge(graphdef, state, state)
        with pytest.raises(ab.errors.UpdateError, match="unknown"):
            ab.merge(graphdef, state, {"other": 1.0})

    def test_a_variable_can_hold_a_pytree(self):
        v = ab.Param({"a": jnp.ones(2), "b": [1, (2.0, None)]})
        _, state = ab.split({"v": v})
        assert state.paths == (("v", "a"), ("v", "b", 0), ("v", "b", 1, 0))
        assert {info.kind for info in state.infos} == {ab.Param}
        again = round_trip(v)
        assert again.value["b"][1] == (2.0, None)


class TestChains:
    def test_of_100_000_nodes_are_split_and_merged(self):
        class Link(ab.Module):
            pass

        first = link = Link()
        for i in range(100_000):
            if i % 1_000 == 0:
                link.v = ab.Param(float(i))
            link.next = Link()
            link = link.next
        graphdef, state = ab.split(first)
        assert graphdef.num_leaves == 100
        again = ab.merge(graphdef, state)
        assert again.v.value == 0.0
        assert ab.equal(first, again)
        again.v.value = -1.0
        assert not ab.equal(first, again)
        assert ab.graph.diff(first, again) == [(("v",), "0.0", "-1.0")]


class TestStaticValues:
    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (1, True),
            (1, 1.0),
            (0.0, -0.0),
            ((1, 2), (1, True)),
            (frozenset({1}), frozenset({True})),
            (np.float32(1), np.float64(1)),
            ("1", b"1"),
            (1j, 1.0),
            (slice(1), slice(True)),
            (decimal.Decimal("1"), decimal.Decimal("1.0")),
            (jnp.float32, jnp.float64),
            (len, max),
        ],
    )
    def test_of_other_type_or_value_are_another_structure(self, a, b):
        x, y = ab.graphdef([a]), ab.graphdef([b])
        assert x != y
        assert repr(round_trip([a])) == repr([a])
        assert type(round_trip([b])[0]) is type(b)

    @pytest.mark.parametrize(
        "value", [float("nan"), -0.0, (1, (2, "x")), Color.RED, np.int8(3), jnp.int32, None, ...]
    )
    def test_equal_themselves(self, value):
        assert ab.graphdef([value]) is ab.graphdef([value])
        assert repr(round_trip([value])) == repr([value])

    @pytest.mark.parametrize(
        "value",
        [
            np.ones(1, jnp.bfloat16)[0],
            np.ones(1, jnp.float8_e4m3fn)[0],
            np.array([(1, 2.0)], [("a", ">i4"), ("b", "f8")])[0],
            np.str_(""),
            np.bytes_(b""),
            np.str_("text"),
            np.datetime64("2020-01-01"),
            np.longlong(3),
            np.longdouble(1) / 3,
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_numpy_scalars_come_back_as_they_are(self, value):
        graphdef, state = ab.split([value])
        for kept in (graphdef, pickle.loads(pickle.dumps(graphdef))):
            assert kept == graphdef
            (found,) = ab.merge(kept, state)
            assert type(found) is type(value)
            assert found.dtype == value.dtype
            assert found.tobytes() == value.tobytes()

    def test_numpy_scalars_with_objects_in_them_are_refused(self):
        value = np.array([(1, [])], [("a", "i4"), ("b", "O")])[0]
        with pytest.raises(ab.errors.StaticValueError, match=r"\[0\]: .* cannot be hashed"):
            ab.split([value])

    def test_dict_keys_are_compared_by_type(self):
        assert ab.graphdef({1: 0}) != ab.graphdef({True: 0})
        assert ab.graphdef({"a": 0, "b": 0}) != ab.graphdef({"b": 0, "a": 0})


class Stateful:
    def __init__(self) -> None:
        self.n = 0


class TestRefusals:
    def check(self, value: Any, match: str) -> None:
        module = Block()
        module.inner = [value]
        with pytest.raises(ab.errors.NodeTypeError, match=match) as caught:
            ab.split(module)
        assert "inner[0]" in str(caught.value)

    def test_unregistered_objects_with_state(self):
        """C16."""
        self.check(Stateful(), r"graph\.node")

    def test_subclasses_of_containers(self):
        class MyDict(dict):
            pass

        self.check(MyDict(a=1), "subclass of dict")

    def test_sets_of_variables(self):
        """C16."""
        self.check({ab.Param(1.0)}, "set")

    def test_variables_inside_variables(self):
        self.check(ab.Param([ab.Param(1.0)]), "inside the value")

    def test_variables_inside_a_container_that_a_variable_shares(self):
        shared = [ab.Param(1.0)]
        with pytest.raises(ab.errors.NodeTypeError, match="inside the value"):
            ab.split({"first": shared, "v": ab.Variable(shared)})

    def test_modules_inside_variables(self):
        self.check(ab.Param({"m": Block()}), "inside the value")

    def test_strings_inside_variables(self):
        self.check(ab.Param("text"), "holds arrays")

    def test_functions_with_objects_that_make_what_a_defaultdict_lacks(self):
        block, array = Block(), jnp.ones(2)
        for make in (lambda: block, block.__init__, functools.partial(max, array)):
            self.check(collections.defaultdict(make, a=1), "reaches an? (Block|array)")
        for make in (list, int, None, lambda: [Block()], functools.partial(dict, a=1)):
            assert round_trip(collections.defaultdict(make, a=1))["a"] == 1

    def test_nodes_as_keys(self):
        self.check({ab.Param(1.0): 1}, "key")

    def test_iterators(self):
        self.check(iter([1]), "iterator")

    def test_nodes_where_a_split_cannot_follow(self):
        v = ab.Param(1.0)
        for value in (weakref.ref(v), {"a": v}.get, {"a": v}.values(), ValueError(v)):
            self.check(value, "tracked|state")
        self.check(weakref.ref(v), "put the object itself here")  # its class is not the user's
        for value in (frozenset({v}), {(1, v): 2}):
            with pytest.raises(ab.errors.AnabranchError, match=r"\[0\].*cannot be tracked"):
                ab.split({"inner": [value]})

    def test_values_that_hold_nodes_on_the_side(self):
        class Number(int):
            pass

        number = Number(3)
        number.v = ab.Param(1.0)
        self.check(number, "tracked")

    def test_structured_arrays(self):
        self.check(np.zeros(2, [("a", "f4")]), "dtype")

    def test_generators_of_random_numbers(self):
        self.check(np.random.default_rng(0), "state")

    def test_arrays_of_objects(self):
        self.check(np.array(["a"]), "dtype")

    def test_modules_with_c_state(self):
        with pytest.raises(TypeError, match="lay-out conflict"):  # by Python itself

            class Bad(ab.Module, dict):
                pass

        class AlsoBad(dict):
            pass

        with pytest.raises(ab.errors.NodeTypeError, match="derives from dict"):
            ab.graph.register_node(AlsoBad)

    def test_meshes_functions_and_loggers_are_static(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
        module = Block()
        module.statics = [mesh, len, jax.nn.relu, lambda x: x, jax.sharding.PartitionSpec("i")]
        again = round_trip(module)
        assert again.statics[0] == mesh
        assert again.statics[2] is jax.nn.relu

    def test_declared_statics_keep_their_identity(self):
        @ab.graph.node(static=True)
        class Config:
            def __init__(self):
                self.depth = 3

        config = Config()
        assert round_trip([config])[0] is config
        before = ab.graphdef([config])
        config.depth = 4
        assert ab.graphdef([config]) != before


class TestGraphDef:
    def test_is_interned_and_collected(self):
        graphdef = ab.graphdef(Block())
        assert ab.graphdef(Block(3.0)) is graphdef
        ref = weakref.ref(graphdef)
        del graphdef
        gc.collect()
        assert ref() is None

    def test_is_pickled(self):
        block = Block()
        block.items = [{"a": ab.Param(1.0)}, (1, 2.5)]
        graphdef = ab.graphdef(block)
        assert pickle.loads(pickle.dumps(graphdef)) is graphdef

    def test_metadata_are_part_of_it(self):
        assert ab.graphdef(ab.Param(1.0, tag="a")) != ab.graphdef(ab.Param(1.0))
        assert round_trip(ab.Param(1.0, tag="a")).tag == "a"

    def test_can_be_an_argument_of_jax_jit(self):
        traces = []

        @jax.jit
        def total(graphdef, state):
            traces.append(1)
            block = ab.merge(graphdef, state)
            return block.w.sum() + block.stat.value

        assert float(total(*ab.split(Block(2.0)))) == 6.0
        assert float(total(*ab.split(Block(3.0)))) == 9.0
        assert len(traces) == 1


class TestCopies:
    def test_deepcopy_of_a_module_keeps_aliases(self):
        block = Block()
        block.me = block
        block.again = block.w
        other = copy.deepcopy(block)
        assert other.me is other
        assert other.again is other.w
        assert other.w is not block.w
        assert ab.equal(block, other)

    def test_copy_of_a_module_shares_attributes(self):
        block = Block()
        other = copy.copy(block)
        assert other.w is block.w
        other.name = "other"
        assert block.name == "block"

    def test_modules_are_pickled(self):
        block = Block(2.0)
        block.me = block
        other = pickle.loads(pickle.dumps(block))
        assert other.me is other
        assert other.w.value.tolist() == [2.0, 2.0, 2.0]

    def test_clone_makes_new_objects(self):
        block = Block()
        other = ab.clone(block)
        other.w.value = 0.0
        assert block.w.value.tolist() == [1.0, 1.0, 1.0]


class TestModule:
    def test_vars_is_a_read_only_view(self):
        block = Block()
        assert list(vars(block)) == ["w", "stat", "name"]
        with pytest.raises(TypeError, match="read-only"):
            vars(block)["name"] = "x"
        assert block.name == "block"
        assert "w" in dir(block)

    def test_cached_properties_work(self):
        class Lazy(ab.Module):
            @functools.cached_property
            def table(self):
                return [1, 2]

        lazy = Lazy()
        assert lazy.table is lazy.table
        assert round_trip(lazy).table == [1, 2]
