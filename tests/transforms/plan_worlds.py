"""Objects of every kind that a plan has to watch, and what a function can see of them.

`look` says everything about a world: types, keys, static values, metadata and aliases as text, and
the arrays as a number. So a compiled `look` that answers as the plain one has seen every change.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anabranch as ab
from anabranch.transforms._jit import JitFunction


class Layer(ab.Module):
    scale = 2

    def __init__(self) -> None:
        self.w = ab.Param(jnp.full(2, 3.0, jnp.float32))
        self.mean = ab.BatchStat(jnp.zeros(2), momentum=0.9)


class Special(Layer):
    pass


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 1


class OtherPoint(Point):
    pass


@ab.graph.node
class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = ab.Param(jnp.ones(2))


@ab.graph.node(static=True)
class Config:
    def __init__(self) -> None:
        self.rate = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int


class World(ab.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.first = self.layers[0]
        self.table = {"a": Layer(), "b": ab.Param(jnp.ones(2)), "n": 1, 7: "seven"}
        self.point = Point(ab.Param(jnp.ones(2)))
        self.queue = deque([ab.Param(jnp.ones(())), 2], maxlen=3)
        self.ordered = OrderedDict(u=ab.Param(jnp.ones(())), v=ab.Param(jnp.zeros(())))
        self.default = defaultdict(list, z=[1])
        self.counts = Counter(k=2)
        self.tags = {"x", "y"}
        self.slotted = Slotted()
        self.config = Config()
        self.pair = (ab.Param(jnp.ones(2)), jnp.ones(2))
        self.frozen = Frozen(3)
        self.array = jnp.ones(3)
        self.arrays = [jnp.ones(2), jnp.zeros(2), "text"]
        self.named_arrays = {"p": jnp.ones(2), "q": 1}
        self.holding = Point(jnp.ones(2), 5)
        self.count = ab.Variable(jnp.array(0))
        self.training = True
        self.rate = 0.0
        self.optional: Any = None


def look(*things: Any) -> tuple[str, Any]:
    """Return everything that can be seen of objects: statics as text, arrays as one number."""
    seen: dict[int, int] = {}
    text: list[str] = []
    total: Any = jnp.zeros(())
    weight = 1.0

    def visit(x: Any, *, numbers: bool = False) -> None:
        nonlocal total, weight
        if isinstance(x, np.ndarray) or (numbers and isinstance(x, (int, float))):
            x = jnp.asarray(x)
        if isinstance(x, jax.Array):
            weight += 1.0
            text.append(f"array{x.shape}{x.dtype}")
            total = total + weight * x.astype(float).sum()
            return
        children = children_of(x)
        if children is None:
            text.append(f"{type(x).__name__}:{x!r}")
            return
        if not isinstance(x, (tuple, Frozen)):
            if id(x) in seen:
                text.append(f"#{seen[id(x)]}")
                return
            seen[id(x)] = len(seen)
        text.append(f"{type(x).__name__}(")
        for key, child in children:
            text.append(f"{type(key).__name__}:{key!r}=")
            visit(child, numbers=numbers or (key == "value" and isinstance(x, ab.Variable)))
        text.append(")")

    for thing in things:
        visit(thing)
    return " ".join(text), total


def children_of(x: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(x, ab.Variable):
        return [("value", x.value), *x.get_metadata().items()]
    if isinstance(x, ab.Module):
        own = list(vars(x).items())
        return [*own, ("scale", x.scale)] if isinstance(x, Layer) else own
    if isinstance(x, (Point, Frozen, Config)):
        return list(vars(x).items())
    if isinstance(x, Slotted):
        return [(name, getattr(x, name)) for name in ("a", "b") if hasattr(x, name)]
    if isinstance(x, defaultdict):
        return [("factory", x.default_factory), *x.items()]
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, (list, tuple, deque)):
        return list(enumerate(x))
    if isinstance(x, set):
        return list(enumerate(sorted(x)))
    return None


def same(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    return a[0] == b[0] and float(a[1]) == float(b[1])


class Walks:
    """Counts the calls that were walked."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count = 0
        walk = JitFunction._walk

        def counting(*args: Any) -> Any:
            self.count += 1
            return walk(*args)

        monkeypatch.setattr(JitFunction, "_walk", counting)

    def of(self, call: Any, *args: Any, **kwargs: Any) -> int:
        """Return how many walks a call takes."""
        before = self.count
        call(*args, **kwargs)
        return self.count - before
