"""Random statements over the objects that are reached at one moment."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque

import numpy as np

from tests.property.contents import is_array, may_be_traced
from tests.property.expressions import METADATA, Expressions
from tests.property.objects import ATTRIBUTE_NODES, NAMES, Slotted
from tests.property.places import Place, Places, is_movable


class Statements:
    """Draws statements; a draw may be empty, and it may be several that belong together."""

    def __init__(self, expressions: Expressions) -> None:
        self.make = expressions
        self.rng = expressions.rng
        self.locals = 0
        self.weighted = [
            (8, self.write_variable),
            (4, self.write_metadata),
            (6, self.set_attribute),
            (2, self.delete),
            (4, self.swap),
            (3, self.move),
            (4, self.write_static),
            (8, self.change_list),
            (8, self.change_dict),
            (3, self.detach_and_write),
            (3, self.attach_twice),
            (2, self.refer_to_itself),
            (2, self.rewrite),
            (1, self.call_method),
        ]

    def draw(self, places: Places, *, inside: bool = False) -> list[str]:
        weights = [weight for weight, _ in self.weighted]
        if not inside and self.make.chance(0.15) and (lines := self.write_numpy(places)):
            return lines
        for _ in range(10):
            method = self.rng.choices(self.weighted, weights)[0][1]
            # Names of the caller are fixed: locals are made in functions only.
            if not inside and method in (self.detach_and_write, self.attach_twice):
                continue
            if lines := method(places):
                return lines
        return []

    def one(self, places: list[Place]) -> Place | None:
        return self.rng.choice(places) if places else None

    def local(self) -> str:
        self.locals += 1
        return f"t{self.locals}"

    # -- Variables ---------------------------------------------------------------------------

    def write_variable(self, places: Places) -> list[str]:
        place = self.one(places.variables())
        return [self.write(place, places)] if place else []

    def write(self, place: Place, places: Places) -> str:
        path, value = place.path, place.obj.value
        if not is_array(value) or self.make.chance(0.45):
            return f"{path}.value = {self.make.array(places)}"
        draw = self.rng.random()
        if draw < 0.4:
            step = self.rng.choice(["1", "2", "0.25"] if value.dtype.kind == "f" else ["1", "2"])
            return f"{path} {self.rng.choice(['+=', '-=', '+='])} {step}"
        if draw < 0.65 or not value.ndim or not value.shape[0]:
            return f"{path}[...] = {self.make.array_like(places, value)}"
        index = self.rng.randrange(value.shape[0])
        scalars = [
            p
            for p in places.arrays()
            if p.obj.dtype == value.dtype and p.obj.ndim and p.obj.shape[0]
        ]
        right = f"array({self.rng.choice(scalars).path}[0])" if scalars else "1"
        return f"{path}[{index}] = {self.rng.choice([right, right, '2'])}"

    def accumulate(self, places: Places) -> list[str]:
        """Compute an array anew from itself and others, so that only its elements change."""
        place = self.one([p for p in places.arrays() if p.assignable or p.path.endswith(".value")])
        if place is None:
            return []
        path, array = place.path, place.obj
        fits = [
            p.path
            for p in places.arrays()
            if p.obj.shape in ((), (1,), array.shape)
            and p.obj.dtype.kind in ("i", array.dtype.kind)
        ]
        x, y = self.rng.choice(fits), self.rng.choice(fits)
        forms = [
            f"{path} + {x}",
            f"{path} - {x}",
            f"{path} * 2 - {x}",
            f"where({x} > 0, {y}, {path})",
        ]
        forms += [f"{path} + 1", f"maximum({path}, {x}) - {y}"]
        if array.ndim:
            forms += [f"{path}[::-1] + {x}", f"{path} + total({path})"]
        return [f"{path} = cyclic({self.rng.choice(forms)})"]

    def write_numpy(self, places: Places) -> list[str]:
        """Write into a NumPy array of the caller, which no version stamp can notice."""
        held = [p for p in places.all if isinstance(p.obj, np.ndarray) and p.obj.size]
        alone = [p for p in held if sum(p.obj is other.obj for other in held) == 1]
        # Elsewhere a transform may have put a JAX array in its place (S1a).
        place = self.one([p for p in alone if p.path in places.names])
        return [f"poke({place.path}, {self.rng.randint(-4, 4)})"] if place else []

    def write_metadata(self, places: Places) -> list[str]:
        place = self.one(places.variables())
        if place is None:
            return []
        name = self.rng.choice(["tag", "tag", "unit", "axis"])
        return [f"{place.path}.set_metadata({name}={self.rng.choice(METADATA)})"]

    # -- attributes and entries --------------------------------------------------------------

    def set_attribute(self, places: Places) -> list[str]:
        place = self.one(places.holders())
        if place is None:
            return []
        names = ["a", "b", "c"] if isinstance(place.obj, Slotted) else NAMES
        return [f"{place.path}.{self.rng.choice(names)} = {self.make.anything(places)}"]

    def delete(self, places: Places) -> list[str]:
        place = self.one(places.slots())
        return [f"del {place.path}"] if place else []

    def swap(self, places: Places) -> list[str]:
        slots = [place for place in places.slots() if is_movable(place.obj)]
        if len(slots) < 2:
            return []
        p, q = (place.path for place in self.rng.sample(slots, 2))
        # The second assignment would go through what the first one has put there.
        return [] if q.startswith(p) else [f"{p}, {q} = {q}, {p}"]

    def move(self, places: Places) -> list[str]:
        """Move what an object holds to another place; often it is an array."""
        slots = [place for place in places.slots() if is_movable(place.obj)]
        arrays = [place for place in places.arrays() if place.assignable]
        source = self.one(arrays if arrays and self.make.chance(0.6) else slots)
        target = self.one(slots)
        return [f"{target.path} = {source.path}"] if source and target else []

    def write_static(self, places: Places) -> list[str]:
        place = self.one([p for p in places.holders() if not isinstance(p.obj, Slotted)])
        if place is None:
            return []
        path = place.path
        if type(getattr(place.obj, "n", None)) is int:
            return [self.rng.choice([f"{path}.n += 1", f"{path}.n += 1", f"del {path}.n"])]
        if type(getattr(place.obj, "s", None)) is str:
            return [f"{path}.s += 't'"]
        if self.make.chance(0.3):
            return [f"{path}.s = 's'"]
        return [f"{path}.n = {self.make.static_attribute()}"]

    def rewrite(self, places: Places) -> list[str]:
        """Write what is there already; or take it away and put it back, last."""
        place = self.one(places.slots())
        if place is None or not is_movable(place.obj):
            return []
        if self.make.chance(0.5):
            return [f"{place.path} = {place.path}"]
        name = self.local()
        return [f"{name} = {place.path}", f"del {place.path}", f"{place.path} = {name}"]

    def call_method(self, places: Places) -> list[str]:
        place = self.one([p for p in places.holders() if hasattr(p.obj, "bump")])
        return [f"{place.path}.bump()"] if place else []

    # -- lists and dicts ---------------------------------------------------------------------

    def change_list(self, places: Places) -> list[str]:
        place = self.one(places.where(list, deque))
        if place is None:
            return []
        path, size = place.path, len(place.obj)
        new = self.make.anything(places)
        index = self.rng.randint(-size, size)
        forms = [f"{path}.append({new})", f"{path}.insert({index}, {new})"]
        forms += [f"{path}.extend([{new}, {self.make.alias(places)}])", f"{path} += [{new}]"]
        if "(" in path or not place.assignable:
            forms.pop()
        if size:
            index = self.rng.randrange(-size, size)
            forms += [
                f"{path}.pop()",
                f"{path}.clear()",
                f"{path}.reverse()",
                f"del {path}[{index}]",
            ]
            forms += [f"{path}[{index}] = {new}", f"{self.local()} = {path}.pop()"]
            if type(place.obj) is list:
                forms += [f"{path}[:1] = [{new}]", f"{path}[{index}:] = []", f"{path}.pop({index})"]
                forms += [
                    f"{path}[:] = {path}[::-1]",
                    f"{path} *= 2" if size < 3 else f"{path}.pop()",
                ]
            else:
                forms += [f"{path}.rotate(1)", f"{path}.appendleft({new})", f"{path}.popleft()"]
        form = self.rng.choice(forms)
        return [form] if place.assignable or "*=" not in form else []

    def change_dict(self, places: Places) -> list[str]:
        place = self.one(places.where(dict, OrderedDict, defaultdict))
        if place is None:
            return []
        path, new, key = place.path, self.make.anything(places), self.make.key()
        forms = [f"{path}[{key}] = {new}", f"{path}.setdefault({key}, {new})"]
        forms += [f"{path}.update({{{key}: {new}, {self.make.key()}: {self.make.alias(places)}}})"]
        if place.obj:
            old = repr(self.rng.choice(list(place.obj)))
            forms += [f"{path}.pop({old})", f"del {path}[{old}]", f"{path}[{old}] = {new}"]
            forms += [f"{path}[{old}] = {path}.pop({old})"] * 2
            forms += [f"{path}[{key}] = {path}.pop({old})", f"{self.local()} = {path}.pop({old})"]
            forms += [f"{path}.popitem()", f"{path}.clear()"]
            if type(place.obj) is OrderedDict:
                forms += [f"{path}.move_to_end({old}, last=False)"] * 2
        if type(place.obj) is defaultdict and place.obj.default_factory is list:
            forms += [f"{path}[{key}].append({new})"] * 2
        return [self.rng.choice(forms)]

    # -- objects with more than one place, or none -------------------------------------------

    def detach_and_write(self, places: Places) -> list[str]:
        """Take an object away, hold on to it, and write to it: the caller may hold it too."""
        held = (*ATTRIBUTE_NODES, list, dict, deque, OrderedDict, defaultdict)
        slots = [p for p in places.slots() if p in places.variables() or type(p.obj) in held]
        place = self.one(slots)
        if place is None:
            return []
        name = self.local()
        lines = [f"{name} = {place.path}", f"del {place.path}"]
        if self.make.chance(0.3):
            lines[1] = f"{place.path} = {self.make.anything(places)}"
        alone = Places({name: place.obj}, self.rng)
        for method in self.rng.sample(
            [self.write_variable, self.write_static, self.change_list], 3
        ):
            lines += method(alone)
        return lines

    def attach_twice(self, places: Places) -> list[str]:
        name = self.local()
        new = self.rng.choice([self.make.variable, lambda p: self.make.holder(p, 2)])(places)
        lines = [f"{name} = {new}"]
        for place in self.rng.sample(places.holders(), min(2, len(places.holders()))):
            lines.append(f"{place.path}.{self.rng.choice(['a', 'b', 'c'])} = {name}")
        for place in self.rng.sample(places.where(list), min(1, len(places.where(list)))):
            lines.append(f"{place.path}.append({name})")
        return lines

    def refer_to_itself(self, places: Places) -> list[str]:
        place = self.one([*places.holders(), *places.where(list, dict)])
        if place is None:
            return []
        if isinstance(place.obj, list):
            return [f"{place.path}.append({place.path})"]
        if isinstance(place.obj, dict):
            return [f"{place.path}[{self.make.key()}] = {place.path}"]
        return [f"{place.path}.{self.rng.choice(['a', 'b', 'c'])} = {place.path}"]

    # -- results and arguments ---------------------------------------------------------------

    def returned(self, places: Places) -> str:
        draw = self.rng.random()
        if draw < 0.15:
            return "None"
        if draw < 0.22:
            numbers = [p.path for p in places.slots() if not is_movable(p.obj)]
            return self.rng.choice(numbers) if numbers else "None"
        if draw < 0.5:
            return self.make.anything(places)
        x, y = self.make.anything(places), self.make.alias(places)
        forms = [f"({x}, {y})", f"[{x}, {y}, {y}]", f"{{'y': {x}, 'x': {y}}}", f"Point({y}, {x})"]
        return self.rng.choice([*forms, f"({y}, {y})", y])

    def argument(self, places: Places) -> str:
        draw = self.rng.random()
        if draw < 0.04:
            return self.make.static()
        if draw < 0.08:
            return self.make.number()
        fits = [p for p in places.movable() if not p.path.endswith(".value") or is_array(p.obj)]
        nodes = [p for p in fits if not is_array(p.obj) and not may_be_traced(p.obj)]
        roots = [p for p in nodes if p.path in places.names]
        x, y = (self.rng.choice(rs or fits or places.all).path for rs in (roots, nodes))
        if draw < 0.16:
            return f"({x}, {y})"
        if draw < 0.22:
            return self.rng.choice(fits).path if fits else x
        return x if draw < 0.75 else y
