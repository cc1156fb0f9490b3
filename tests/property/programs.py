"""Generate a random program from a seed.

A program is written while it runs: every statement is drawn over the objects that are reached at
that moment, and executed. A statement that raises is left out, now and then kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.property.contents import Snapshot, reachable
from tests.property.expressions import Expressions
from tests.property.objects import VOCABULARY, arrays_refuse_attributes, is_no_program
from tests.property.places import Places
from tests.property.scenario import Action, Call, Function, Outside, Scenario, arguments
from tests.property.statements import Statements

_PARAMETERS = ["p", "q", "r"]


def generate(seed: int) -> Scenario:
    """Make the program of a seed: always the same one."""
    with arrays_refuse_attributes():
        return _Writer(seed).scenario()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.expressions = Expressions(self.rng)
        self.statements = Statements(self.expressions)
        self.world: dict[str, Any] = {}
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
        before = Snapshot(reachable(self.world.values()))
        args, kwargs = arguments(call, self.world)
        names = dict(eval(f"lambda {signature}: locals()")(*args, **kwargs))
        lines = self.body(names)
        failing = bool(lines) and lines[-1].startswith("raise")
        function = Function(
            name,
            signature,
            tuple(lines),
            "None" if failing else self.statements.returned(self.places(names)),
            lenient=not failing and self.rng.random() < 0.6,
        )
        # What was run while it was written is undone, and the whole function is called.
        before.restore()
        self.functions.append(function)
        self.compiled |= Scenario(0, (), (function,), ()).compile()
        self.call(name, call)
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            if self.rng.random() < 0.4:
                draw = self.statements.draw(self.places(self.world))
                self.actions += [Outside(line) for line in self.keep(draw, self.world)]
            again = call
            if self.rng.random() < 0.25:
                again = self.arguments_for(signature)
            self.call(name, again)

    def body(self, names: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        wanted = self.rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 12])
        boom = self.rng.randrange(wanted) if self.rng.random() < 0.12 else None
        for i in range(wanted):
            if i == boom:
                return [*lines, "raise Boom('injected')"]
            for line in self.statements.draw(self.places(names), inside=True):
                if self.run(line, names) is None:
                    lines.append(line)
                elif self.rng.random() < 0.1:
                    return [*lines, line]
        return lines

    def call(self, function: str, text: str) -> None:
        result = f"r{len(self.actions)}"
        before = Snapshot(reachable(self.world.values()))
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
            for name in signature.replace("*, ", "").split(", ")
            if "*" not in name and "k" not in name
        ]
        if "*rest" in signature:
            draw += [self.statements.argument(places) for _ in range(self.rng.randint(0, 2))]
        if "**kw" in signature:
            draw += [f"{k}={self.statements.argument(places)}" for k in ("y", "x")]
        elif "*, k" in signature and ("=" not in signature or self.rng.random() < 0.7):
            draw.append(f"k={self.statements.argument(places)}")
        return ", ".join(draw)
