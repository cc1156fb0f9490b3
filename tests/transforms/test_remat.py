"""`remat` equals the plain call, its gradients those of JAX, and it is traced as often as JAX's."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import StructureError

X = jnp.array([0.3, 0.7])


class Block(ab.Module):
    def __init__(self, scale: float = 1.0) -> None:
        self.w = ab.Param(jnp.array([1.0, 2.0]) * scale)
        self.mean = ab.BatchStat(jnp.zeros(()))
        self.calls = 0

    def __call__(self, x, *, power=1):
        y = jnp.sin(self.w * x) ** power
        self.mean.value = self.mean + y.sum()
        return y


def pure(w, x):
    return jnp.sin(jnp.sin(w * x))


def counted(function, **options):
    runs = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        runs.append(1)
        return function(*args, **kwargs)

    return transforms.remat(call, **options), runs


def test_checkpoint_is_another_name():
    assert transforms.checkpoint is transforms.remat
    assert ab.checkpoint is ab.remat


class TestPlainCall:
    def test_state_is_written_once_a_call_and_the_function_traced_once(self):
        call, runs = counted(Block.__call__)
        plain, block = Block(), Block()
        for _ in range(4):
            assert np.allclose(call(block, X), plain(X))
        assert np.allclose(block.mean, plain.mean)
        assert len(runs) == 1
        call(Block(2.0), X)
        assert len(runs) == 1

    def test_structure_changes_come_back(self):
        @transforms.remat
        def change(a, b):
            a.w, b.w = b.w, a.w
            a.new = a.alias = ab.Cache(a.w * 2)
            a.me = a
            del b.calls
            a.calls += 1
            return b, a.new

        a, b = Block(1.0), Block(2.0)
        a_w, b_w = a.w, b.w
        same, new = change(a, b)
        assert same is b
        assert new is a.new is a.alias
        assert a.w is b_w
        assert b.w is a_w
        assert new.value.tolist() == [4.0, 8.0]
        assert a.me is a
        assert a.calls == 1
        assert not hasattr(b, "calls")

    def test_statics_are_part_of_the_key(self):
        def f(block, x, flag, *, power):
            return block(x, power=power) if flag else x

        call, runs = counted(f, static_argnums=2, static_argnames="power")
        block = Block()
        assert call(block, X, False, power=2) is X
        assert np.allclose(call(block, X, True, power=2), jnp.sin(block.w * X) ** 2)
        assert np.allclose(call(block, X, True, power=2), jnp.sin(block.w * X) ** 2)
        assert len(runs) == 2

    def test_methods_and_bound_methods(self):
        class Child(Block):
            @transforms.remat(policy=jax.checkpoint_policies.dots_saveable)
            def step(self, x, *, scale=1.0):
                """Doc."""
                return self(x) * scale

        child = Child()
        assert np.allclose(child.step(X, scale=2.0), 2 * jnp.sin(child.w * X))
        assert Child.step.__doc__ == "Doc."
        block = Block()
        call = transforms.remat(block)
        call(X)
        call(X)
        assert np.allclose(block.mean, 2 * jnp.sin(block.w * X).sum())

    @pytest.mark.parametrize(
        "transform", [transforms.remat, transforms.checkify, transforms.lift(jax.checkpoint)]
    )
    def test_constants_come_back_as_arrays(self, transform):
        def f(block):
            block.w.value = jnp.array([5.0, 6.0])

        block = Block()
        transform(f)(block)
        assert isinstance(block.w.value, jax.Array)
        assert block.w.value.tolist() == [5.0, 6.0]

    def test_failures_change_nothing(self):
        @transforms.remat
        def f(block, x):
            block(x)
            block.new = 1
            raise KeyError("no")

        block = Block()
        before, mean = dict(vars(block)), block.mean.value
        with pytest.raises(KeyError):
            f(block, X)
        assert dict(vars(block)) == before
        assert block.mean.value is mean

    def test_captured_objects_are_written_and_returned(self):
        outer, plain = Block(), Block()
        assert transforms.remat(lambda: outer(X))().tolist() == plain(X).tolist()
        assert float(outer.mean) == float(plain.mean) != 0.0
        assert transforms.remat(lambda: outer)() is outer
        assert transforms.remat(lambda: [outer.w])()[0] is outer.w

    def test_a_dropped_model_is_collected(self):
        call = transforms.remat(Block.__call__)
        block = Block()
        call(block, X)
        gone = weakref.ref(block)
        del block
        gc.collect()
        assert gone() is None


class TestGradients:
    @pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
    def test_equal_those_of_jax_with_state_written_once(self, policy):
        call, runs = counted(Block.__call__, policy=policy)
        block = Block()

        def loss(block, x):
            return call(block, call(block, x)).sum()

        for jit in (False, True):
            block.mean.value = jnp.zeros(())
            step = transforms.grad(loss)
            grads = (transforms.jit(step) if jit else step)(block, X)
            expected = jax.grad(lambda w: jnp.sin(w * jnp.sin(w * X)).sum())(block.w.value)
            assert np.allclose(grads["w"], expected, rtol=1e-5)
            y = jnp.sin(block.w * X)
            assert np.allclose(block.mean, y.sum() + jnp.sin(block.w * y).sum())
        assert len(runs) == 1

    def test_values_are_computed_again(self):
        def count(transform):
            step = transforms.grad(lambda w, x: transform(pure)(w, x).sum())
            jaxpr = jax.make_jaxpr(step)(X, X)
            return str(jaxpr).count(" sin ")

        assert count(transforms.remat) > count(lambda f: f)
        saved = functools.partial(
            transforms.remat, policy=jax.checkpoint_policies.everything_saveable
        )
        assert count(saved) < count(transforms.remat)

    def test_dropout_draws_one_mask_for_both_passes(self):
        rngs = ab.Rngs(0)

        @transforms.remat
        def drop(rngs, x):
            return x * jax.random.bernoulli(rngs.params(), 0.5, x.shape)

        x = jnp.ones(100)

        def loss(x, rngs):
            y = drop(rngs, x)
            return y.sum(), y

        step = transforms.value_and_grad(loss, has_aux=True)
        (_, mask), grads = step(x, rngs)
        assert grads.tolist() == mask.tolist()
        assert 0 < float(mask.sum()) < 100
        (_, other), _ = step(x, rngs)
        assert other.tolist() != mask.tolist()


class TestNesting:
    def test_in_vmap_and_of_itself(self):
        inner = transforms.remat(Block.__call__)
        outer = transforms.remat(lambda block, x: inner(block, inner(block, x)))
        block = Block()
        batch = jnp.stack([X, 2 * X])
        f = transforms.vmap(
            lambda block, x: (outer(block, x), block.mean.value)[0],
            in_axes=(ab.StateAxes({ab.BatchStat: 0, ...: None}), 0),
        )
        block.mean.value = jnp.zeros(2)
        out = f(block, batch)
        w = block.w.value
        assert np.allclose(out, jnp.sin(w * jnp.sin(w * batch)))
        expected = jnp.sin(w * batch).sum(1) + jnp.sin(w * jnp.sin(w * batch)).sum(1)
        assert np.allclose(block.mean, expected)

    def test_inside_plain_jax_transforms(self):
        """C9: the method only reads."""
        block = Block()
        read = transforms.remat(lambda block, x: jnp.sin(block.w * x))
        expected = jnp.sin(block.w * X)
        assert np.allclose(jax.jit(lambda x: read(block, x))(X), expected)
        assert np.allclose(jax.vmap(lambda x: read(block, x))(X[None])[0], expected)
        out = jax.lax.scan(lambda c, x: (c, read(block, x)), 0, X[None])[1]
        assert np.allclose(out[0], expected)
        assert list(vars(block)) == ["w", "mean", "calls"]


class TestOptions:
    def test_a_ref_is_refused_by_path(self):
        ref = jax.new_ref(jnp.zeros(()))
        with pytest.raises(StructureError, match=r"args\[0\]\['r'\]: a jax.Ref"):
            transforms.remat(lambda t: t["r"])({"r": ref})
        read = transforms.remat(lambda t, x: t["r"][...] + x)
        assert float(transforms.jit(transforms.remat(lambda y: y + 1))(1.0)) == 2.0
        with pytest.raises(StructureError, match=r"args\[0\]\['r'\]: a jax.Ref"):
            transforms.jit(read)({"r": ref}, 1.0)

    def test_prevent_cse_is_a_bool(self):
        block = Block()
        call = transforms.remat(Block.__call__, prevent_cse=False)
        assert np.allclose(call(block, X), jnp.sin(block.w * X))
        with pytest.raises(StructureError, match="prevent_cse"):
            transforms.remat(Block.__call__, prevent_cse=(1, 2))(block, X)
        with pytest.raises(StructureError, match="2 entries"):
            transforms.remat(Block.__call__, prevent_cse=(True, True))(block, X, 1)
