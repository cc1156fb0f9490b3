"""Variable: a cell that behaves like the array in it, and keeps its identity."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch.errors import CapturedWriteError, StaticValueError, TraceLevelError

A = jnp.array([7, 2, 5])
B = jnp.array([2, 3, 1])

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.matmul,
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
]
IN_PLACE = [
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.imatmul,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
]
COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
UNARY = [operator.neg, operator.pos, operator.abs, operator.invert]
name = operator.attrgetter("__name__")


def assert_is_array(x, expected):
    """The very same dtype, shape and values; and no Variable."""
    assert isinstance(x, jax.Array)
    assert x.dtype == expected.dtype
    assert x.shape == expected.shape
    assert x.tolist() == expected.tolist()


class Gain(ab.Param):
    pass


class TestOperators:
    @pytest.mark.parametrize("op", [*BINARY, *COMPARE], ids=name)
    def test_two_operands_give_the_array_of_the_values(self, op):
        expected = op(A, B)
        assert_is_array(op(ab.Param(A), ab.Param(B)), expected)
        assert_is_array(op(ab.Param(A), B), expected)
        assert_is_array(op(A, ab.Param(B)), expected)

    @pytest.mark.parametrize("op", [*BINARY, *COMPARE], ids=name)
    def test_numpy_on_either_side_leaves_the_operation_to_the_variable(self, op):
        assert_is_array(op(ab.Param(A), np.asarray(B)), op(A, B))
        assert_is_array(op(np.asarray(A), ab.Param(B)), op(A, B))

    @pytest.mark.parametrize("op", [op for op in BINARY if op is not operator.matmul], ids=name)
    def test_python_numbers_stay_weak(self, op):
        small = A.astype(jnp.int8)
        assert_is_array(op(ab.Param(small), 2), op(small, 2))
        assert_is_array(op(2, ab.Param(small)), op(2, small))

    def test_numpy_scalars_on_the_left(self):
        assert_is_array(np.float32(2) * ab.Param(A), np.float32(2) * A)
        assert_is_array(np.int32(2) < ab.Param(A), np.int32(2) < A)

    @pytest.mark.parametrize("op", UNARY, ids=name)
    def test_one_operand_gives_the_array_of_the_value(self, op):
        assert_is_array(op(ab.Param(-A)), op(-A))

    def test_divmod_on_either_side(self):
        for pair in (divmod(ab.Param(A), B), divmod(A, ab.Param(B)), divmod(ab.Param(A), 2)):
            assert len(pair) == 2
        assert_is_array(divmod(ab.Param(A), 2)[1], A % 2)
        assert_is_array(divmod(9, ab.Param(A))[0], 9 // A)

    @pytest.mark.parametrize(("op", "plain"), list(zip(IN_PLACE, BINARY, strict=True)))
    def test_an_in_place_operator_writes_the_value_and_keeps_the_object(self, op, plain):
        v = alias = ab.Param(A)
        v = op(v, ab.Param(B))
        assert v is alias
        assert_is_array(v.value, plain(A, B))

    def test_an_in_place_operator_changes_the_dtype_as_plain_jax_does(self):
        v = ab.Param(jnp.int32(1))
        v += 1.5
        assert v.value.dtype == jnp.float32
        assert float(v) == 2.5

    def test_an_in_place_operator_leaves_the_array_alone(self):
        array = jnp.ones(2)
        v = ab.Param(array)
        v *= 3
        assert array.tolist() == [1.0, 1.0]

    def test_an_in_place_operator_with_a_variable_on_the_right_leaves_it_alone(self):
        v, x = ab.Param(B), A
        x += v
        assert_is_array(x, A + B)
        assert v.value is B

    def test_python_numbers_compute_as_python_numbers(self):
        v = ab.Variable(2)
        assert v + 1 == 3
        assert type(v + 1) is int
        assert 2**v == 4
        assert (v == 2) is True
        assert (v < 2) is False


class TestConversions:
    def test_bool_int_float_complex_index_and_round(self):
        assert bool(ab.Variable(jnp.array(True))) is True
        assert bool(ab.Variable(jnp.zeros(()))) is False
        assert int(ab.Variable(jnp.array(3))) == 3
        assert float(ab.Variable(jnp.array(1.5))) == 1.5
        assert complex(ab.Variable(jnp.array(1.5))) == 1.5 + 0j
        assert [10, 20, 30][ab.Variable(jnp.array(1))] == 20
        assert round(ab.Variable(2.567), 1) == 2.6
        assert math.isclose(math.sqrt(ab.Variable(4.0)), 2.0)

    def test_the_truth_of_several_elements_is_refused_as_by_the_array(self):
        with pytest.raises(ValueError, match="truth value"):
            bool(ab.Param(A))

    def test_len_and_iteration_are_those_of_the_array(self):
        assert len(ab.Param(A)) == 3
        assert [int(x) for x in ab.Param(A)] == [7, 2, 5]
        assert [x.tolist() for x in ab.Param(jnp.eye(2))] == [[1.0, 0.0], [0.0, 1.0]]
        with pytest.raises(TypeError):
            len(ab.Param(1.0))
        with pytest.raises(TypeError):
            iter(ab.Param(1.0))

    def test_attributes_of_the_array_are_forwarded(self):
        v = ab.Param(jnp.ones((2, 3)))
        assert (v.shape, v.ndim, v.size, v.dtype) == ((2, 3), 2, 6, jnp.float32)
        assert v.T.shape == (3, 2)
        assert v.sum().item() == 6.0
        assert v.at[0].set(0.0).sum().item() == 3.0
        assert v.sum().item() == 6.0

    def test_jax_functions_that_are_not_compiled_take_it_for_its_array(self):
        v = ab.Param(jnp.ones((2, 3)))
        assert_is_array(jnp.asarray(v), v.value)
        assert_is_array(jnp.concatenate([v, v.value]), jnp.ones((4, 3)))
        assert_is_array(jnp.stack([v, v]), jnp.ones((2, 2, 3)))
        assert_is_array(jnp.reshape(v, -1), jnp.ones(6))
        assert_is_array(jnp.asarray(ab.Param(np.arange(3.0, dtype=np.float32))), jnp.arange(3.0))

    def test_a_closure_of_a_compiled_function_reads_it(self):
        v = ab.Param(jnp.ones((2, 3)))
        assert_is_array(jax.jit(lambda x: v + x)(1.0), jnp.full((2, 3), 2.0))
        assert_is_array(jax.jit(lambda x: x @ v.T)(v.value), jnp.full((2, 2), 3.0))

    def test_numpy_takes_it_for_its_array(self):
        v = ab.Param(A)
        assert np.asarray(v).tolist() == [7, 2, 5]
        assert np.asarray(v, dtype=np.float64).dtype == np.float64
        assert np.array_equal(v, A)

    def test_a_numpy_copy_does_not_share_memory(self):
        v = ab.Param(np.zeros(2))
        np.array(v)[0] = 7.0
        np.array(v, copy=True)[0] = 7.0
        assert v.value.tolist() == [0.0, 0.0]
        assert np.asarray(v) is v.value

    def test_numpy_is_told_when_it_cannot_be_done_without_a_copy(self):
        with pytest.raises(ValueError, match="copy"):
            np.array(ab.Param(np.zeros(2)), dtype=np.int8, copy=False)


class TestIndexing:
    def test_ellipsis_reads_the_value_itself(self):
        assert ab.Param(A)[...] is A
        assert ab.Param(2.0)[...] == 2.0
        tree = {"a": A}
        assert ab.Param(tree)[...] is tree

    def test_an_index_reads_a_part(self):
        v = ab.Param(jnp.arange(6).reshape(2, 3))
        assert_is_array(v[1], jnp.array([3, 4, 5]))
        assert_is_array(v[:, 1:], jnp.array([[1, 2], [4, 5]]))
        assert_is_array(v[v > 2], jnp.array([3, 4, 5]))

    def test_a_variable_is_an_index(self):
        v, one = ab.Param(jnp.arange(6).reshape(2, 3)), ab.Variable(jnp.array(1))
        assert_is_array(v[one], jnp.array([3, 4, 5]))
        assert int(v[one, one]) == 4
        v[one] = 0
        v[0, one] = 9
        assert v.value.tolist() == [[0, 9, 2], [0, 0, 0]]

    def test_writing_a_part_makes_a_new_array(self):
        old = jnp.zeros(4)
        v = ab.Param(old)
        v[1:3] = jnp.array([1.0, 2.0])
        v[-1] = ab.Param(3.0)
        assert v.value.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert old.tolist() == [0.0] * 4

    def test_writing_all_of_it_keeps_shape_and_dtype(self):
        v = ab.Param(jnp.zeros((2, 2), jnp.bfloat16))
        v[...] = 1
        assert_is_array(v.value, jnp.ones((2, 2), jnp.bfloat16))
        v[...] = jnp.array([2, 3], jnp.bfloat16)
        assert v.value.tolist() == [[2.0, 3.0], [2.0, 3.0]]
        new = jnp.zeros((2, 2), jnp.bfloat16)
        v[...] = new
        assert v.value is new

    def test_adding_to_all_of_it(self):
        v = ab.Param(jnp.zeros(2))
        v[...] += 1
        v[0] *= 3
        assert v.value.tolist() == [3.0, 1.0]

    @pytest.mark.parametrize("index", [..., 0, slice(None)], ids=repr)
    def test_a_write_that_would_round_is_refused(self, index):
        v = ab.Param(A)
        with pytest.raises(TypeError, match=r"float.* into a Param of dtype int32.*rounded"):
            v[index] = v[index] + 1.5
        with pytest.raises(TypeError, match="int32 into a Param of dtype bool"):
            ab.Param(jnp.array([True, False]))[index] = jnp.array([2, 3], jnp.int32)[index]
        assert v.value is A

    def test_a_write_that_does_not_fit_is_refused(self):
        v = ab.Param(A)
        for shape in ((4,), (2, 3)):
            with pytest.raises(ValueError, match=r"shape .* into a Param of shape \(3,\)"):
                v[...] = jnp.zeros(shape, A.dtype)
        assert v.value is A

    @pytest.mark.parametrize("index", [3, -4, (0, 2), (slice(None), -3), np.int64(3)])
    def test_a_write_out_of_range_is_refused(self, index):
        v = ab.Variable(jnp.zeros((3, 2)))
        with pytest.raises(
            ab.errors.IndexWriteError, match=r"axis \d of a Variable of shape \(3, 2\)"
        ):
            v[index] = 1.0
        with pytest.raises(ab.errors.IndexWriteError):
            ab.jit(lambda v: v.__setitem__(index, 1.0))(v)
        assert not v.value.any()

    @pytest.mark.parametrize("index", [2, -3, (0, 1), (slice(None), -2), (None, 2), (..., 1), True])
    def test_other_writes_by_index_are_those_of_jax(self, index):
        v = ab.Variable(jnp.zeros((3, 2)))
        v[index] = 1.0
        assert v.value.tolist() == jnp.zeros((3, 2)).at[index].set(1.0).tolist()

    def test_a_python_integer_does_not_become_a_float_by_index(self):
        v = ab.Variable(1)
        with pytest.raises(TypeError, match="rounded"):
            v[...] = v[...] + 1.5
        v[...] += 1
        assert v.value == 2

    def test_parts_of_a_pytree_are_read_and_written_by_key(self):
        v = ab.Variable({"a": A, "b": [1.0]})
        assert v["a"] is A
        v["a"] = ab.Param(B)
        assert v["a"] is B


class TestValue:
    def test_it_is_replaced_by_anything(self):
        v = ab.Param(A)
        v.value = jnp.zeros((2, 2))
        assert v.shape == (2, 2)
        v.value = {"a": 1.0}
        assert v["a"] == 1.0

    def test_a_variable_gives_its_value(self):
        v = ab.Param(A)
        v.value = ab.BatchStat(B)
        assert v.value is B
        with pytest.raises(TypeError, match=r"pass `variable\.value`"):
            ab.Param(v)

    def test_no_other_attribute_can_be_written(self):
        v = ab.Param(A, tag="x")
        with pytest.raises(AttributeError, match=r"set_metadata\(tag="):
            v.tag = "y"
        with pytest.raises(AttributeError, match="Cannot delete 'value'"):
            del v.value
        with pytest.raises(
            AttributeError, match="neither metadata nor an array attribute 'colour'"
        ):
            v.colour
        assert v.value is A
        assert v.tag == "x"

    def test_a_write_from_another_trace_is_refused_and_changes_nothing(self):
        v = ab.Param(A)

        def write(x):
            v.value = x
            return x

        def write_part(x):
            v[0] = x[0]
            return x

        def write_metadata(x):
            v.set_metadata(tag="x")
            return x

        for f in (write, write_part, write_metadata):
            with pytest.raises(CapturedWriteError, match="Param"):
                jax.jit(f)(A)
        assert v.value is A
        assert v.get_metadata() == {}

    def test_a_variable_made_inside_a_trace_is_written_there(self):
        @jax.jit
        def f(x):
            v = ab.Param(x)
            v[0] = 1
            v += 1
            return v.value

        assert f(A).tolist() == [2, 3, 6]


class TestMetadata:
    def test_it_is_read_as_attributes_or_as_a_dict_of_ones_own(self):
        v = ab.Param(A, tag="x", axes=("in", None))
        assert (v.tag, v.axes) == ("x", ("in", None))
        v.get_metadata()["tag"] = "y"
        assert v.get_metadata() == {"tag": "x", "axes": ("in", None)}

    def test_it_comes_before_attributes_of_the_array(self):
        assert ab.Param(A, mean="running").mean == "running"

    def test_setting_adds_and_overwrites(self):
        v = ab.Param(A, tag="x")
        v.set_metadata(tag="y", unit="m")
        assert v.get_metadata() == {"tag": "y", "unit": "m"}

    def test_replace_makes_a_variable_of_the_same_kind(self):
        v = Gain(A, tag="x")
        new = v.replace(B, unit="m")
        assert type(new) is Gain
        assert new.value is B
        assert new.get_metadata() == {"tag": "x", "unit": "m"}
        assert v.value is A
        assert v.get_metadata() == {"tag": "x"}

    @pytest.mark.parametrize("change", [ab.Param, lambda x, **m: ab.Param(x).set_metadata(**m)])
    def test_it_has_to_be_hashable(self, change):
        with pytest.raises(StaticValueError, match="metadata 'axes'"):
            change(1.0, axes=["in"])

    def test_repr_shows_kind_value_and_metadata(self):
        assert repr(Gain(2.0, tag="x")) == "Gain(2.0, tag='x')"
        assert repr(ab.Param(jnp.zeros((3, 4)))) == "Param(float32[3,4])"

    def test_repr_is_bounded_and_shows_tracers(self):
        assert len(repr(ab.Param({i: float(i) for i in range(10_000)}))) < 300
        shown = []
        jax.jit(lambda x: shown.append(repr(ab.Param(x))))(A)
        assert shown == ["Param(int32[3])"]


class TestIdentity:
    def test_hash_is_identity(self):
        a, b = ab.Param(A), ab.Param(A)
        found = {a: "a", b: "b"}
        assert (found[a], found[b]) == ("a", "b")
        assert hash(a) == hash(a)

    def test_equality_is_elementwise(self):
        assert_is_array(ab.Param(A) == ab.Param(B), A == B)
        assert_is_array(ab.Param(A) != 2, A != 2)

    def test_copy_is_another_variable_with_the_same_array(self):
        v = Gain(A, tag="x")
        new = copy.copy(v)
        assert new is not v
        assert type(new) is Gain
        assert new.value is A
        new.value = B
        new.set_metadata(tag="y")
        assert v.value is A
        assert v.tag == "x"

    def test_deepcopy_copies_arrays(self):
        """As Python does: a copy does not go when the original is donated."""
        held = np.zeros(2)
        v = ab.Param({"jax": A, "numpy": held})
        new = copy.deepcopy(v)
        held[0] = 7.0
        assert type(new) is ab.Param
        assert new["jax"] is not A
        assert new["jax"].tolist() == A.tolist()
        assert new["numpy"].tolist() == [0.0, 0.0]
        assert new.value is not v.value

    def test_deepcopy_and_pickle_keep_aliases(self):
        v = Gain(A, tag="x")
        for copied in (copy.deepcopy([v, v]), pickle.loads(pickle.dumps([v, v]))):
            first, second = copied
            assert first is second
            assert first is not v
            first.value = B
            assert second.value is B
        assert v.value is A

    @pytest.mark.parametrize("kind", [ab.Variable, ab.Param, ab.BatchStat, ab.RngCount, Gain])
    def test_pickle_keeps_kind_value_and_metadata(self, kind):
        v = pickle.loads(pickle.dumps(kind(A, tag="x")))
        assert type(v) is kind
        assert v.value.tolist() == A.tolist()
        assert v.get_metadata() == {"tag": "x"}

    def test_a_tracer_is_not_pickled(self):
        def f(x):
            pickle.dumps(ab.Param({"a": x}))

        with pytest.raises(TraceLevelError, match="Cannot pickle a Param that holds a tracer"):
            jax.jit(f)(A)

    def test_a_copy_made_inside_a_trace_belongs_there(self):
        v = ab.Param(A)

        @jax.jit
        def f(x):
            total = 0
            for make in (copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))):
                new = make(v)
                new += x
                total = total + new
            return total

        assert f(B).tolist() == (3 * (A + B)).tolist()
        assert v.value is A


class TestInitialisedAgain:
    def test_value_and_metadata_are_new_and_compiled_calls_see_them(self):
        class Clearing(ab.Param):
            def clear(self):
                self.__init__(jnp.zeros(2), tag="cleared")

        look = ab.jit(lambda holder: (holder[0].value.sum(), len(holder[0].get_metadata())))
        module = ab.Module()
        module.v = Clearing(jnp.ones(2))
        inside = ab.jit(lambda m: (m.v.value.sum(), m.v.get_metadata().get("tag")))
        for _ in range(4):
            look([module.v]), inside(module)
        module.v.clear()
        assert inside(module) == (0, "cleared")
        assert look([module.v]) == (0, 1)
        ab.jit(lambda m: m.v.__init__(m.v.value + 3, tag="traced"))(module)
        assert inside(module) == (6, "traced")

    def test_it_is_refused_where_a_write_is(self):
        v = ab.Param(jnp.ones(2))
        with pytest.raises(CapturedWriteError, match="initialise"):
            jax.jit(v.__init__)(1.0)
        assert v.value.tolist() == [1, 1]
