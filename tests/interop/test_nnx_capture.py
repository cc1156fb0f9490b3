"""`sow` and `perturb` in modules of flax, also as flax writes them, under `capture` of ours."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import anabranch as ab
from anabranch.errors import AnabranchError, CapturedWriteError


class Block(nnx.Module):
    def __init__(self, scale: float) -> None:
        self.w = nnx.Param(jnp.asarray(scale))

    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "x", x)
        return self.perturb("y", self.w[...] * x)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b = Block(2.0), Block(3.0)

    def __call__(self, x: Any) -> Any:
        return self.b(self.a(x))


class OurBlock(ab.Module):
    """The same, one of ours."""

    def __init__(self, scale: float) -> None:
        self.w = ab.Param(jnp.asarray(scale))

    def __call__(self, x: Any) -> Any:
        ab.sow(self, "x", x)
        return ab.perturb(self, "y", self.w.value * x)


class MixedBlock(Block):
    """One of flax that records with the functions of ours."""

    def __call__(self, x: Any) -> Any:
        ab.sow(self, "x", x)
        return ab.perturb(self, "y", self.w[...] * x)


class OurNet(ab.Module):
    def __init__(self, block: Any = OurBlock) -> None:
        self.a, self.b = block(2.0), block(3.0)

    __call__ = Net.__call__


def numbers(state: ab.State) -> dict[Any, Any]:
    return {path: np.asarray(leaf).tolist() for path, leaf in state.flat().items()}


def kinds(state: ab.State) -> set[str]:
    return {info.kind.__name__ for info in state.infos}


def is_clean(*objects: Any) -> bool:
    for _, node in ab.iter_nodes(list(objects)):
        if not isinstance(node, nnx.Variable | ab.Variable) and hasattr(node, "__dict__"):
            assert not [name for name in vars(node) if "captures" in name or "record" in name]
    return True


XS = jnp.arange(1.0, 4.0)
MESH = Mesh(np.array(jax.devices()[:3]), "i")


def twice(net, xs):
    return net(net(xs))


def steps(net, xs):
    def step(h, net, x):
        return net(h + x), None

    return ab.scan(step, in_axes=(ab.Carry, None, 0))(0.0, net, xs)[0]


def layers(net, xs):
    net.a.w = type(net.a.w)(jnp.array([2.0, 3.0]))
    return ab.scan(lambda h, layer: (layer(h), None))(xs, net.a)[0]


def branches(net, xs):
    return ab.cond(xs.sum() > 3, lambda n, x: n(2 * x), lambda n, x: n(x), net, xs)


def gradient(net, xs):
    return ab.grad(lambda n, x: n(x).sum())(net, xs)["a"]["w"]


PROGRAMS = {
    "plainly": lambda net, xs: net(xs),
    "twice": twice,
    "jit": ab.jit(lambda n, x: n(x)),
    "vmap": ab.vmap(lambda n, x: n(x), in_axes=(None, 0)),
    "jit of vmap": lambda net, xs: ab.jit(ab.vmap(net))(xs),
    "pmap": ab.pmap(lambda n, x: n(x), in_axes=(None, 0)),
    "shard_map": ab.shard_map(
        lambda n, x: n(x),
        mesh=MESH,
        in_specs=(PartitionSpec(), PartitionSpec("i")),
        out_specs=PartitionSpec("i"),
    ),
    "remat": ab.remat(lambda n, x: n(x)),
    "scan": steps,
    "cond": branches,
    "grad": gradient,
    "scan over layers": layers,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_come_from_any_depth_and_through_every_transform_as_from_our_modules(name):
    program = PROGRAMS[name]
    made = [OurNet(), Net(), OurNet(Block), OurNet(MixedBlock)]
    results = []
    for net in made:
        out, state = ab.capture(program, ab.Intermediate, ab.Perturbation)(net, XS)
        results.append((np.asarray(out).tolist(), numbers(state)))
        assert is_clean(net)
        assert kinds(state) == {"Intermediate", "Perturbation"}
    assert results == results[:1] * len(made)


def test_a_perturbation_is_made_only_for_those_who_ask():
    assert ab.capture(Net())(1.0)[1].paths == (("a", "x", 0), ("b", "x", 0))
    assert ab.capture(Net(), nnx.Intermediate)(1.0)[1].paths == (("a", "x", 0), ("b", "x", 0))
    assert ab.capture(Net(), nnx.Perturbation)(1.0)[1].paths == (("a", "y"), ("b", "y"))
    assert (
        ab.capture(OurNet(), ab.Variable)(1.0)[1].paths
        == ab.capture(Net(), ab.Variable)(1.0)[1].paths
    )


def test_gradients_of_intermediate_values_are_those_of_flax():
    def loss(capture: Any) -> Any:
        def f(model, perturbations, x):
            return capture(model, nnx.Intermediate, init=perturbations)(x)

        return f

    _, theirs = nnx.capture(Net(), nnx.Perturbation)(1.5)
    (expected, expected_y), sown = nnx.grad(loss(nnx.capture), argnums=(0, 1), has_aux=True)(
        Net(), theirs, 1.5
    )
    _, ours = ab.capture(Net(), nnx.Perturbation)(1.5)
    assert numbers(ab.interop.from_nnx_state(theirs)) == numbers(ours)

    @ab.jit
    def step(model, ours, x):
        grads = ab.grad(loss(ab.capture), argnums=(0, 1), has_aux=True)
        (found, found_y), found_sown = grads(model, ours, x)
        return found, ab.State.union(found_y, found_sown)

    found, values = step(Net(), ours, 1.5)
    for state in (expected, expected_y):
        for path, x in numbers(ab.interop.from_nnx_state(state)).items():
            assert ab.State.union(found, values)[path] == x
    assert numbers(values.filter(ab.Not(ab.Perturbation))) == numbers(
        ab.interop.from_nnx_state(sown)
    )


@pytest.mark.parametrize("kind", [jax.Array, ab.Perturbation, nnx.Perturbation])
def test_perturbations_may_be_given_as_any_kind(kind):
    given = ab.State.from_flat({("a", "y"): jnp.array(0.5)}, kinds=kind)
    assert ab.capture(Net(), init=given)(1.0)[0] == (2 + 0.5) * 3
    assert ab.capture(OurNet(Block), init=given)(1.0)[0] == (2 + 0.5) * 3


def test_one_name_for_two_kinds_of_values_is_refused():
    class Other(nnx.Intermediate[Any]):
        pass

    class M(nnx.Module):
        def __call__(self, x: Any) -> None:
            for kind in (nnx.Intermediate, Other):
                self.sow(kind, "x", x, init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)

    with pytest.raises(AnabranchError, match="two names"):
        ab.capture(M())(1.0)


def test_values_that_a_function_reduces_are_one_value():
    class Sum(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "sum", x, init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            self.sow(nnx.Intermediate, "last", {"x": x}, init_fn=dict, reduce_fn=lambda a, b: b)
            self.sow(nnx.Intermediate, "all", {"x": x})
            return x + 1

    _, state = ab.capture(lambda m, x: m(m(x)))(Sum(), 1.0)
    assert numbers(state) == {
        (0, "sum"): 3.0,
        (0, "last", "x"): 2.0,
        (0, "all", 0, "x"): 1.0,
        (0, "all", 1, "x"): 2.0,
    }


def test_subclasses_of_a_kind_are_captured_and_others_are_not():
    class Loss(nnx.Intermediate[Any]):
        pass

    class M(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "x", x)
            self.sow(Loss, "loss", x)
            self.sow(nnx.Cache, "cache", x)

    assert [*ab.capture(M())(1.0)[1].paths] == [("x", 0), ("loss", 0)]
    assert [*ab.capture(M(), Loss)(1.0)[1].paths] == [("loss", 0)]
    _, state = ab.capture(M(), nnx.Cache, Loss)(1.0)
    assert state.filter(Loss).paths == (("loss", 0),)
    assert state.filter(ab.Cache).paths == (("cache", 0),)


def test_a_kind_in_the_place_of_the_function_makes_a_decorator():
    @ab.capture(nnx.Intermediate)
    def forward(net, x):
        return net(x)

    out, state = forward(Net(), 1.0)
    assert out == 6
    assert state.paths == ((0, "a", "x", 0), (0, "b", "x", 0))


def test_an_exception_leaves_nothing():
    def f(net, x):
        net(x)
        raise RuntimeError("late")

    net = Net()
    before = ab.graphdef(net)
    for function in (f, ab.jit(f), ab.vmap(f, in_axes=(None, 0))):
        with pytest.raises(RuntimeError, match="late"):
            ab.capture(function)(net, XS)
        assert is_clean(net)
        assert ab.graphdef(net) is before


def test_the_innermost_capture_that_asks_for_a_kind_gets_the_values():
    def inner(net, x):
        return ab.capture(lambda n, x: n(x))(net, x)

    (_, found), outer = ab.capture(inner, ab.Intermediate, ab.Perturbation)(Net(), 1.0)
    assert found.paths == ((0, "a", "x", 0), (0, "b", "x", 0))
    assert outer.paths == ((0, "a", "y"), (0, "b", "y"))


class TestCaptureOfFlax:
    """`nnx.capture` marks modules, and what it collects is written by the function."""

    @pytest.mark.parametrize("transform", [ab.jit, ab.remat])
    def test_it_collects_through_our_transforms(self, transform):
        net = Net()
        _, expected = nnx.capture(net, nnx.Intermediate)(1.0)
        _, state = nnx.capture(transform(lambda n, x: n(x)), nnx.Intermediate)(net, 1.0)
        assert numbers(ab.interop.from_nnx_state(state)) == numbers(
            ab.interop.from_nnx_state(expected)
        )
        assert is_clean(net)

    def test_what_a_capture_inside_does_not_ask_for_goes_out(self):
        def f(net, x):
            return ab.capture(lambda n, x: n(x), ab.Perturbation)(net, x)

        net = Net()
        (_, ours), theirs = nnx.capture(f, nnx.Intermediate)(net, 1.0)
        assert ours.paths == ((0, "a", "y"), (0, "b", "y"))
        assert theirs["b"]["x"].get_value() == (2.0,)
        assert is_clean(net)

    def test_it_collects_inside_of_ours(self):
        def f(net, x):
            return nnx.capture(net, nnx.Intermediate)(x)

        net = Net()
        (_, theirs), ours = ab.jit(ab.capture(f))(net, 1.0)
        assert theirs["b"]["x"].get_value() == (2.0,)
        assert ours.paths == ()
        assert is_clean(net)


def test_functions_of_flax_do_not_see_the_records():
    def f(net, x):
        graphdef, state = nnx.split(net)
        copy = nnx.merge(graphdef, state)
        assert nnx.to_flat_state(state).paths == (("a", "w"), ("b", "w"))
        assert len(jax.tree.leaves(net)) == 2
        assert len(list(nnx.iter_modules(copy))) == 3
        return copy(x)

    out, state = ab.capture(f)(Net(), 1.0)
    assert out == 6
    assert numbers(state) == {(0, "a", "x", 0): 1.0, (0, "b", "x", 0): 2.0}


def test_a_module_that_is_none_of_the_arguments_is_refused_by_name():
    hidden = types.SimpleNamespace(net=Net())

    def f(x):
        ab.sow(hidden.net, "x", x)

    with pytest.raises(CapturedWriteError, match="pass it as an argument"):
        ab.jit(ab.capture(f))(1.0)
    assert is_clean(hidden.net)


@pytest.mark.parametrize("lib", [nnx, jax])
def test_a_transform_that_cannot_bring_values_out_is_refused_only_if_there_are_any(lib):
    class Outer(nnx.Module):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, x: Any) -> Any:
            if lib is nnx:
                return nnx.remat(lambda inner, x: inner(x))(self.inner, x)
            return jax.jit(self.inner)(x)

    outer = Outer(Net())
    with pytest.raises(CapturedWriteError, match="use that of anabranch"):
        ab.capture(outer)(1.0)
    assert is_clean(outer)
    out, state = ab.capture(Outer(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))(jnp.ones(2))
    assert out.shape == (2,)
    assert state.paths == ()


def test_names_with_a_slash_and_objects_without_attributes_are_refused():
    class M(nnx.Module):
        def __call__(self, x: Any) -> None:
            self.sow(nnx.Intermediate, "a/b", x)

    with pytest.raises(AnabranchError, match="without '/'"):
        ab.capture(M())(1.0)
    with pytest.raises(TypeError, match="on a List"):
        ab.sow(nnx.List([]), "x", 1.0)
