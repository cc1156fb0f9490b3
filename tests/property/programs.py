"""Generate a random program from a seed.

A program is written while it runs: every statement is drawn over the objects that are reached at
that moment, and executed. A statement that raises is left out, now and then kept.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.property.contents import Snapshot, reachable, signature_of
from tests.property.expressions import Expressions
from tests.property.objects import VOCABULARY, arrays_refuse_attributes, is_no_program
from tests.property.places import Places
from tests.property.scenario import (
    REBINDABLE,
    ROUTES,
    Action,
    Call,
    Capture,
    Function,
    Outside,
    Rebind,
    Scenario,
    arguments,
    rebind,
)
from tests.property.statements import Statements

_PARAMETERS = ["p", "q", "r"]
MODEL = "m"


@dataclass(frozen=True, slots=True)
class Style:
    """What kind of programs are written."""

    repeat: int = 1
    """How many times each call runs its function; then most programs keep the structure."""

    outside: bool = True
    """Whether the caller does something between the calls."""

    captures: bool = False
    """Whether functions reach some of their objects without being passed them."""

    model: bool = False
    """Whether most functions compute with the arrays of one object with many of them."""


PLAIN = Style()


def generate(seed: int, style: Style = PLAIN) -> Scenario:
    """Make the program of a seed: always the same one."""
    with arrays_refuse_attributes():
        return _Writer(seed, style).scenario()


def repeated(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that is called several times, and returns nothing then."""
    if count == 1:
        return function

    def call(*args: Any, **kwargs: Any) -> None:
        for _ in range(count):
            function(*args, **kwargs)

    return call


class _Writer:
    def __init__(self, seed: int, style: Style) -> None:
        self.seed = seed
        self.style = style
        self.rng = random.Random(seed)
        self.expressions = Expressions(self.rng)
        self.statements = Statements(self.expressions)
        self.world: dict[str, Any] = {}
        self.captured: list[Any] = []
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.functions: list[Function] = []
        self.actions: list[Action] = []

    def scenario(self) -> Scenario:
        build = self.build()
        for number in range(self.rng.choice([1, 1, 1, 2])):
            self.function_and_calls(f"f{number}")
        return Scenario(self.seed, build, tuple(self.functions), tuple(self.actions))

    def places(self, names: dict[str, Any]) -> Places:
        return Places(names, self.rng)

    def run(self, line: str, names: dict[str, Any]) -> Exception | None:
        """Execute one statement; if it raises, everything is as before."""
        before = Snapshot(reachable(names.values()))
        kept = dict(names)
        try:
            exec(line, VOCABULARY, names)
        except (AttributeError, LookupError, TypeError, ValueError, NameError) as error:
            before.restore()
            names.clear()
            names.update(kept)
            return error
        return None

    def build(self) -> tuple[str, ...]:
        lines: list[str] = []
        make = self.expressions
        for i in range(self.rng.randint(1, 4)):
            makers: list[Callable[[Places, int], str]] = [make.list_of, make.dict_of]
            makers += [make.holder] * 3
            if i:
                makers += [lambda places, _: make.variable(places)]
                makers += [lambda _, __: make.new_numpy(), lambda _, __: make.new_array()]
            line = f"o{i} = {self.rng.choice(makers)(self.places(self.world), 0)}"
            lines += self.keep([line], self.world)
        if self.style.model:
            lines += self.keep([f"{MODEL} = {make.model(self.places(self.world))}"], self.world)
        for _ in range(self.rng.randint(0, 4)):
            lines += self.keep(self.statements.draw(self.places(self.world)), self.world)
        if self.rng.random() < 0.1:
            names = [p.path for p in self.places(self.world).holders() if p.obj is not None]
            if names:
                target = self.rng.choice(names)
                lines += self.keep([f"{target}.a = {self.expressions.new_numpy()}"], self.world)
        return tuple(lines)

    def keep(self, lines: list[str], names: dict[str, Any]) -> list[str]:
        """Execute statements and return those that did not raise."""
        return [line for line in lines if self.run(line, names) is None]

    # -- functions ---------------------------------------------------------------------------

    def function_and_calls(self, name: str) -> None:
        signature, call = self.signature()
        captures = self.captures()
        before = Snapshot(reachable(self.world.values()))
        args, kwargs = arguments(call, self.world)
        names = dict(eval(f"lambda {signature}: locals()")(*args, **kwargs))
        names |= {c.name: eval(c.root, VOCABULARY, self.world) for c in captures}
        lines = self.body(names)
        failing = bool(lines) and lines[-1].startswith("raise")
        function = Function(
            name,
            signature,
            tuple(lines),
            "None" if failing else self.statements.returned(self.places(names)),
            lenient=not failing and self.rng.random() < 0.6,
            captures=captures,
        )
        # What was run while it was written is undone, and the whole function is called.
        before.restore()
        self.functions.append(function)
        made = Scenario(0, (), (function,), ()).function(name, self.world)
        self.compiled[name] = repeated(made, self.style.repeat)
        self.call(name, call)
        rebindable = function.by(*REBINDABLE)
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            if self.rng.random() < 0.4 and self.style.outside:
                draw = self.statements.draw(self.places(self.world))
                self.actions += [Outside(line) for line in self.keep(draw, self.world)]
            if rebindable and self.rng.random() < 0.4:
                self.rebind(function.name, made, self.rng.choice(rebindable))
            again = call
            if self.rng.random() < 0.25:
                again = self.arguments_for(signature)
            self.call(name, again)

    def captures(self) -> tuple[Capture, ...]:
        """Draw objects that the next function captures."""
        found: list[Capture] = []
        for name in ("u", "v")[: self.rng.choice([0, 1, 1, 2])] if self.style.captures else ():
            places = self.places(self.world)
            nodes = [*places.holders(), *places.variables()]
            roots = [place for place in nodes if place.path in places.names]
            draw = roots if roots and self.rng.random() < 0.6 else nodes
            routes = [route for route in ROUTES if route != "method" or not found]
            if draw:
                capture = Capture(name, self.rng.choice(routes), self.rng.choice(draw).path)
                found.append(capture)
                self.captured.append(eval(capture.root, VOCABULARY, self.world))
        return tuple(found)

    def rebind(self, name: str, made: Callable[..., Any], capture: Capture) -> None:
        """Let a function reach another object from now on."""
        places = self.places(self.world)
        nodes = [*places.holders(), *places.variables()]
        if nodes:
            place = self.rng.choice(nodes)
            rebind(made, capture, place.obj)
            self.captured.append(place.obj)
            again = dataclasses.replace(capture, root=place.path)
            self.actions.append(Rebind(name, again))

    def body(self, names: dict[str, Any]) -> list[str]:
        if self.style.repeat > 1 and self.rng.random() < 0.9:
            return self.steady_body(names)
        lines: list[str] = []
        wanted = self.rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12])
        boom = self.rng.randrange(wanted) if self.rng.random() < 0.12 else None
        for i in range(wanted):
            if i == boom:
                return [*lines, "raise Boom('injected')"]
            for line in self.draw(names):
                if self.run(line, names) is None:
                    lines.append(line)
                elif self.rng.random() < 0.1:
                    return [*lines, line]
        return lines

    def draw(self, names: dict[str, Any]) -> list[str]:
        places = self.places(names)
        if self.style.model and self.rng.random() < 0.7:
            return self.statements.accumulate(places)
        return self.statements.draw(places, inside=True)

    def steady_body(self, names: dict[str, Any]) -> list[str]:
        """Write statements of which each draw leaves the structure that was there before."""
        lines: list[str] = []
        roots = dict(names)
        for _ in range(self.rng.choice([1, 2, 3, 4, 6, 8])):
            for _ in range(4):
                before = Snapshot(reachable(roots.values()))
                wanted, kept = signature_of(roots.values()), dict(names)
                draw = self.keep(self.draw(names), names)
                if draw and signature_of(roots.values()) == wanted:
                    lines += draw
                    break
                before.restore()
                names.clear()
                names.update(kept)
        return lines

    def call(self, function: str, text: str) -> None:
        result = f"r{len(self.actions)}"
        before = Snapshot(reachable([*self.world.values(), *self.captured]))
        try:
            args, kwargs = arguments(text, self.world)
        except (AttributeError, LookupError, TypeError):
            return  # a path in the arguments that an earlier call removed
        if before.changes():  # a path through a defaultdict made an entry
            before.restore()
            return
        try:
            self.world[result] = self.compiled[function](*args, **kwargs)
        except Exception as error:
            before.restore()
            if is_no_program(error):
                return
        self.actions.append(Call(result, function, text))

    def signature(self) -> tuple[str, str]:
        """Draw a signature, and the arguments of a first call."""
        positional = _PARAMETERS[: self.rng.choice([1, 1, 2, 2, 3])]
        keyword = self.rng.choice(["", "", "", "*, k", "*, k=None", "*rest", "**kw"])
        signature = ", ".join([*positional, *([keyword] if keyword else [])])
        return signature, self.arguments_for(signature)

    def arguments_for(self, signature: str) -> str:
        places = self.places(self.world)
        draw = [
            self.statements.argument(places)
            if i or MODEL not in self.world or self.rng.random() < 0.2
            else MODEL
            for i, name in enumerate(signature.replace("*, ", "").split(", "))
            if "*" not in name and "k" not in name
        ]
        if "*rest" in signature:
            draw += [self.statements.argument(places) for _ in range(self.rng.randint(0, 2))]
        if "**kw" in signature:
            draw += [f"{k}={self.statements.argument(places)}" for k in ("y", "x")]
        elif "*, k" in signature and ("=" not in signature or self.rng.random() < 0.7):
            draw.append(f"k={self.statements.argument(places)}")
        return ", ".join(draw)
