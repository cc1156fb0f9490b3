"""`map` and `associative_scan`: functions of slices, in any order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab

XS = jnp.arange(10.0)


class Layer(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.arange(6.0).reshape(3, 2))
        self.n = ab.Variable(jnp.zeros(3, jnp.int32))
        self.name = "layer"


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


class TestMap:
    @pytest.mark.parametrize("batch_size", [None, 4, 5, 10])
    def test_arrays_and_containers_give_what_jax_gives(self, batch_size):
        xs = {"a": XS, "b": (XS * 2, [jnp.ones((10, 3))])}

        def f(x):
            return x["a"] * x["b"][1][0], {"b": x["b"][0]}

        ours = ab.map(f, xs, batch_size=batch_size)
        equal(ours, jax.lax.map(f, xs, batch_size=batch_size))

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_objects_are_sliced_and_new_ones_are_stacked(self, batch_size):
        def f(layer):
            assert layer.w.value.shape == (2,)
            return layer, layer.w.sum(), {"twice": ab.Param(layer.w * 2)}

        layer = Layer()
        same, sums, new = ab.map(f, layer, batch_size=batch_size)
        assert same is layer
        assert sums.tolist() == [1, 5, 9]
        assert new["twice"].value.tolist() == [[0, 2], [4, 6], [8, 10]]

    def test_what_the_function_holds_may_be_read(self):
        class Scale(ab.Module):
            def __init__(self):
                self.k, self.n = ab.Param(3.0), ab.Variable(0)

            def __call__(self, x):
                return x * self.k

            def count(self, x):
                self.n.value += 1
                return x

        scale = Scale()
        assert ab.map(scale, XS).tolist() == (XS * 3).tolist()
        scale.k.value = 2.0
        assert ab.map(scale, XS).tolist() == (XS * 2).tolist()
        with pytest.raises(ab.errors.StructureError, match=r"(?s)order.*\.n"):
            ab.map(scale.count, XS)
        assert int(scale.n) == 0

    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_writes_are_refused(self, batch_size):
        def value(layer):
            layer.n.value += 1

        def structure(layer):
            layer.new = ab.Variable(layer.w * 1)

        for f, path in ((value, r"args\[0\]\.n"), (structure, r"args\[0\]")):
            layer = Layer()
            with pytest.raises(ab.errors.StructureError, match=rf"(?s)written.*{path}"):
                ab.map(f, layer, batch_size=batch_size)
            assert layer.n.value.tolist() == [0, 0, 0]
            assert not hasattr(layer, "new")

    def test_eager_calls_trace_once_and_transforms_go_through(self):
        traces = [0]

        def f(x):
            traces[0] += 1
            return jnp.sin(x)

        for _ in range(4):
            ab.map(f, XS)
        assert traces == [1]
        gradient = jax.grad(lambda xs: ab.map(jnp.sin, xs).sum())(XS)
        np.testing.assert_allclose(gradient, jnp.cos(XS), rtol=1e-6)
        rows = jax.vmap(lambda xs: ab.map(f, xs))(jnp.stack([XS, XS + 1]))
        np.testing.assert_allclose(rows[1], jnp.sin(XS + 1), rtol=1e-6)

    def test_sizes(self):
        with pytest.raises(ab.errors.StructureError, match="sizes"):
            ab.map(lambda x: x, (XS, XS[:3]))
        with pytest.raises(ab.errors.StructureError, match="nothing is mapped"):
            ab.map(lambda x: x, {})


class TestAssociativeScan:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("n", [1, 5])
    def test_arrays_and_containers_give_what_jax_gives(self, n, reverse):
        elems = {"a": jnp.arange(1.0, n + 1), "b": (jnp.ones((n, 2)), [jnp.arange(n)])}

        def fn(x, y):
            return {
                "a": x["a"] * y["a"],
                "b": (x["b"][0] + y["b"][0], [jnp.maximum(x["b"][1][0], y["b"][1][0])]),
            }

        ours = ab.associative_scan(fn, elems, reverse=reverse)
        equal(ours, jax.lax.associative_scan(fn, elems, reverse=reverse))
        axis = ab.associative_scan(jnp.matmul, jnp.ones((2, 2, n)).T + 0.0, axis=0)
        equal(axis, jax.lax.associative_scan(jnp.matmul, jnp.ones((n, 2, 2))))
        rows = jnp.arange(2.0 * n).reshape(2, n)
        equal(
            ab.associative_scan(jnp.add, rows, reverse, -1),
            jax.lax.associative_scan(jnp.add, rows, reverse, 1),
        )

    def test_objects_come_back_as_new_ones(self):
        def fn(a, b):
            assert a is not b
            new = Layer()
            new.w.value, new.n.value = a.w + b.w, b.n.value
            return new

        layer = Layer()
        out = ab.associative_scan(fn, layer)
        assert out is not layer
        assert type(out) is Layer
        assert out.name == "layer"
        assert out.w.value.tolist() == [[0, 1], [2, 4], [6, 9]]
        assert layer.w.value.tolist() == [[0, 1], [2, 3], [4, 5]]
        last = ab.associative_scan(lambda a, b: b, layer)
        assert last.w.value.tolist() == layer.w.value.tolist()
        first = ab.associative_scan(lambda a, b: a, layer)
        assert first.w.value.tolist() == [[0, 1]] * 3

    def test_gradients(self):
        def loss(xs, scan):
            return scan(lambda a, b: {"x": a["x"] * b["x"]}, {"x": xs})["x"].sum()

        xs = jnp.array([1.0, 2.0, 3.0])
        equal(jax.grad(loss)(xs, ab.associative_scan), jax.grad(loss)(xs, jax.lax.associative_scan))

    def test_what_is_refused(self):
        def write(a, b):
            a.n.value += 1
            return b

        layer = Layer()
        for fn, elems, match in (
            (write, layer, r"(?s)written.*args\[0\]\.n"),
            (lambda a, b: a.w, layer, "is a Layer in, and .*Param"),
            (lambda a, b: {"b": a["a"]}, {"a": XS}, r"has \['a'\] in, and \['b'\] out"),
            (lambda a, b: a.sum(), XS, r"float32\[5\] in, float32\[\] out"),
            (lambda a, b: a > b, XS, r"float32\[5\] in, bool\[5\] out"),
            (lambda a, b: a, (XS, XS[:3]), "sizes"),
            (lambda a, b: a, (), "nothing is mapped"),
        ):
            with pytest.raises(ab.errors.StructureError, match=match):
                ab.associative_scan(fn, elems)
        assert layer.n.value.tolist() == [0, 0, 0]
