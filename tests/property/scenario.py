"""A random program as data: built from a seed, printed as Python, made smaller line by line."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.property.objects import VOCABULARY


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the program; every line is one statement.

    With `lenient`, a statement that no longer fits the objects is left out (so that the function
    can be called again after it has changed them); otherwise it raises.
    """

    name: str
    signature: str
    lines: tuple[str, ...]
    returned: str
    lenient: bool

    def text(self) -> str:
        body = [f"with skip: {line}" if self.lenient else line for line in self.lines]
        if self.lenient and self.returned != "None":
            body += ["out = None", f"with skip: out = {self.returned}", "return out"]
        else:
            body.append(f"return {self.returned}")
        return f"def {self.name}({self.signature}):\n" + textwrap.indent("\n".join(body), "    ")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function under the transform; the arguments are expressions."""

    result: str
    function: str
    arguments: str

    def text(self) -> str:
        return f"{self.result} = transform({self.function})({self.arguments})"


@dataclass(frozen=True, slots=True)
class Outside:
    """A statement of the caller, between the calls."""

    line: str

    def text(self) -> str:
        return self.line


Action = Call | Outside
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world (the first lines), functions, and what the caller does with them."""

    seed: int
    build: tuple[str, ...]
    functions: tuple[Function, ...]
    actions: tuple[Action, ...]

    def text(self) -> str:
        functions = [function.text() for function in self.functions]
        actions = [action.text() for action in self.actions]
        return "\n".join([f"# seed {self.seed}", *self.build, *functions, *actions])

    def world(self) -> dict[str, Any]:
        """Build the objects of the caller, by name."""
        names: dict[str, Any] = {}
        for line in self.build:
            exec(line, VOCABULARY, names)
        return names

    def compile(self) -> dict[str, Callable[..., Any]]:
        """Make the functions; their globals hold no object of any world."""
        namespace = dict(VOCABULARY)
        for function in self.functions:
            exec(function.text(), namespace)
        return {function.name: namespace[function.name] for function in self.functions}


def arguments(text: str, names: dict[str, Any]) -> Arguments:
    """Evaluate the arguments of a call in the namespace of the caller."""
    capture = "(lambda *args, **kwargs: (args, kwargs))"
    return eval(f"{capture}({text})", VOCABULARY, names)


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the program with one thing left out, the largest things first."""
    for i in range(len(scenario.actions)):
        rest = scenario.actions[:i] + scenario.actions[i + 1 :]
        yield dataclasses.replace(scenario, actions=rest)
    for k, function in enumerate(scenario.functions):
        variants = [
            dataclasses.replace(function, lines=function.lines[:i] + function.lines[i + 1 :])
            for i in reversed(range(len(function.lines)))
        ]
        if function.returned != "None":
            variants.append(dataclasses.replace(function, returned="None"))
        if function.lenient:
            variants.append(dataclasses.replace(function, lenient=False))
        for variant in variants:
            others = scenario.functions
            yield dataclasses.replace(scenario, functions=(*others[:k], variant, *others[k + 1 :]))
    for i in reversed(range(len(scenario.build))):
        rest = scenario.build[:i] + scenario.build[i + 1 :]
        yield dataclasses.replace(scenario, build=rest)


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], attempts: int = 300) -> Scenario:
    """Leave out what is not needed for `fails` to stay true; it must be true to begin with."""
    done = False
    while not done:
        done = True
        for candidate in smaller(scenario):
            if attempts == 0:
                return scenario
            attempts -= 1
            if fails(candidate):
                scenario, done = candidate, False
                break
    return scenario
