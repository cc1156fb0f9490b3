"""The frame below which a function runs is large: everything works as below a small one."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch.transforms._box import run_inside
from anabranch.transforms._room import with_room


def test_the_box_has_room_for_the_frames_of_a_trace():
    # more than half of a chunk of 16,384 words, so that it never shares one with what is above
    assert run_inside.__code__.co_stacksize > 16_384 // 2


def test_a_function_with_room_is_the_same_function():
    def divide(a, b=2, *, c=1):
        """Divide."""
        return a / b + c + extra

    extra = 1
    same = with_room(divide)
    assert same is divide
    assert (same(4), same(4, 4, c=2), same.__doc__) == (4.0, 4.0, "Divide.")
    with pytest.raises(ZeroDivisionError) as info:
        same(1, 0)
    assert info.traceback[-1].name == "divide"
    assert info.traceback[-1].frame.f_locals == {"a": 1, "b": 0, "c": 1, "extra": 1}


@pytest.mark.parametrize("in_thread", [False, True])
def test_boxes_may_be_nested_until_python_gives_up(in_thread):
    m, depths = {"v": ab.Variable(jnp.zeros(2))}, []

    def f(m, x):
        depths.append(len(depths))
        m["v"].value += 1
        return ab.vmap(f, in_axes=(None, 0))(m, x[None])

    def run():
        with pytest.raises(RecursionError):
            f(m, jnp.zeros(()))

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert len(depths) > 5
    assert m["v"].value.tolist() == [1.0, 1.0]  # by the plain call around all of them
