"""Few writes at the end of a call are made in one line, where no other thread can come in."""

from __future__ import annotations

import dataclasses
import dis
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch as ab
from anabranch.graph._turn import FREE, HAS_LOCK, in_turn
from anabranch.transforms._follower import FILE

pytestmark = pytest.mark.skipif(not HAS_LOCK, reason="threads run at the same time")

CALLS = 8


class Counter(ab.Module):
    def __init__(self) -> None:
        self.count = ab.Variable(jnp.array(0))
        self.mean, self.total = ab.Variable(jnp.zeros(2)), ab.BatchStat(jnp.array(0))
        self.array = jnp.array(0)


@dataclasses.dataclass
class Data:
    array: Any
    other: Any


class Flax(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.array(0))
        self.rest = nnx.Dict({f"v{i}": nnx.Param(jnp.ones(2)) for i in range(8)})


def count(counter: Any) -> None:
    counter.count[...] += 1


def count_all(counter: Counter) -> Any:
    counter.count[...] += 1
    counter.mean.value = counter.mean.value + counter.count.value
    counter.total.value = counter.total.value + 1
    return counter.total.value * 2


def count_both(counter: Counter, variable: ab.Variable[Any]) -> None:
    counter.count[...] += 1
    variable.value = variable.value + 1


def add(holder: Any) -> None:
    holder.array = holder.array + 1


def add_item(held: dict[str, Any]) -> None:
    held["a"] = held["a"] + 1


FORMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "one Variable": (count, lambda: (Counter(),)),
    "three Variables": (count_all, lambda: (Counter(),)),
    "a Variable of a Module and an argument": (
        count_both,
        lambda: (Counter(), ab.Variable(jnp.array(0))),
    ),
    "an attribute of a Module": (add, lambda: (Counter(),)),
    "a field": (add, lambda: (Data(jnp.array(0), jnp.ones(2)),)),
    "an item": (add_item, lambda: ({"a": jnp.array(0), "b": jnp.ones(2)},)),
    "a Variable of flax": (count, lambda: (Flax(),)),
}
_CALLS_NOTHING = frozenset(
    """
    LOAD_FAST LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_CONST LOAD_ATTR BINARY_SUBSCR BINARY_OP IS_OP
    CONTAINS_OP TO_BOOL COPY SWAP STORE_SUBSCR STORE_ATTR POP_TOP PUSH_NULL EXTENDED_ARG CACHE NOP
    POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE
    POP_JUMP_IF_NOT_NONE POP_JUMP_FORWARD_IF_NOT_NONE JUMP_FORWARD
    """.split()
)
_CALLS = frozenset({"PRECALL", "CALL", "CALL_FUNCTION_EX"})


def followed(form: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a compiled function, its arguments and the follower that makes its calls."""
    function, make = FORMS[form]
    jitted, args = ab.jit(function), make()
    for _ in range(CALLS):
        jitted(*args)
    (follower,) = jitted._followers.values()
    assert follower.__code__.co_filename == FILE
    return jitted, args, follower


def leaves(args: tuple[Any, ...]) -> list[Any]:
    return [np.asarray(x).tolist() for x in ab.state(args).leaves]


def instructions_at_once(code: Any) -> list[Any]:
    """Return the instructions of the line that asks whether it is nobody's turn."""
    starts, line, found = dict(dis.findlinestarts(code)), 0, dict[int, list[Any]]()
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        found.setdefault(line, []).append(instruction)
    (asks,) = (
        every
        for every in found.values()
        if "FREE" in [each.argval for each in every]
        and any(each.opname.startswith("POP_JUMP") for each in every)
    )
    return asks


@pytest.mark.parametrize("form", FORMS)
def test_no_other_thread_can_come_in(form):
    *_, follower = followed(form)
    names = [each.opname for each in instructions_at_once(follower.__code__)]
    calls = [i for i, name in enumerate(names) if name in _CALLS]
    first = calls[0] if calls else len(names)
    assert {*names[:first]} <= _CALLS_NOTHING
    after = [name for name in names[first:] if name not in _CALLS]
    assert {*after} <= {"POP_TOP", "EXTENDED_ARG", "JUMP_FORWARD", "JUMP_BACKWARD", "CACHE"}
    assert [*map(names.count, ("CALL", "CALL_FUNCTION_EX"))] in ([0, 0], [0, 1])


@pytest.mark.parametrize("form", FORMS)
def test_no_turn_is_taken_unless_it_is_somebodys(form, monkeypatch):
    jitted, args, follower = followed(form)
    function, make = FORMS[form]
    plain = make()
    for _ in range(CALLS):
        function(*plain)

    taken: list[int] = []

    def noted() -> int:
        taken.append(get_ident())
        return taken[-1]

    monkeypatch.setitem(follower.__globals__, "get_ident", noted)
    for expected in (0, 1, 1, 2):
        call = jitted if expected == len(taken) else in_turn(jitted)
        call(*args), function(*plain)
        assert len(taken) == expected
        assert leaves(args) == leaves(plain)
        assert FREE == [None]


class Key:
    """A key that is looked at whenever one with the same hash is."""

    looked = 0

    def __hash__(self) -> int:
        return hash("a")

    def __eq__(self, other: object) -> bool:
        Key.looked += 1
        return self is other


def test_keys_of_the_user_run_in_turn():
    jitted, held = ab.jit(add_item), {Key(): jnp.array(5), "a": jnp.array(0)}
    for _ in range(CALLS):
        jitted(held)
    (follower,) = jitted._followers.values()
    assert "FREE" in follower.__code__.co_names
    with pytest.raises(ValueError, match="not enough values"):
        instructions_at_once(follower.__code__)
    assert int(held["a"]) == CALLS


@pytest.mark.parametrize("form", FORMS)
def test_a_call_waits_while_it_is_the_turn_of_another_thread(form):
    jitted, args, _ = followed(form)
    before, begun, may_end = leaves(args), threading.Event(), threading.Event()

    @in_turn
    def hold() -> None:
        begun.set()
        assert may_end.wait(60)

    holder = threading.Thread(target=hold)
    caller = threading.Thread(target=lambda: jitted(*args))
    holder.start()
    assert begun.wait(60)
    caller.start()
    caller.join(0.1)
    assert caller.is_alive()
    assert leaves(args) == before
    may_end.set()
    holder.join(60), caller.join(60)
    assert leaves(args) != before
    assert FREE == [None]
