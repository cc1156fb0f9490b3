"""A random program as data: built from a seed, printed as Python, made smaller line by line."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.property.objects import VOCABULARY

ROUTES = ("cell", "global", "default", "helper", "held", "partial", "method")


@dataclass(frozen=True, slots=True)
class Capture:
    """An object that a function reaches without being passed it."""

    name: str
    """What the function calls it."""

    route: str
    """One of `ROUTES`."""

    root: str
    """What it is, in the namespace of the caller."""


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
    captures: tuple[Capture, ...] = ()

    def by(self, *routes: str) -> list[Capture]:
        return [capture for capture in self.captures if capture.route in routes]

    def text(self) -> str:
        """Return the function, and how it gets at what it captures."""
        lines = [f"{c.name} = {c.root}" for c in self.by("global")]
        for c in self.by("helper"):
            lines += [f"{c.name}_global = {c.root}", f"def get_{c.name}(): return {c.name}_global"]
        lines += [f"held_{c.name} = [{c.root}]" for c in self.by("held")]
        cells = self.by("cell")
        if cells:
            names, roots = ", ".join(c.name for c in cells), ", ".join(c.root for c in cells)
            inner = f"{self._definition()}\nreturn {self.name}"
            lines += [f"def make({names}):", textwrap.indent(inner, "    ")]
            lines.append(f"{self.name} = make({roots})")
        else:
            lines.append(self._definition())
        held = [f"{c.name}={c.root}" for c in self.by("partial")]
        if held:
            lines.append(f"{self.name} = partial({', '.join([self.name, *held])})")
        lines += [f"{self.name} = MethodType({self.name}, {c.root})" for c in self.by("method")]
        return "\n".join(lines)

    def _definition(self) -> str:
        body = [f"{c.name} = get_{c.name}()" for c in self.by("helper")]
        body += [f"{c.name} = held_{c.name}[0]" for c in self.by("held")]
        body += [f"with skip: {line}" if self.lenient else line for line in self.lines]
        if self.lenient and self.returned != "None":
            body += ["out = None", f"with skip: out = {self.returned}", "return out"]
        else:
            body.append(f"return {self.returned}")
        text = textwrap.indent("\n".join(body), "    ")
        return f"def {self.name}({self._parameters()}):\n{text}"

    def _parameters(self) -> str:
        given = self.signature.split(", ") if self.signature else []
        last = given.pop() if given and given[-1].startswith("**") else None
        own = [c.name for c in self.by("partial")]
        own += [f"{c.name}={c.root}" for c in self.by("default")]
        if own and not any(name.startswith("*") for name in given):
            given.append("*")
        first = [c.name for c in self.by("method")]
        return ", ".join([*first, *given, *own, *([last] if last else [])])


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


@dataclass(frozen=True, slots=True)
class Rebind:
    """Something else is put where a function reaches an object."""

    function: str
    capture: Capture

    def text(self) -> str:
        name, route, root = self.capture.name, self.capture.route, self.capture.root
        return f"rebind({self.function}, Capture({name!r}, {route!r}, None), {root})"


REBINDABLE = ("cell", "global", "default", "helper", "held")


def rebind(function: Any, capture: Capture, new: Any) -> None:
    """Put an object where a function reaches another one."""
    while not isinstance(function, types.FunctionType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    name, scope = capture.name, function.__globals__
    if capture.route == "cell":
        names = function.__code__.co_freevars
        if name in names:  # else the function does not use it
            function.__closure__[names.index(name)].cell_contents = new
    elif capture.route == "default":
        function.__kwdefaults__[name] = new
    elif capture.route == "held":
        scope[f"held_{name}"][0] = new
    else:
        scope[name if capture.route == "global" else f"{name}_global"] = new


Action = Call | Outside | Rebind
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

    def function(self, name: str, names: dict[str, Any]) -> Callable[..., Any]:
        """Make a function, which captures objects of the caller as they are now."""
        function = next(f for f in self.functions if f.name == name)
        namespace = {**VOCABULARY, **names}
        exec(function.text(), namespace)
        for root in names:  # it reaches what it captures, and nothing else
            del namespace[root]
        return namespace[name]


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
        for i, capture in enumerate(function.captures):
            rest = function.captures[:i], function.captures[i + 1 :]
            simple = dataclasses.replace(capture, route="cell")
            if capture != simple:
                captures = (*rest[0], simple, *rest[1])
                variants.append(dataclasses.replace(function, captures=captures))
            variants.append(dataclasses.replace(function, captures=rest[0] + rest[1]))
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
