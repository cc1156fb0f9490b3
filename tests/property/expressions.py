"""Random expressions: arrays computed from arrays, new objects, statics.

All numbers are integers or multiples of 1/4 between -8 and 8, so that every result is exact and
equal bit for bit, however the compiler orders and fuses the operations.
"""

from __future__ import annotations

import random
from typing import Any

from tests.property.contents import may_be_traced
from tests.property.objects import ATTRIBUTE_NODES, NAMES, VARIABLES, Slotted
from tests.property.places import Place, Places

SHAPES = [(), (), (1,), (2,), (2,), (3,), (0,)]
KEYS = ["x", "y", "z", "w", 0, 1, 2, "x", "y", True, None, (0, "x"), -1]
SMALL_STATICS = "0 1 2 3 -1 True False 0.0 -0.0 float('nan') 0.1 1 2".split()
# No Python function or class: a statement may find it in the place of an object, and write to it.
STATICS = ["'s'", "'t'", "''", "None", "len", "abs", "int", "('s', 't')", "()", "b's'"]
METADATA = ["'s'", "'t'", "1", "True", "1.0", "-0.0", "0.0", "float('nan')", "None", "('s', 1)"]


class Expressions:
    """Draws expressions over the objects that are reached at one moment."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers = [
            *range(300, 400),
            *(k + 0.25 for k in range(8)),
            *(k + 0.5 for k in range(8)),
        ]
        rng.shuffle(self.numbers)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- arrays ------------------------------------------------------------------------------

    def new_array(self, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> str:
        shape = self.rng.choice(SHAPES) if shape is None else shape
        dtype = dtype or self.rng.choice(["f32", "f32", "i32"])
        scale = 1 if dtype == "i32" else 4
        draw = [self.rng.randint(-4 * scale, 4 * scale) for _ in range(shape[0] if shape else 1)]
        entries: list[Any] = [x / scale if scale > 1 else x for x in draw]
        return f"{dtype}({entries if shape else entries[0]})"

    def new_numpy(self) -> str:
        entries = [self.rng.randint(-4, 4) for _ in range(self.rng.randint(0, 3))]
        return f"n32({entries})"  # integers and 0.5 are not promoted as in JAX

    def array_path(self, place: Place) -> str:
        if place.path.endswith(".value") and self.chance(0.3):
            return place.path.removesuffix(".value") + "[...]"
        return place.path

    def array(self, places: Places) -> str:
        """Draw an expression of any shape and dtype."""
        arrays = places.arrays()
        if not arrays or self.chance(0.1):
            return self.new_array()
        place = self.rng.choice(arrays)
        p = self.array_path(place)
        fits = [x for x in arrays if _broadcastable(place.obj.shape, x.obj.shape)]
        q = self.array_path(self.rng.choice(fits))
        numbers = [x for x in places.all if may_be_traced(x.obj)]
        forms = [
            f"array({p})",
            f"bounded({p} + {q})",
            f"bounded({p} - {q})",
            f"floor(bounded({p} * {q}))",
            f"where({p} > 0, {q}, {p})",
            f"minimum({p}, {q})",
            f"maximum({p}, 0)",
            f"bounded({p} + {self.rng.choice(['1', '0.25', '-0.5', '2'])})",
            f"bounded({p} * {self.rng.choice(['2', '-1', '3'])})",
            f"bounded(total({p}))",
        ]
        if place.obj.ndim and place.obj.shape[0]:
            forms.append(f"array({p}[{self.rng.randrange(-1, place.obj.shape[0])}])")
        if numbers:
            number = self.rng.choice(numbers)
            offset = " - 300" if isinstance(number.obj, int) else ""
            forms += [f"bounded({p} + ({number.path}{offset}))"] * 4
        return self.rng.choice(forms)

    def array_like(self, places: Places, obj: Any) -> str:
        """Draw an expression that can be written into an array by index."""
        fits = [
            place
            for place in places.arrays()
            if place.obj.dtype == obj.dtype and place.obj.shape in ((), (1,), obj.shape)
        ]
        if not fits or self.chance(0.2):
            return self.new_array(obj.shape, "f32" if obj.dtype.kind == "f" else "i32")
        p = self.array_path(self.rng.choice(fits))
        step = self.rng.choice(["1", "2", "-1"])
        return self.rng.choice([f"array({p})", f"bounded({p} + {step})", f"maximum({p}, {step})"])

    # -- statics -----------------------------------------------------------------------------

    def number(self) -> str:
        """Draw a number that occurs nowhere else, for places where arguments are traced."""
        return repr(self.numbers.pop()) if self.numbers else "None"

    def static(self) -> str:
        """Draw a static that means the same on an object and in an argument."""
        return self.number() if self.chance(0.2) else self.rng.choice(STATICS)

    def static_attribute(self) -> str:
        """Draw a static that an object may hold."""
        if self.chance(0.5):
            return self.rng.choice(SMALL_STATICS)
        return self.rng.choice([*STATICS, "np.float32(0.5)", "np.int32(2)"])

    def key(self) -> str:
        return repr(self.rng.choice(KEYS))

    # -- objects -----------------------------------------------------------------------------

    def variable(self, places: Places) -> str:
        kind = self.rng.choice(VARIABLES).__name__
        value = self.array(places)
        if self.chance(0.1):
            value = f"({value}, {self.array(places)})"
        elif self.chance(0.07):
            value = f"{{'b': {value}, 'a': {self.array(places)}}}"
        metadata = f", tag={self.rng.choice(METADATA)}" if self.chance(0.2) else ""
        return f"{kind}({value}{metadata})"

    def contents(self, places: Places, depth: int) -> list[str]:
        return [self.anything(places, depth) for _ in range(self.rng.choice([0, 1, 1, 2, 2, 3]))]

    def list_of(self, places: Places, depth: int) -> str:
        text = f"[{', '.join(self.contents(places, depth))}]"
        return f"deque({text}{self.rng.choice(['', ', 4'])})" if self.chance(0.15) else text

    def dict_of(self, places: Places, depth: int) -> str:
        items = [f"{self.key()}: {x}" for x in self.contents(places, depth)]
        text = f"{{{', '.join(items)}}}"
        kinds = ["", "", "", "", "", "OrderedDict", f"defaultdict({self.default_factory()}, "]
        kind = self.rng.choice(kinds)
        return f"{kind}({text})" if "(" not in kind and kind else f"{kind}{text}" + ")" * bool(kind)

    def default_factory(self) -> str:
        return self.rng.choice(["list", "dict", "None"])

    def holder(self, places: Places, depth: int) -> str:
        cls = self.rng.choice([*ATTRIBUTE_NODES, ATTRIBUTE_NODES[0]])
        contents = self.contents(places, depth)
        if cls.__name__ == "Strict":
            return f"Strict({contents[0] if contents else None})"
        names = ["a", "b", "c"] if cls is Slotted else NAMES
        if cls.__name__ == "Record":
            return f"Record({', '.join(contents[:2])})"
        drawn = self.rng.sample(names, len(contents))
        items = [f"{name}={x}" for name, x in zip(drawn, contents, strict=True)]
        if cls is not Slotted and self.chance(0.4):
            items.append(f"n={self.static_attribute()}")
        return f"{cls.__name__}({', '.join(items)})"

    def model(self, places: Places) -> str:
        """Draw an object that holds arrays and Variables, some of them deeper."""
        parts: list[str] = []
        for name in NAMES[: self.rng.randint(2, 4)]:
            inside = [self.variable(places) for _ in range(self.rng.randint(1, 3))]
            keyed = ", ".join(f"{key!r}: {x}" for key, x in zip("xyz", inside, strict=False))
            forms = [inside[0], inside[0], self.new_array(), f"[{', '.join(inside)}]"]
            forms += [f"{{{keyed}}}", f"Record({inside[0]}, {self.array(places)})"]
            parts.append(f"{name}={self.rng.choice(forms)}")
        return f"{self.rng.choice(['Block', 'Block', 'Box'])}({', '.join(parts)})"

    def value(self, places: Places, depth: int) -> str:
        """Draw a value: it is walked through, and has no identity."""
        nodes = places.holders()
        if nodes and self.chance(0.4):
            place = self.rng.choice(nodes)
            bound = f"partial(len, {place.path}, key={self.anything(places, depth)})"
            return f"{place.path}.bump" if hasattr(place.obj, "bump") else bound
        x, y = self.anything(places, depth), self.anything(places, depth)
        return self.rng.choice([f"({x}, {y})", f"({x},)", f"Point({x}, {y})", f"Pair({x}, {y})"])

    def alias(self, places: Places) -> str:
        nodes = [p for p in places.movable() if not p.path.endswith(".value")]
        return self.rng.choice(nodes).path if nodes else "None"

    def anything(self, places: Places, depth: int = 0) -> str:
        """Draw what may be put into any object, container or result."""
        crowded = places.nodes > 12
        if depth > 2 or crowded:
            return self.rng.choice([self.alias, self.alias, self.array])(places)
        draw = self.rng.random()
        if draw < 0.28:
            return self.alias(places)
        if draw < 0.48:
            return self.variable(places)
        if draw < 0.62:
            return self.array(places)
        if draw < 0.70:
            return self.static()
        makers = [self.holder, self.holder, self.list_of, self.list_of, self.dict_of, self.value]
        return self.rng.choice(makers)(places, depth + 1)


def _broadcastable(x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    return x == y or x in ((), (1,)) or y in ((), (1,))
