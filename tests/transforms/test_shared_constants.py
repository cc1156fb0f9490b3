"""A list or dict that a function captures is a constant, unless it is a node of the call, too."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import transforms
from tests.transforms.plan_worlds import Walks


class Model(ab.Module):
    def __init__(self, held: Any = None) -> None:
        self.w = ab.Param(jnp.ones(2))
        self.held = held


WRAPS = [transforms.jit, transforms.remat]
X = jnp.arange(2.0)


def same_as_plain(run: Callable[[Any], Any], wrap: Any) -> None:
    assert run(wrap) == run(lambda function: function)


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("wrap", WRAPS)
class TestIsOneObject:
    def test_with_an_argument(self, wrap):
        def run(wrap: Any) -> Any:
            held: list[Any] = []
            other: list[Any] = []

            def call(given: Any, x: Any) -> Any:
                given.append(1)
                return x * 0 + (len(held) + 10 * (held is given))

            called = wrap(call)
            results = [called(given, X).tolist() for given in (other, other, other, held, held)]
            results += [called(given, X).tolist() for given in (other, held, other)]
            return results, held, other

        # a constant is what it was when the function was traced, so only where it is the argument
        found, expected = run(wrap), run(lambda function: function)
        assert found[1:] == expected[1:]
        assert [found[0][i] for i in (3, 4, 6)] == [expected[0][i] for i in (3, 4, 6)]

    def test_with_a_part_of_a_model(self, wrap):
        def run(wrap: Any) -> Any:
            config = {"n": 0, "log": []}
            model = Model(config)

            def call(m: Any, x: Any) -> Any:
                config["n"] = (config["n"] + 1) % 2
                config["log"].append(2)
                return m.w.value * config["n"] + x

            called = wrap(call)
            return [(called(model, X).tolist(), repr(model.held)) for _ in range(6)]

        same_as_plain(run, wrap)

    def test_when_it_becomes_a_part_later(self, wrap):
        def run(wrap: Any) -> Any:
            config = {"n": 0}
            model = Model({"n": 5})

            def call(m: Any, x: Any) -> Any:
                m.held["n"] += 1
                return x + (config is m.held)

            called, seen = wrap(call), []
            for i in range(8):
                if i == 4:
                    model.held = config
                seen.append((called(model, X).tolist(), repr(model.held), config["n"]))
            return seen

        same_as_plain(run, wrap)

    def test_with_a_part_of_a_captured_model(self, wrap):
        def run(wrap: Any) -> Any:
            config = {"n": 0}
            model = Model(config)

            def helper() -> int:
                config["n"] += 1
                return config["n"]

            def call(x: Any) -> Any:
                model.w.value = model.w.value + 1
                return model.w.value * helper() + x

            called = wrap(call)
            return [(called(X).tolist(), model.held["n"]) for _ in range(4)]

        same_as_plain(run, wrap)

    def test_that_is_left_alone_by_a_call_that_raises(self, wrap):
        config: dict[str, Any] = {"n": 0}
        model = Model(config)

        def call(m: Any, x: Any) -> None:
            config["n"] = 5
            m.held["x"] = x
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            wrap(call)(model, X)
        assert model.held is config
        assert config == {"n": 0}


CONTAINERS: list[Any] = [
    lambda: [1, 2], lambda: {"a": [1]}, lambda: deque([1]), lambda: {1, 2}, lambda: OrderedDict(a=1)
]  # fmt: skip


@pytest.mark.parametrize("make", CONTAINERS)
@pytest.mark.parametrize("calls", [1, 4])
def test_what_is_returned_or_assigned_is_the_very_container(make, calls):
    held, default, nested, model = make(), make(), {"inner": make()}, Model()

    @transforms.jit
    def call(m: Any, x: Any, default: Any = default) -> Any:
        m.held = held
        m.default = [default]
        return nested["inner"], x

    for _ in range(calls):
        found, _ = call(model, X)
        assert found is nested["inner"]
        assert model.held is held
        assert model.default[0] is default
    assert (held, default, nested) == (make(), make(), {"inner": make()})


def test_other_containers_stay_constants(monkeypatch):
    """One that is shared does not make arrays of the others inputs, nor calls slow."""
    walks = Walks(monkeypatch)
    sizes, config = {"n": np.array(3), "table": [np.arange(2.0)]}, {"on": True}
    model, traces = Model(config), []

    @transforms.jit
    def call(m: Any, x: Any) -> Any:
        traces.append(1)
        assert config is m.held
        m.w.value = m.w.value + 1
        return x[: int(sizes["n"])] + int(sizes["table"][0][1])

    for _ in range(6):
        walked = walks.of(call, model, jnp.arange(5.0))
    assert walked == 0
    assert len(traces) == 1
    assert call(model, jnp.arange(5.0)).tolist() == [1.0, 2.0, 3.0]
