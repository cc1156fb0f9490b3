"""`sow`, `perturb` and `capture`: values from any depth, and nothing left behind."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab


class Block(ab.Module):
    def __init__(self, scale):
        self.w = ab.Param(jnp.asarray(scale))

    def __call__(self, x):
        ab.sow(self, "x", x)
        return ab.perturb(self, "y", self.w * x)


class Net(ab.Module):
    def __init__(self):
        self.a, self.b = Block(2.0), Block(3.0)
        self.calls = ab.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.b(self.a(x))


def flat(state):
    return {path: jnp.asarray(leaf).tolist() for path, leaf in state.flat().items()}


def is_clean(*modules):
    for _, node in ab.iter_nodes(list(modules)):
        assert not isinstance(node, ab.Intermediate | ab.Perturbation)
        if isinstance(node, ab.Module):
            assert not [name for name in vars(node) if "record" in name]
    return True


class TestCapture:
    def test_without_a_capture_nothing_is_recorded(self):
        net = Net()
        before = ab.graphdef(net)
        assert float(net(1.0)) == 6.0
        assert float(ab.jit(lambda n, x: n(x))(net, 1.0)) == 6.0
        assert ab.graphdef(net) is before
        assert is_clean(net)

    def test_collects_by_the_paths_of_the_modules(self):
        net = Net()
        before = ab.graphdef(net)
        out, state = ab.capture(net)(1.0)
        assert float(out) == 6.0
        assert flat(state) == {("a", "x", 0): 1.0, ("b", "x", 0): 2.0}
        assert state.infos[0].kind is ab.Intermediate
        assert ab.graphdef(net) is before

    def test_paths_in_arguments_begin_with_the_argument(self):
        out, state = ab.capture(lambda x, net, *, other: net(x) + other(x))(1.0, Net(), other=Net())
        assert float(out) == 12.0
        assert [*flat(state)] == [
            (1, "a", "x", 0),
            (1, "b", "x", 0),
            ("other", "a", "x", 0),
            ("other", "b", "x", 0),
        ]

    def test_transformed_modules_methods_and_partials(self):
        net, xs = Net(), jnp.arange(3.0)
        stacked = {("a", "x", 0): [0.0, 1.0, 2.0], ("b", "x", 0): [0.0, 2.0, 4.0]}
        for f in (ab.vmap(net), ab.vmap(net.__call__), ab.jit(ab.vmap(net))):
            out, state = ab.capture(f)(xs)
            assert out.tolist() == [0.0, 6.0, 12.0]
            assert flat(state) == stacked
        _, state = ab.capture(functools.partial(lambda n, x: n(x), net))(1.0)
        assert flat(state) == {(0, "a", "x", 0): 1.0, (0, "b", "x", 0): 2.0}
        assert is_clean(net)

    def test_a_name_can_be_used_again(self):
        block = Block(2.0)
        _, state = ab.capture(lambda b, x: b(b(x)))(block, 1.0)
        assert flat(state) == {(0, "x", 0): 1.0, (0, "x", 1): 2.0}

    def test_writes_of_the_function_come_back_and_identity_holds(self):
        def f(net):
            net.calls.value = net.calls + 1
            net.again = net.a
            return net

        net = Net()
        calls = net.calls
        out, _ = ab.capture(f)(net)
        assert out is net
        assert net.again is net.a
        assert net.calls is calls
        assert int(calls.value) == 1
        assert is_clean(net)

    def test_pytrees_variables_and_other_kinds(self):
        class Loss(ab.Variable):
            pass

        def f(block, x):
            ab.sow(block, "pair", {"x": x, "y": (x, block.w.value)})
            ab.sow(block, "loss", block.w, kind=Loss)

        block = Block(2.0)
        _, state = ab.capture(lambda b: f(b, jnp.ones(2)))(block)
        assert flat(state) == {
            (0, "pair", 0, "x"): [1.0, 1.0],
            (0, "pair", 0, "y", 0): [1.0, 1.0],
            (0, "pair", 0, "y", 1): 2.0,
        }
        _, state = ab.capture(f, ab.Intermediate, Loss)(block, 1.0)
        assert flat(state)[0, "loss", 0] == 2.0
        assert state.filter(Loss).paths == ((0, "loss", 0),)

    def test_objects_that_are_no_modules(self):
        @dataclasses.dataclass
        class Layer:
            w: ab.Param

        def f(layer, x):
            ab.sow(layer, "x", x)

        layer = Layer(ab.Param(1.0))
        _, state = ab.capture(f)(layer, 2.0)
        assert flat(state) == {(0, "x", 0): 2.0}
        assert vars(layer) == {"w": layer.w}
        with pytest.raises(TypeError, match="on a list"):
            ab.sow([], "x", 1.0)
        with pytest.raises(ValueError, match="without '/'"):
            ab.sow(layer, "a/b", 1.0)

    def test_an_exception_leaves_nothing(self):
        def f(net, x):
            net(x)
            raise RuntimeError("late")

        net = Net()
        before = ab.graphdef(net)
        for function in (f, ab.jit(f), ab.vmap(f, in_axes=(None, 0))):
            with pytest.raises(RuntimeError, match="late"):
                ab.capture(function)(net, jnp.ones(2))
            assert ab.graphdef(net) is before

    def test_copies_that_the_function_makes_are_clean(self):
        def f(net, x):
            net(x)
            return ab.clone(net)

        net = Net()
        copy, state = ab.capture(f)(net, 1.0)
        assert is_clean(net, copy)
        assert len(state.leaves) == 2

    def test_the_innermost_capture_that_asks_gets_the_value(self):
        class Loss(ab.Variable):
            pass

        def g(net, x):
            ab.sow(net, "loss", x, kind=Loss)
            return net(x)

        def f(net, x):
            ab.sow(net, "first", x)
            out, inner = ab.capture(g, Loss)(net, x)
            assert is_clean_inside(net)
            return out, inner

        def is_clean_inside(net):
            return not any(isinstance(node, Loss) for _, node in ab.iter_nodes(net))

        net = Net()
        (_, inner), outer = ab.capture(f)(net, 1.0)
        assert flat(inner) == {(0, "loss", 0): 1.0}
        assert flat(outer) == {(0, "first", 0): 1.0, (0, "a", "x", 0): 1.0, (0, "b", "x", 0): 2.0}
        assert is_clean(net)

    def test_modules_that_are_made_and_attached(self):
        def f(net, xs):
            def lane(net, x):
                net.late = Block(5.0)
                Block(7.0)(x)  # nobody can say where it is
                return net.late(x)

            return ab.vmap(lane, in_axes=(None, 0))(net, xs)

        net = Net()
        out, state = ab.capture(f)(net, jnp.arange(3.0))
        assert out.tolist() == [0.0, 5.0, 10.0]
        assert flat(state) == {(0, "late", "x", 0): [0.0, 1.0, 2.0]}
        assert is_clean(net)

    def test_captured_modules_have_their_names_for_a_path(self):
        net = Net()

        def call(x):
            return net(x)

        for f in (call, ab.jit(call), ab.vmap(call)):
            out, state = ab.capture(f)(jnp.ones(2))
            assert out.tolist() == [6.0, 6.0]
            assert flat(state) == {
                ("net", "a", "x", 0): [1.0, 1.0],
                ("net", "b", "x", 0): [2.0, 2.0],
            }
            assert is_clean(net)
            assert f(jnp.ones(2)).tolist() == [6.0, 6.0]

        def write(other):
            net.calls.value = net.calls + 1

        ab.capture(write)(Net())
        assert int(net.calls.value) == 1

    def test_modules_that_nobody_can_foresee_are_refused(self):
        hidden = types.SimpleNamespace(net=Net())

        def call(x):
            return hidden.net(x)

        for f in (call, ab.jit(call), ab.vmap(call)):
            with pytest.raises(ab.errors.CapturedWriteError, match=r"Block.*argument"):
                ab.capture(f)(jnp.ones(2))
            assert is_clean(hidden.net)
            assert f(jnp.ones(2)).tolist() == [6.0, 6.0]

    def test_threads_do_not_see_each_other(self):
        net, states, failures = Net(), {}, []

        def run(i):
            try:
                for _ in range(5):
                    states[i] = flat(ab.capture(net)(float(i))[1])
                    net(1.0)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert states == {i: {("a", "x", 0): float(i), ("b", "x", 0): 2.0 * i} for i in range(4)}
        assert is_clean(net)

    def test_decorates_methods_and_takes_only_kinds(self):
        class Model(ab.Module):
            def __init__(self):
                self.block = Block(2.0)

            @ab.capture
            def run(self, x, *, twice=1.0):
                return self.block(x * twice)

        out, state = Model().run(1.0, twice=2.0)
        assert float(out) == 4.0
        assert flat(state) == {(0, "block", "x", 0): 2.0}
        with pytest.raises(TypeError, match="kinds"):
            ab.capture(lambda: 0, "x")

    def test_a_compiled_function_is_traced_once_for_each_way(self):
        traces = []

        @ab.jit
        def f(net, x):
            traces.append(1)
            return net(x)

        net = Net()
        for _ in range(3):
            f(net, 1.0)
            assert len(ab.capture(f)(net, 1.0)[1].leaves) == 2
        assert len(traces) == 2


X = jnp.arange(1.0, 4.0)


class TestTransforms:
    """C19."""

    def check(self, function, expected, *args):
        net = Net()
        before = ab.graphdef(net)
        out, state = ab.capture(function)(net, *args)
        got = {path[1:]: leaf for path, leaf in flat(state).items()}
        assert got == expected
        assert ab.graphdef(net) is before
        return out

    def test_jit_grad_remat_and_vjp(self):
        once = {("a", "x", 0): 2.0, ("b", "x", 0): 4.0}
        self.check(ab.jit(lambda n, x: n(x)), once, 2.0)
        self.check(ab.remat(lambda n, x: n(x)), once, 2.0)
        grads = self.check(ab.grad(lambda n, x: n(x)), once, 2.0)
        assert float(grads["a", "w"]) == 6.0
        self.check(lambda n, x: ab.vjp(lambda n: n(x), n)[0], once, 2.0)
        self.check(ab.jit(ab.grad(ab.remat(lambda n, x: n(x)))), once, 2.0)

    def test_vmap_stacks_whether_the_module_is_broadcast_or_mapped(self):
        stacked = {("a", "x", 0): [1.0, 2.0, 3.0], ("b", "x", 0): [2.0, 4.0, 6.0]}
        self.check(ab.vmap(lambda n, x: n(x), in_axes=(None, 0)), stacked, X)
        axes = ab.StateAxes({ab.Param: None, ...: None})
        self.check(ab.vmap(lambda n, x: n(x), in_axes=(axes, 0)), stacked, X)
        self.check(lambda n, x: ab.vmap(n)(x), stacked, X)
        lanes = Net()
        for block in (lanes.a, lanes.b):
            block.w.value = block.w * jnp.ones(3)
        lanes.calls.value = jnp.zeros(3)
        _, state = ab.capture(ab.vmap(lambda n, x: n(x)))(lanes, X)
        assert {path[1:]: leaf for path, leaf in flat(state).items()} == stacked

    def test_vmap_of_vmap_and_what_was_sown_around_it(self):
        def f(n, x):
            ab.sow(n.a, "x", 10.0)
            inner = ab.vmap(lambda n, x: n(x), in_axes=(None, 0))
            ab.vmap(inner, in_axes=(None, 0))(n, x)
            ab.sow(n.a, "x", 20.0)

        x = X[None, :] * jnp.ones((2, 1))
        row = [1.0, 2.0, 3.0]
        self.check(
            f,
            {
                ("a", "x", 0): 10.0,
                ("a", "x", 1): [row, row],
                ("a", "x", 2): 20.0,
                ("b", "x", 0): [[2.0, 4.0, 6.0]] * 2,
            },
            x,
        )

    def test_pmap_and_shard_map_stack_over_devices(self):
        x = jnp.arange(8.0)
        stacked = {("a", "x", 0): x.tolist(), ("b", "x", 0): (2 * x).tolist()}
        self.check(ab.pmap(lambda n, x: n(x), in_axes=(None, 0)), stacked, x)
        mesh = jax.sharding.Mesh(jax.devices()[:8], ("i",))
        spec = jax.sharding.PartitionSpec("i")
        local = {path: [[v] for v in values] for path, values in stacked.items()}
        for check_vma in (True, False):
            mapped = ab.shard_map(
                lambda n, x: n(x),
                mesh=mesh,
                in_specs={"n": None, "x": spec},
                out_specs=spec,
                check_vma=check_vma,
            )
            self.check(mapped, local, x)

    def test_scan_stacks_over_steps(self):
        def f(n, x):
            ab.sow(n, "before", x[0])

            def step(carry, x, n):
                return carry + n(x), x

            return ab.scan(step, in_axes=(ab.Carry, 0, None))(0.0, x, n)

        self.check(
            f,
            {
                ("before", 0): 1.0,
                ("a", "x", 0): [1.0, 2.0, 3.0],
                ("b", "x", 0): [2.0, 4.0, 6.0],
            },
            X,
        )

    def test_scan_over_layers_inside_remat_inside_grad_inside_jit(self):
        def loss(stack, x):
            @ab.remat
            def layer(h, block):
                return block(h), None

            h, _ = ab.scan(layer)(x, stack)
            return h

        stack = Block(X)
        grads, state = ab.capture(ab.jit(ab.grad(loss)))(stack, 1.0)
        assert flat(state) == {(0, "x", 0): [1.0, 1.0, 2.0]}
        assert grads["w"].tolist() == [6.0, 3.0, 2.0]
        assert is_clean(stack)

    def test_fori_loop_stacks_if_the_number_of_steps_is_known(self):
        def loop(n, x, stop=3):
            def body(i, carry):
                return carry[0], carry[0].a(carry[1])

            return ab.fori_loop(0, stop, body, (n, x))[1]

        out = self.check(loop, {("a", "x", 0): [1.0, 2.0, 4.0]}, 1.0)
        assert float(out) == 8.0
        self.check(ab.jit(loop, static_argnames="stop"), {("a", "x", 0): [1.0, 2.0, 4.0]}, 1.0)
        net = Net()
        with pytest.raises(ab.errors.StructureError, match=r"(?s)recorded.*number of steps.*scan"):
            ab.capture(ab.jit(loop))(net, 1.0, 3)
        assert is_clean(net)

    def test_while_loop_cannot_stack(self):
        def in_body(n, x):
            return ab.while_loop(lambda c: c[1] < 9, lambda c: (c[0], c[0](c[1])), (n, x))[1]

        def in_condition(n, x):
            return ab.while_loop(lambda c: c[0](c[1]) < 9, lambda c: (c[0], c[1] + 1), (n, x))[1]

        net = Net()
        for loop in (in_body, in_condition):
            with pytest.raises(ab.errors.StructureError, match=r"(?s)recorded.*number of steps"):
                ab.capture(loop)(net, 1.0)
            assert is_clean(net)
            assert float(loop(net, 1.0)) > 1

    def test_map_stacks(self):
        def f(blocks, x):
            return ab.map(lambda pair: pair[0](pair[1]), (blocks, x))

        blocks = Block(X)
        out, state = ab.capture(f)(blocks, X)
        assert out.tolist() == [1.0, 4.0, 9.0]
        assert flat(state) == {(0, "x", 0): [1.0, 2.0, 3.0]}
        assert is_clean(blocks)

    def test_cond_and_switch(self):
        def f(n, x):
            return ab.cond(x > 1, lambda n, x: n(x), lambda n, x: n(-x), n, x)

        self.check(f, {("a", "x", 0): 2.0, ("b", "x", 0): 4.0}, 2.0)
        self.check(ab.jit(f), {("a", "x", 0): -1.0, ("b", "x", 0): -2.0}, 1.0)

    def test_branches_record_the_same(self):
        net = Net()
        with pytest.raises(ab.errors.StructureError, match="x/0"):
            ab.capture(ab.cond)(True, lambda n: n(1.0), lambda n: 1.0, net)
        assert is_clean(net)


class TestPerturb:
    def test_without_a_capture_it_returns_its_value(self):
        block = Block(2.0)
        x = jnp.ones(3)
        assert ab.perturb(block, "x", x) is x
        assert is_clean(block)

    def test_gradients_of_intermediate_values(self):
        net = Net()
        _, zeros = ab.capture(net, ab.Perturbation)(5.0)
        assert flat(zeros) == {("a", "y"): 0.0, ("b", "y"): 0.0}

        def loss(zeros):
            out, state = ab.capture(net, ab.Intermediate, init=zeros)(5.0)
            return out**2, state

        grads, state = ab.grad(loss, has_aux=True)(zeros)
        # out = 30: d(out^2)/d(out) = 60, and 3 times that in front of the second block
        assert flat(grads) == {("a", "y"): 180.0, ("b", "y"): 60.0}
        assert flat(state) == {("a", "x", 0): 5.0, ("b", "x", 0): 10.0}
        assert is_clean(net)

    def test_through_vmap_scan_and_jit(self):
        def by_lane(n, x):
            return ab.vmap(n)(x).sum()

        def by_step(n, x):
            return ab.scan(lambda c, x, n: (c + n(x), None), in_axes=(ab.Carry, 0, None))(
                0.0, x, n
            )[0]

        def by_count(n, x):
            def body(i, carry):
                n, x, total = carry
                return n, x, total + n(x[i])

            return ab.fori_loop(0, 3, body, (n, x, 0.0))[2]

        compiled = [ab.jit(by_lane), ab.jit(by_step), ab.remat(by_lane)]
        for f in (by_lane, by_step, by_count, *compiled):
            net = Net()
            _, zeros = ab.capture(f, ab.Perturbation)(net, X)
            assert flat(zeros) == {(0, "a", "y"): [0.0] * 3, (0, "b", "y"): [0.0] * 3}
            grads = ab.grad(lambda z, f=f, net=net: ab.capture(f, init=z)(net, X)[0] ** 2)(zeros)
            # the sum is 36
            assert flat(grads) == {(0, "a", "y"): [216.0] * 3, (0, "b", "y"): [72.0] * 3}
            moved = jax.tree.map(lambda z: z + 1, zeros)
            assert float(ab.capture(f, init=moved)(net, X)[0]) == 36.0 + 3 * 3 + 3

    def test_over_devices(self):
        x = jnp.arange(8.0)
        mesh = jax.sharding.Mesh(jax.devices()[:8], ("i",))
        spec = jax.sharding.PartitionSpec("i")
        mapped = ab.shard_map(
            lambda n, x: n(x), mesh=mesh, in_specs={"n": None, "x": spec}, out_specs=spec
        )
        net = Net()
        _, zeros = ab.capture(mapped, ab.Perturbation)(net, x)
        grads = ab.grad(lambda z: ab.capture(mapped, init=z)(net, x)[0].sum())(zeros)
        assert grads[0]["a"]["y"].ravel().tolist() == [3.0] * 8
        assert grads[0]["a"]["y"].shape == (8, 1)

    def test_grad_inside_the_capture_selects_by_kind(self):
        def loss(n, x):
            return n(x) ** 2

        net = Net()
        _, zeros = ab.capture(loss, ab.Perturbation)(net, 5.0)
        by_kind = ab.grad(loss, argnums=ab.DiffState(0, ab.Perturbation))
        grads, state = ab.capture(by_kind, ab.Intermediate, init=zeros)(net, 5.0)
        assert [float(leaf) for leaf in grads.leaves] == [180.0, 60.0]
        assert flat(state)[0, "b", "x", 0] == 10.0
        assert is_clean(net)

    def test_what_does_not_fit_is_refused(self):
        net = Net()
        _, zeros = ab.capture(net, ab.Perturbation)(jnp.ones(2))
        with pytest.raises(ab.errors.StructureError, match=r"'y'.*\(3,\).*\(2,\)"):
            ab.capture(net, init=zeros)(jnp.ones(3))
        with pytest.raises(ab.errors.UpdateError, match=r"\['a'\]\['y'\]"):
            ab.capture(Block(1.0), init=zeros)(jnp.ones(2))
        assert is_clean(net)

    def test_a_name_that_is_used_again_has_the_sum(self):
        block = Block(2.0)

        def f(b, x):
            return b(b(x))

        _, zeros = ab.capture(f, ab.Perturbation)(block, 1.0)
        grads = ab.grad(lambda z: ab.capture(f, init=z)(block, 1.0)[0])(zeros)
        assert flat(grads) == {(0, "y"): 3.0}
