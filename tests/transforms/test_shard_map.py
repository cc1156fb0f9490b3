"""`shard_map`: each device runs on its own copy of the world, and sees its shard of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import anabranch as ab

DEVICES = 8
MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
GRID = Mesh(np.array(jax.devices()[:DEVICES]).reshape(4, 2), ("x", "y"))
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["types", "values"])
BY_KIND = ab.StateSharding({ab.Param: P("x"), ...: P()})


class Model(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.arange(16.0))
        self.n = ab.Variable(jnp.zeros(()))


@CHECKS
class TestBothChecks:
    def test_variables_see_local_shapes_and_are_written_with_their_specs(self, check_vma):
        shapes: list[tuple[int, ...]] = []

        def f(m, x):
            shapes.append(m.w.value.shape)
            m.w.value = m.w * x
            m.n.value = m.n + jax.lax.psum(m.w.value.sum(), "x")
            return m.w + 1

        model = Model()
        w, n = model.w, model.n
        mapped = ab.shard_map(
            f, mesh=MESH, in_specs=(BY_KIND, P()), out_specs=P("x"), check_vma=check_vma
        )
        for call in range(1, 4):
            out = mapped(model, 2.0)
            expected = np.arange(16.0) * 2.0**call
            assert model.w is w
            assert model.n is n
            assert w.value.tolist() == expected.tolist()
            assert out.tolist() == (expected + 1).tolist()
            assert n.value.shape == ()
        assert float(n.value) == 120.0 * (2 + 4 + 8)
        assert shapes == [(2,)] * 2  # JAX traces again for arrays that are on the mesh already

    def test_identity_holds_for_returned_inputs_and_structure(self, check_vma):
        def f(m):
            m.new = ab.Param(m.w * 2)
            m.again = m.w
            m.me = m
            m.text = "x"
            return m, [m.new]

        model = Model()
        w, n = model.w.value, model.n.value
        out, (new,) = ab.shard_map(
            f,
            mesh=MESH,
            in_specs=(BY_KIND,),
            out_specs=(BY_KIND, P("x")),
            check_vma=check_vma,
        )(model)
        assert out is model
        assert model.me is model
        assert model.again is model.w
        assert new is model.new
        assert new.value.tolist() == [2.0 * i for i in range(16)]
        assert model.text == "x"
        assert model.w.value is w
        assert model.n.value is n

    def test_what_is_broadcast_must_be_left_equal(self, check_vma):
        """C37."""

        def f(m):
            m.w.value = m.w + 1
            m.n.value = m.w.value.sum()

        model = Model()
        with pytest.raises(ab.errors.BroadcastWriteError, match=r"args\[0\]\.n") as caught:
            ab.shard_map(f, mesh=MESH, in_specs=(BY_KIND,), out_specs=None, check_vma=check_vma)(
                model
            )
        assert "args[0].w" not in str(caught.value)
        assert "pmean" in str(caught.value)
        assert model.w.value.tolist() == list(range(16))
        assert float(model.n.value) == 0

    def test_results_must_be_equal_along_axes_that_their_spec_does_not_name(self, check_vma):
        def f(x):
            return x

        mapped = ab.shard_map(
            f, mesh=GRID, in_specs=P("x", "y"), out_specs=P("x"), check_vma=check_vma
        )
        with pytest.raises(ab.errors.BroadcastWriteError, match="the return value"):
            mapped(jnp.arange(32.0).reshape(8, 4))

        def g(x):
            return jax.lax.psum(x, "y")

        total = ab.shard_map(
            g, mesh=GRID, in_specs=P("x", "y"), out_specs=P("x"), check_vma=check_vma
        )(jnp.arange(32.0).reshape(8, 4))
        assert total[0].tolist() == [2.0, 4.0]
        assert total.shape == (8, 2)

    def test_two_specs_for_one_object_are_refused(self, check_vma):
        model = Model()
        with pytest.raises(ab.errors.AliasError, match=r"args\[0\].*args\[1\]\[0\]"):
            ab.shard_map(
                lambda a, b: a.sum(),
                mesh=MESH,
                in_specs=(P("x"), P()),
                out_specs=P(),
                check_vma=check_vma,
            )(model.w, [model.w])
        same = ab.shard_map(
            lambda a, b: a + b,
            mesh=MESH,
            in_specs=(P("x"), P(("x",), None)),
            out_specs=P("x"),
            check_vma=check_vma,
        )
        assert same(model.w, model.w).tolist() == [2.0 * i for i in range(16)]

    def test_random_streams_have_a_policy(self, check_vma):
        """C8."""

        def f(rngs, x):
            return jax.random.normal(rngs()) + x

        def mapped(rngs):
            options = {"mesh": GRID, "in_specs": (P(), P(("x", "y"))), "check_vma": check_vma}
            return ab.shard_map(f, out_specs=P(("x", "y")), rngs=rngs, **options)

        rngs, x = ab.Rngs(0), jnp.zeros(DEVICES)
        with pytest.raises(ab.errors.SharedStreamError, match=r"rngs=.split.*rngs=.share"):
            mapped(None)(rngs, x)
        assert int(rngs.default.count.value) == 0
        key = rngs.default.key.value
        keys = jax.random.split(jax.random.fold_in(key, 0), DEVICES)
        expected = [float(jax.random.normal(jax.random.fold_in(k, 0))) for k in keys]
        assert jnp.allclose(mapped("split")(rngs, x), jnp.array(expected))
        assert rngs.default.key.value is key
        assert int(rngs.default.count.value) == 1
        shared = mapped("share")(rngs, x)
        assert len(set(shared.tolist())) == 1
        assert int(rngs.default.count.value) == 2

    def test_keyword_arguments_defaults_methods_and_names(self, check_vma):
        """C11."""

        class Scale(ab.Module):
            def __init__(self):
                self.calls = ab.Variable(jnp.zeros((), jnp.int32))

            def run(self, x, *, y, factor=2.0):
                self.calls.value = self.calls + 1
                return (x + y) * factor

        scale = Scale()
        x, y = jnp.arange(8.0), jnp.ones(8)
        by_name = ab.shard_map(
            scale.run,
            mesh=MESH,
            in_specs={"x": P("x"), "y": P("x"), "factor": P()},
            out_specs=P("x"),
            check_vma=check_vma,
        )
        assert by_name(x, y=y).tolist() == ((x + 1) * 2).tolist()
        assert by_name(y=y, x=x, factor=3.0).tolist() == ((x + 1) * 3).tolist()
        assert int(scale.calls.value) == 2
        with pytest.raises(ab.errors.StructureError, match="'z'"):
            ab.shard_map(scale.run, mesh=MESH, in_specs={"z": P()}, out_specs=P())(x, y=y)
        with pytest.raises(ab.errors.StructureError, match="'y'"):
            ab.shard_map(scale.run, mesh=MESH, in_specs=(P("x"),), out_specs=P("x"))(x, y=y)

    def test_failures_change_nothing(self, check_vma):
        def f(m):
            m.w.value = m.w * 2
            raise RuntimeError("device")

        model = Model()
        w = model.w.value
        with pytest.raises(RuntimeError, match="device"):
            ab.shard_map(f, mesh=MESH, in_specs=(BY_KIND,), out_specs=None, check_vma=check_vma)(
                model
            )
        assert model.w.value is w


class TestSpecs:
    def test_shapes_ranks_and_axes_are_checked_by_path(self):
        def run(spec, x, **options):
            return ab.shard_map(
                lambda x: x, mesh=MESH, in_specs=(spec,), out_specs=spec, **options
            )(x)

        with pytest.raises(ab.errors.StructureError, match=r"args\[0\].*6 elements.*8 devices"):
            run(P("x"), jnp.ones(6))
        with pytest.raises(ab.errors.StructureError, match=r"args\[0\].*rank 1"):
            run(P(None, "x"), jnp.ones(8))
        with pytest.raises(ab.errors.StructureError, match=r"args\[0\].*'z'"):
            run(P("z"), jnp.ones(8))
        with pytest.raises(ab.errors.StructureError, match="PartitionSpec"):
            run("x", jnp.ones(8))
        with pytest.raises(ab.errors.StructureError, match="axis_names has 'z'"):
            run(P("x"), jnp.ones(8), axis_names={"z"})
        with pytest.raises(ab.errors.StructureError, match=r"the return value.*rank 0"):
            ab.shard_map(lambda x: x.sum(), mesh=MESH, in_specs=P("x"), out_specs=P("x"))(
                jnp.ones(8)
            )

    def test_the_mesh_can_come_from_the_context(self):
        mapped = ab.shard_map(lambda x: x * 2, in_specs=P("x"), out_specs=P("x"))
        with pytest.raises(ab.errors.StructureError, match="mesh"):
            mapped(jnp.arange(8.0))
        with jax.set_mesh(MESH):
            assert mapped(jnp.arange(8.0)).tolist() == [2.0 * i for i in range(8)]

    def test_specs_can_be_those_of_the_arrays(self):
        axis_types = (jax.sharding.AxisType.Explicit,)
        mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=axis_types)

        def f(model, x):
            model["n"].value = model["n"] + jax.lax.psum(x.sum(), "x")
            model["x"].value = model["x"] * 2
            return x + jax.random.normal(model["rngs"]())

        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("x")))
            model = {"n": ab.Variable(jnp.zeros(())), "x": ab.Variable(x), "rngs": ab.Rngs(0)}
            mapped = ab.shard_map(f, out_specs=P("x"), rngs="split")
            out, again = ab.jit(mapped)(model, x), mapped(model, x)
        assert float(model["n"]) == 56.0
        assert model["x"].value.tolist() == [4.0 * i for i in range(8)]
        assert model["x"].value.sharding.spec == P("x")
        assert len(set((out - x).tolist() + (again - x).tolist())) == 16

    def test_some_axes_can_stay_automatic(self):
        v = ab.Param(jnp.arange(8.0))

        @ab.shard_map(mesh=GRID, in_specs=P("x"), out_specs=None, axis_names={"x"})
        def f(v):
            assert v.value.shape == (2,)
            v.value = v * 2

        f(v)
        assert v.value.tolist() == [2.0 * i for i in range(8)]

    def test_decorates_methods(self):
        class Counter(ab.Module):
            def __init__(self):
                self.n = ab.Variable(jnp.zeros(()))

            @ab.shard_map(mesh=MESH, in_specs={"self": None, "x": P("x")}, out_specs=P("x"))
            def add(self, x):
                self.n.value = self.n + jax.lax.psum(x.sum(), "x")
                return x - 1

        counter = Counter()
        assert counter.add(jnp.ones(8)).tolist() == [0.0] * 8
        assert float(counter.n.value) == 8.0
        assert Counter.add.__name__ == "add"

    def test_numbers_and_new_objects_come_out_by_out_specs(self):
        def f(x):
            return {"n": 3, "v": ab.Param(x), "text": "static"}

        out = ab.shard_map(
            f, mesh=MESH, in_specs=P("x"), out_specs={"n": P(), "v": P("x"), "text": P()}
        )(jnp.arange(8.0))
        assert type(out["n"]) is int
        assert out["n"] == 3
        assert out["v"].value.tolist() == list(range(8))
        assert out["text"] == "static"


class TestNesting:
    def test_inside_jit_types_tell_and_values_cannot(self):
        def f(m):
            m.n.value = jax.lax.pmean(m.w.value.sum(), "x")

        def mapped(check_vma):
            return ab.jit(
                ab.shard_map(f, mesh=MESH, in_specs=(BY_KIND,), out_specs=None, check_vma=check_vma)
            )

        model = Model()
        mapped(True)(model)
        assert float(model.n.value) == 15.0
        with pytest.raises(ab.errors.BroadcastWriteError, match="check_vma"):
            mapped(False)(model)

    def test_grad_of_sharded_data(self):
        v = ab.Param(jnp.array(2.0))

        def loss(v, x):
            return jax.lax.pmean((v * x).sum(), "x")

        mapped = ab.shard_map(loss, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
        grads = ab.grad(mapped)(v, jnp.arange(8.0))
        assert float(grads[()]) == 3.5


class Regression(ab.Module):
    def __init__(self):
        self.w = ab.Param(jnp.linspace(-1.0, 1.0, 3))
        self.b = ab.Param(jnp.zeros(()))
        self.seen = ab.BatchStat(jnp.zeros(()))

    def loss(self, x, y):
        self.seen.value = self.seen + x.mean()
        return ((x @ self.w + self.b - y) ** 2).mean()


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(x @ np.array([1.0, 2.0, 3.0], np.float32) + 0.5)


def train(step, steps=5):
    model = Regression()
    x, y = data()
    losses = [float(jnp.mean(step(model, x, y))) for _ in range(steps)]
    return losses, [np.asarray(v.value) for v in (model.w, model.b, model.seen)]


def update(model, x, y, mean):
    value, grads = ab.value_and_grad(lambda m: m.loss(x, y))(model)
    for name in ("w", "b"):
        v = getattr(model, name)
        v.value = v - 0.1 * mean(grads[name])
    model.seen.value = mean(model.seen.value)
    return mean(value)


class TestDataParallelTraining:
    def test_shard_map_and_pmap_on_eight_devices_equal_one_device(self):
        def mean(value):
            return jax.lax.pmean(value, "x")

        losses, expected = train(lambda m, x, y: update(m, x, y, lambda v: v))

        # gradients of what is equal on all devices are summed by JAX, where types say so
        def shard(m, x, y):
            def loss(m):
                return mean(m.loss(x, y))

            value, grads = ab.value_and_grad(loss)(m)
            for name in ("w", "b"):
                v = getattr(m, name)
                v.value = v - 0.1 * grads[name]
            m.seen.value = mean(m.seen.value)
            return value

        by_types = ab.shard_map(shard, mesh=MESH, in_specs=(P(), P("x"), P("x")), out_specs=P())
        by_values = ab.shard_map(
            lambda m, x, y: update(m, x, y, mean),
            mesh=MESH,
            in_specs=(P(), P("x"), P("x")),
            out_specs=P(),
            check_vma=False,
        )
        by_pmap = ab.pmap(
            lambda m, x, y: update(m, x, y, mean), axis_name="x", in_axes=(None, 0, 0)
        )

        def lanes(m, x, y):
            return by_pmap(m, x.reshape(8, 2, 3), y.reshape(8, 2))

        for step in (by_types, by_values, ab.jit(by_types), lanes):
            found_losses, found = train(step)
            assert np.allclose(found_losses, losses, rtol=1e-5)
            for a, b in zip(found, expected, strict=True):
                assert np.allclose(a, b, rtol=1e-5)
        assert losses[-1] < losses[0] / 2
