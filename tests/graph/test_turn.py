"""One thread at a time writes; a thread that writes already may write more."""

from __future__ import annotations

import sys
import threading
import time
import types

import pytest

from anabranch.graph import _turn
from anabranch.graph._turn import FREE, HOLDER, in_turn


def is_free() -> bool:
    return FREE == [None] and HOLDER.thread is None


def test_a_thread_waits_until_another_one_has_written() -> None:
    events: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    @in_turn
    def first() -> None:
        entered.set()
        assert leave.wait(10)
        events.append("first")

    @in_turn
    def second() -> None:
        events.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    time.sleep(0.02)
    assert events == []
    leave.set()
    for thread in threads:
        thread.join(10)
    assert events == ["first", "second"]
    assert is_free()


def test_many_threads_never_write_at_once() -> None:
    held = [0]

    @in_turn
    def add() -> None:
        seen = held[0]
        time.sleep(0)  # lets another thread run
        held[0] = seen + 1

    threads = [threading.Thread(target=lambda: [add() for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert held == [1600]
    assert is_free()


def test_a_thread_that_has_its_turn_may_take_it_again() -> None:
    @in_turn
    def count(depth: int) -> int:
        assert FREE == []
        return 0 if depth == 0 else 1 + count(depth - 1)

    assert count(5) == 5
    assert is_free()


def test_code_that_runs_anywhere_in_between_may_take_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler of a signal, or a finaliser, that writes."""

    def waited(_: float) -> None:
        raise AssertionError("the turn was nobody's")

    events: list[str] = []
    add = in_turn(events.append)

    def look(_: types.FrameType, event: str, __: object) -> None:
        if event in ("call", "c_return"):
            add(event)

    monkeypatch.setattr(_turn.time, "sleep", waited)
    sys.setprofile(look)
    try:
        add("itself")
    finally:
        sys.setprofile(None)
    assert events.count("itself") == 1
    assert len(events) > 4
    assert is_free()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_error_gives_the_turn_back(depth: int) -> None:
    @in_turn
    def fail(depth: int) -> None:
        if depth == 0:
            raise KeyboardInterrupt
        fail(depth - 1)

    with pytest.raises(KeyboardInterrupt):
        fail(depth)
    assert is_free()


def test_an_interrupt_of_one_that_waits_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    entered, leave = threading.Event(), threading.Event()

    @in_turn
    def hold() -> None:
        entered.set()
        assert leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with monkeypatch.context() as patched:
        patched.setattr(_turn.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            in_turn(lambda: None)()
    assert FREE == []
    leave.set()
    thread.join(10)
    assert is_free()
