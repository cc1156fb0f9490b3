"""`vmap` and `pmap`: each lane runs on its own copy of the world."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms

LANES = 8  # as many as there are host devices
BOTH = pytest.mark.parametrize("lanes", [transforms.vmap, transforms.pmap], ids=["vmap", "pmap"])
BY_KIND = ab.StateAxes({ab.Param: 0, ...: None})


class Model(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.arange(float(LANES)))
        self.n = ab.Variable(jnp.zeros((), jnp.int32))


@BOTH
class TestBoth:
    def test_mapped_and_broadcast_variables_are_written(self, lanes):
        def f(m, x):
            m.w.value = m.w * x
            m.n.value = m.n + 1
            return m.w + 1

        model = Model()
        w, n = model.w, model.n
        mapped = lanes(f, in_axes=(BY_KIND, None))
        for call in range(1, 3):
            out = mapped(model, 2.0)
            assert model.w is w
            assert model.n is n
            assert n.value.shape == ()
            assert int(n.value) == call
            assert out.tolist() == [i * 2.0**call + 1 for i in range(LANES)]

    def test_identity_holds_for_returned_inputs_and_structure(self, lanes):
        def f(m):
            m.new = ab.Param(m.w * 2)
            m.again = m.w
            m.me = m
            m.text = "x"
            return m, [m.new]

        model = Model()
        out, (new,) = lanes(f, in_axes=(BY_KIND,))(model)
        assert out is model
        assert model.me is model
        assert model.again is model.w
        assert new is model.new
        assert model.new.value.tolist() == [2.0 * i for i in range(LANES)]
        assert model.text == "x"

    def test_broadcast_variables_must_end_up_equal(self, lanes):
        """C27, C37."""

        def f(m):
            m.w.value = m.w + 1
            m.n.value = m.w.value.astype(jnp.int32)

        model = Model()
        with pytest.raises(ab.errors.BroadcastWriteError, match=r"args\[0\]\.n") as caught:
            lanes(f, in_axes=(BY_KIND,))(model)
        assert "StateAxes" in str(caught.value)
        assert model.w.value.tolist() == list(range(LANES))
        assert int(model.n.value) == 0

    def test_per_lane_statistics_have_an_axis(self, lanes):
        """C27."""

        def f(m, x):
            m.stat.value = 0.5 * m.stat + x
            return m.stat.value

        model = Model()
        model.stat = ab.BatchStat(jnp.zeros(LANES))
        axes = ab.StateAxes({(ab.Param, ab.BatchStat): 0, ...: None})
        lanes(f, in_axes=(axes, 0))(model, jnp.arange(float(LANES)))
        assert model.stat.value.tolist() == list(range(LANES))

    def test_reductions_make_broadcast_writes_equal(self, lanes):
        def f(m):
            m.n.value = jax.lax.psum(m.w.value, "i").astype(jnp.int32)

        model = Model()
        lanes(f, in_axes=(BY_KIND,), axis_name="i")(model)
        assert int(model.n.value) == sum(range(LANES))

    def test_one_variable_with_two_axes_is_refused(self, lanes):
        """C10."""

        class Two(ab.Module):
            def __init__(self):
                self.a = Model()
                self.b = Model()
                self.a.w = self.b.w = ab.Param(jnp.ones((LANES, LANES)))

        axes = ab.StateAxes({ab.PathContains("a"): 1, ...: 0})
        two = Two()
        two.a.n = two.b.n = ab.Variable(jnp.ones((LANES, LANES)))
        with pytest.raises(ab.errors.AliasError) as caught:
            lanes(lambda m: m.a.w.sum(), in_axes=(axes,))(two)
        message = str(caught.value)
        assert "args[0].a.w" in message
        assert "args[0].b.w" in message
        assert "given 1" in message
        assert "0" in message

    def test_paths_below_a_shared_module_are_followed_on_both_ways(self, lanes):
        class Two(ab.Module):
            def __init__(self):
                self.x = self.y = Model()
                self.x.n.value = jnp.zeros(LANES)

        axes = ab.StateAxes({ab.PathContains("x"): 0, ...: None})
        with pytest.raises(ab.errors.AliasError, match=r"\.x\..*\.y\."):
            lanes(lambda m: m.x.w.sum(), in_axes=(axes,))(Two())

    def test_aliases_in_two_arguments_must_agree(self, lanes):
        model = Model()
        with pytest.raises(ab.errors.AliasError, match=r"args\[0\].*args\[1\]\[0\]"):
            lanes(lambda a, b: a.sum(), in_axes=(0, None))(model.w, [model.w])
        assert lanes(lambda a, b: a + b, in_axes=(0, 0))(model.w, model.w).tolist() == [
            2.0 * i for i in range(LANES)
        ]

    def test_what_is_added_to_an_object_with_two_axes_is_refused(self, lanes):
        items = []
        with pytest.raises(ab.errors.AliasError, match=r"args\[0\]\[0\].*args\[1\]\[0\]"):
            lanes(lambda a, b, x: a.append(x), in_axes=(0, None, 0))(items, items, jnp.ones(LANES))
        assert items == []

    def test_layout_is_kept_along_other_axes(self, lanes):
        v = ab.Param(jnp.arange(3.0 * LANES).reshape(3, LANES))

        def f(v):
            v.value = v * 2

        lanes(f, in_axes=(1,))(v)
        assert v.value.shape == (3, LANES)
        assert v.value[1, 0] == 2.0 * LANES

    def test_results_go_along_the_axes_that_were_asked_for(self, lanes):
        x = jnp.arange(2.0 * LANES).reshape(LANES, 2)
        out = lanes(lambda x: {"a": x, "b": ab.Param(x)}, out_axes={"a": 0, "b": 1})(x)
        assert out["a"].tolist() == x.tolist()
        assert out["b"].value.tolist() == x.T.tolist()

    def test_the_axis_of_a_returned_input_is_its_own(self, lanes):
        model = Model()
        assert lanes(lambda v: v, out_axes=0)(model.w) is model.w
        with pytest.raises(ab.errors.AliasError, match="return value"):
            lanes(lambda v, x: v, in_axes=(None, 0), out_axes=0)(model.n, jnp.ones(LANES))

    def test_numbers_without_an_axis_stay_numbers(self, lanes):
        def f(m, x):
            m.n.value = 7
            m.made = ab.Variable((2.5, x.sum()))
            m.w.value = 1.5
            return 3, (4, x), ab.Variable(5), {"t": (6, True)}

        model = Model()
        axes = (None, (0, 0), None, None)
        mapped = lanes(f, in_axes=(BY_KIND, 0), out_axes=axes)
        with pytest.raises(ab.errors.BroadcastWriteError, match="made"):
            mapped(model, jnp.ones((LANES, 2)) * model.w.value[:, None])
        shared = lanes(lambda m, x: f(m, jnp.ones(2)), in_axes=(BY_KIND, 0), out_axes=axes)
        for _ in range(2):
            three, (four, ones), five, rest = shared(model, jnp.ones(LANES))
            assert type(model.n.value) is int
            assert model.n.value == 7
            half, total = model.made.value
            assert type(half) is float
            assert half == 2.5
            assert float(total) == 2.0
            assert model.w.value.tolist() == [1.5] * LANES
            assert type(three) is int
            assert three == 3
            assert four.tolist() == [4] * LANES
            assert ones.shape == (LANES, 2)
            assert type(five.value) is int
            assert five.value == 5
            assert rest == {"t": (6, True)}
            assert type(rest["t"][1]) is bool

    def test_keyword_arguments_are_mapped(self, lanes):
        out = lanes(lambda x, *, y: x + y)(jnp.arange(float(LANES)), y=jnp.ones(LANES))
        assert out.tolist() == [i + 1.0 for i in range(LANES)]

    def test_sizes_and_axes_are_checked_by_path(self, lanes):
        with pytest.raises(ab.errors.StructureError, match=r"(?s)args\[0\].*args\[1\]"):
            lanes(lambda a, b: a)(jnp.ones(LANES), jnp.ones(LANES - 1))
        with pytest.raises(ab.errors.StructureError, match=r"args\[0\]\.n.*axis 0"):
            lanes(lambda m: m.w.sum())(Model())
        with pytest.raises(ab.errors.StructureError, match="nothing is mapped"):
            lanes(lambda m: 0, in_axes=None)(Model())

    def test_leaves_that_no_filter_matches_are_named(self, lanes):
        axes = ab.StateAxes({ab.Param: 0})
        with pytest.raises(ab.errors.FilterError, match=r"args\[0\]\.n"):
            lanes(lambda m: m.w.sum(), in_axes=(axes,))(Model())

    def test_with_axis_size_only(self, lanes):
        v = ab.Variable(1.0)

        def f(v):
            v.value = v + 1
            return v * 2.0

        out = lanes(f, in_axes=None, axis_size=3)(v)
        assert out.tolist() == [4.0, 4.0, 4.0]
        assert float(v.value) == 2.0

    @pytest.mark.parametrize("wrong", ["a", True, 1.0])
    def test_axes_are_ints(self, lanes, wrong):
        for axes in ({"in_axes": wrong}, {"out_axes": wrong}):
            with pytest.raises(ab.errors.StructureError, match="axis is an int"):
                lanes(lambda x: x, **axes)(jnp.ones(LANES))

    def test_failures_change_nothing(self, lanes):
        def f(m):
            m.w.value = m.w * 2
            raise RuntimeError("lane")

        model = Model()
        w = model.w.value
        with pytest.raises(RuntimeError, match="lane"):
            lanes(f, in_axes=(BY_KIND,))(model)
        assert model.w.value is w

    def test_drawing_from_a_broadcast_stream_is_refused(self, lanes):
        """C8."""
        rngs = ab.Rngs(0)
        with pytest.raises(ab.errors.SharedStreamError, match="stream"):
            lanes(lambda rngs, x: jax.random.normal(rngs()) + x, in_axes=(None, 0))(
                rngs, jnp.ones(LANES)
            )
        assert int(rngs.default.count.value) == 0


class TestVmap:
    def test_makes_ensembles(self):
        def make(key):
            model = Model()
            model.w.value = jax.random.normal(key, (2,))
            model.rngs = ab.Rngs(key)
            return model

        keys = jax.random.split(jax.random.key(0), 5)
        ensemble = transforms.vmap(make)(keys)
        assert type(ensemble) is Model
        assert ensemble.w.value.shape == (5, 2)
        expected = [jax.random.normal(key, (2,)).tolist() for key in keys]
        assert np.allclose(ensemble.w.value, expected)
        masks = transforms.vmap(lambda m: jax.random.normal(m.rngs()))(ensemble)
        assert len(set(masks.tolist())) == 5
        assert ensemble.rngs.default.count.value.tolist() == [1] * 5

    def test_numbers_left_behind_are_stacked(self):
        v = ab.Param(jnp.arange(3.0))

        def f(v):
            v.value = 2.5
            return 3, "static"

        out = transforms.vmap(f)(v)
        assert out[0].tolist() == [3, 3, 3]
        assert out[1] == "static"
        assert v.value.tolist() == [2.5, 2.5, 2.5]

    def test_negative_axes_count_from_the_end(self):
        v = ab.Param(jnp.arange(6.0).reshape(2, 3))
        out = transforms.vmap(lambda v: v * 2, in_axes=-1, out_axes=-1)(v)
        assert out.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]

    def test_nests_and_composes(self):
        model = Model()
        model.w.value = jnp.arange(6.0).reshape(2, 3)

        def f(m, x):
            m.w.value = m.w + x
            m.n.value = m.n + 1

        inner = transforms.vmap(f, in_axes=(BY_KIND, 0))
        outer = transforms.vmap(inner, in_axes=(BY_KIND, None))
        transforms.jit(outer)(model, jnp.array([1.0, 2.0, 3.0]))
        assert model.w.value.tolist() == [[1.0, 3.0, 5.0], [4.0, 6.0, 8.0]]
        assert int(model.n.value) == 1

    def test_an_outer_lane_does_not_count_as_a_lane(self):
        """A value that only the outer vmap maps may be written to what the inner one broadcasts."""
        v = ab.Variable(jnp.arange(2.0))

        def inner(v, x):
            v.value = v * 2
            return x

        def outer(v):
            return transforms.vmap(inner, in_axes=(None, 0))(v, jnp.ones(3))

        transforms.vmap(outer)(v)
        assert v.value.tolist() == [0.0, 2.0]

    def test_a_negative_axis_follows_the_rank_of_what_is_written(self):
        v = ab.Param(jnp.ones((3, 2)))
        transforms.vmap(lambda v: setattr(v, "value", jnp.zeros((5, 7))), in_axes=-1)(v)
        assert v.value.shape == (5, 7, 2)

    def test_per_example_gradients(self):
        model = Model()
        model.w.value = jnp.ones(2)
        grads = transforms.vmap(transforms.grad(lambda m, x: (m.w * x).sum()), in_axes=(None, 0))(
            model, jnp.arange(6.0).reshape(3, 2)
        )
        assert grads["w"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


class TestPmap:
    def test_traces_once_and_runs_on_all_devices(self):
        traces: list[int] = []

        def f(m):
            traces.append(1)
            m.w.value = m.w + 1.0

        mapped = transforms.pmap(f, in_axes=(BY_KIND,))
        for model in (Model(), Model()):
            model.w.value = jnp.arange(float(LANES))
            mapped(model)
            assert model.w.value.tolist() == [i + 1.0 for i in range(LANES)]
            assert len(model.w.value.devices()) == LANES
        assert len(traces) == 1

    def test_static_arguments(self):
        mapped = transforms.pmap(
            lambda x, n: x * n, static_broadcasted_argnums=1, in_axes=(0, None)
        )
        assert mapped(jnp.ones(LANES), 3).tolist() == [3.0] * LANES

    def test_zeros_of_two_signs_are_different(self):
        v = ab.Variable(jnp.zeros(()))
        x = jnp.array([0.0, -0.0] * (LANES // 2))
        with pytest.raises(ab.errors.BroadcastWriteError, match=r"args\[0\]"):
            transforms.pmap(lambda v, x: setattr(v, "value", x), in_axes=(None, 0))(v, x)

    def test_equal_nans_are_equal(self):
        v = ab.Variable(jnp.zeros(()))

        def f(v, x):
            v.value = jnp.full((), jnp.nan)
            return x

        transforms.pmap(f, in_axes=(None, 0))(v, jnp.ones(LANES))
        assert np.isnan(v.value)

    def test_inside_another_transform_a_broadcast_write_cannot_be_checked(self):
        def f(m: Any) -> None:
            m.n.value = m.n + 1

        model = Model()
        with pytest.raises(ab.errors.BroadcastWriteError, match="inside another"):
            transforms.jit(transforms.pmap(f, in_axes=(BY_KIND,)))(model)
        assert int(model.n.value) == 0
