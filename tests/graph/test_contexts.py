"""The four steps by hand, around plain JAX transforms."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab


class Foo(ab.Module):
    def __init__(self, a: float = 1.0) -> None:
        self.a = ab.Param(jnp.asarray(a))
        self.b = 2


def four_steps(transform: Any, m: Foo, tag: str = "tag") -> tuple[Any, Any]:
    with ab.update_context(tag):
        with ab.split_context(tag) as ctx:
            graphdef1, state1 = ctx.split(m)
            graphdef2, state2 = ctx.split(m)
        assert len(state2.leaves) == 0
        graphdef1, state1, graphdef2, state2 = transform(graphdef1, state1, graphdef2, state2)
        with ab.merge_context(tag) as ctx:
            m1_out = ctx.merge(graphdef1, state1)
            m2_out = ctx.merge(graphdef2, state2)
    return m1_out, m2_out


class Swap:
    """The traced function of the dialogue, counting its traces."""

    def __init__(self, tag: str = "tag") -> None:
        self.traces = 0
        self.tag = tag
        self.__name__ = "swap"

    def __call__(self, graphdef1: Any, state1: Any, graphdef2: Any, state2: Any) -> Any:
        self.traces += 1
        with ab.merge_context(self.tag) as ctx:
            m1 = ctx.merge(graphdef1, state1)
            m2 = ctx.merge(graphdef2, state2)
        assert m1 is m2
        m1.a, m1.b = m1.b, m1.a
        with ab.split_context(self.tag) as ctx:
            graphdef1, state1 = ctx.split(m1)
            graphdef2, state2 = ctx.split(m2)
        return graphdef1, state1, graphdef2, state2


class TestTheDialogue:
    def check(self, transform: Any, swap: Swap, traces: int, tag: str = "tag") -> None:
        for call in range(2):
            m = Foo(float(call))
            a = m.a
            m1_out, m2_out = four_steps(transform, m, tag)
            assert m is m1_out
            assert m is m2_out
            assert m.b is a
            assert m.a == 2
            assert jnp.all(a.value == float(call))
        assert swap.traces == traces

    def test_under_jit_with_a_warm_cache(self):
        swap = Swap()
        self.check(jax.jit(swap), swap, traces=1)

    def test_under_vmap(self):
        swap = Swap()
        mapped = jax.vmap(swap, axis_size=3, in_axes=None, out_axes=None)
        self.check(mapped, swap, traces=2)

    def test_under_jit_of_vmap(self):
        swap = Swap()
        mapped = jax.vmap(swap, axis_size=3, in_axes=None, out_axes=None)
        self.check(jax.jit(mapped), swap, traces=1)

    def test_under_grad(self):
        swap = Swap()

        def loss(state1, graphdef1, graphdef2, state2):
            out = swap(graphdef1, state1, graphdef2, state2)
            return out[1].leaves[0] * 3.0, out

        def transform(graphdef1, state1, graphdef2, state2):
            grads, out = jax.grad(loss, has_aux=True)(state1, graphdef1, graphdef2, state2)
            assert float(grads["a"]) == 3.0
            return out

        self.check(transform, swap, traces=2)

    def test_under_remat(self):
        swap = Swap()
        self.check(jax.checkpoint(swap, static_argnums=()), swap, traces=1)

    def test_without_a_transform_the_inner_steps_are_outer_ones(self):
        m = Foo()
        with ab.update_context("tag"):
            with ab.split_context("tag") as ctx:
                parts = ctx.split(m)
            with ab.merge_context("tag") as ctx:
                assert ctx.merge(*parts) is m

    def test_in_two_threads(self):
        swap = Swap()
        compiled = jax.jit(swap)
        failures: list[BaseException] = []
        barrier = threading.Barrier(2)

        def work(start: float) -> None:
            try:
                for i in range(20):
                    barrier.wait(10)
                    m = Foo(start + i)
                    a = m.a
                    m1_out, m2_out = four_steps(compiled, m)
                    assert m is m1_out is m2_out
                    assert m.b is a
                    assert float(a.value) == start + i
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(100.0 * i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


class TestTags:
    def test_two_at_once_do_not_see_each_other(self):
        m, n = Foo(1.0), Foo(5.0)
        m_a, n_a = m.a, n.a

        @jax.jit
        def both(parts_m, parts_n):
            out = []
            for tag, parts in (("m", parts_m), ("n", parts_n)):
                with ab.merge_context(tag) as ctx:
                    twin = ctx.merge(*parts)
                twin.a.value = twin.a.value * 2
                twin.c = twin.a
                with ab.split_context(tag) as ctx:
                    out.append(ctx.split(twin))
            return out

        with ab.update_context("m"), ab.update_context("n"):
            with ab.split_context("m") as ctx:
                parts_m = ctx.split(m)
            with ab.split_context("n") as ctx:
                parts_n = ctx.split(n)
            out_m, out_n = both(parts_m, parts_n)
            with ab.merge_context("m") as ctx:
                assert ctx.merge(*out_m) is m
            with ab.merge_context("n") as ctx:
                assert ctx.merge(*out_n) is n
        assert m.c is m.a is m_a
        assert n.c is n.a is n_a
        assert (float(m_a.value), float(n_a.value)) == (2.0, 10.0)

    def test_have_to_agree(self):
        with ab.update_context("x"), ab.update_context("y"):
            with ab.split_context("x") as ctx:
                parts = ctx.split(Foo())
            with (
                ab.merge_context("y") as ctx,
                pytest.raises(ab.errors.ContextTagError, match=r"'y'.*'x'"),
            ):
                ctx.merge(*parts)

    def test_need_an_update_context(self):
        with (
            pytest.raises(ab.errors.ContextTagError, match="update_context"),
            ab.split_context("nowhere"),
        ):
            raise AssertionError("not reached")

    def test_merging_out_of_order_is_refused(self):
        m = Foo()
        with ab.update_context("t"):
            with ab.split_context("t") as ctx:
                ctx.split(m)
                second = ctx.split([m])
            with (
                ab.merge_context("t") as ctx,
                pytest.raises(ab.errors.ContextTagError, match="order"),
            ):
                ctx.merge(*second)


class TestWhatComesBack:
    def test_new_objects_are_new_and_shared_ones_shared(self):
        m = Foo()

        @jax.jit
        def grow(graphdef, state):
            with ab.merge_context("t") as ctx:
                twin = ctx.merge(graphdef, state)
            twin.items = [ab.BatchStat(jnp.ones(2)), twin]
            twin.items.append(twin.items[0])
            with ab.split_context("t") as ctx:
                return ctx.split(twin)

        with ab.update_context("t"):
            with ab.split_context("t") as ctx:
                parts = ctx.split(m)
            parts = grow(*parts)
            with ab.merge_context("t") as ctx:
                ctx.merge(*parts)
        assert m.items[1] is m
        assert m.items[0] is m.items[2]
        assert type(m.items[0]) is ab.BatchStat

    def test_equal_answers_what_the_dialogue_asks(self):
        m = Foo()
        round_trip = ab.merge(*ab.split(m))
        assert round_trip is not m
        assert ab.equal(round_trip, m)
        round_trip.a.value = 7.0
        assert not ab.equal(round_trip, m)

    def test_a_change_in_between_is_not_overwritten(self):
        m = Foo()
        with ab.update_context("t"):
            with ab.split_context("t") as ctx:
                parts = ctx.split(m)
            m.extra = 1
            with (
                ab.merge_context("t") as ctx,
                pytest.raises(ab.errors.ConcurrentWriteError, match="Foo"),
            ):
                ctx.merge(*parts)
        assert m.extra == 1

    def test_several_rounds_in_one_context(self):
        traces = []

        @jax.jit
        def step(graphdef, state):
            traces.append(1)
            with ab.merge_context("t") as ctx:
                twin = ctx.merge(graphdef, state)
            twin.a.value = twin.a + 1
            with ab.split_context("t") as ctx:
                return ctx.split(twin)

        m = Foo()
        with ab.update_context("t"):
            for _ in range(3):
                with ab.split_context("t") as ctx:
                    parts = ctx.split(m)
                with ab.merge_context("t") as ctx:
                    assert ctx.merge(*step(*parts)) is m
        assert float(m.a.value) == 4.0
        assert len(traces) == 1

    def test_another_update_context_does_not_know_the_objects(self):
        with ab.update_context("t"), ab.split_context("t") as ctx:
            parts = ctx.split(Foo())
        with (
            ab.update_context("t"),
            ab.merge_context("t") as ctx,
            pytest.raises(ab.errors.ContextTagError, match="another update context"),
        ):
            ctx.merge(*parts)

    def test_a_context_that_was_left_splits_nothing(self):
        with ab.update_context("t"):
            with ab.split_context("t") as ctx:
                pass
            with pytest.raises(ab.errors.ContextTagError, match="was left"):
                ctx.split(Foo())

    def test_an_outer_object_is_not_split_inside(self):
        m = Foo()

        @jax.jit
        def f(graphdef, state):
            with ab.split_context("t") as ctx:
                return ctx.split(m)

        with ab.update_context("t"):
            with ab.split_context("t") as ctx:
                parts = ctx.split(m)
            with pytest.raises(ab.errors.CapturedWriteError, match="as a copy"):
                f(*parts)
