"""The source of a follower: its lines, and those that take the arguments of a call apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.graph import _classify, _kinds, _module, _static
from anabranch.graph._kinds import Kind
from anabranch.transforms._watch import Unplannable

FILE = f"<{__name__}>"
"""The file that the frame of a follower says it is in."""

_LINES = 20000  # of source; longer ones take long to compile


class Source:
    """The source of a function, and the names that it uses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._count = 0

    def add(self, line: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + line)

    def unless(self, condition: str) -> None:
        """Go the general way unless a condition holds."""
        self.add(f"if not ({condition}): return AGAIN")

    def fresh(self, prefix: str = "a") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def constant(self, value: Any) -> str:
        name = self.fresh("c")
        self.names[name] = value
        return name

    def compile(self) -> Any:
        source = "\n".join(["def follow(args, kwargs):", *self.lines])
        exec(compile(source, FILE, "exec"), self.names)
        return self.names["follow"]


class Arguments:
    """The part that takes the arguments of a call apart, and compares them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.roots: list[str] = []
        self.starts: list[int] = []  # how many leaves come before each root
        self.leaves: list[str] = []
        self.nodes: list[str] = []  # those with identity that are no roots

    def take(self, name: str, x: Any, *, numbers: bool = True) -> None:
        """Compare what a variable holds with what it held when the plan was made.

        Arguments:
            name: of the variable.
            x: what it held.
            numbers: whether Python numbers are leaves here.
        """
        source, cls = self.source, type(x)
        rule = _classify.RULES.get(cls)
        if rule is _classify.LEAF or (rule is _classify.NUMBER and numbers):
            source.unless(f"type({name}) in {source.constant(_leaf_types(numbers))}")
            self.leaves.append(name)
        elif isinstance(rule, Kind) and rule.is_root:
            source.unless(f"id({name}) == {id(x)}")
            self.add_root(name)
        elif rule is _kinds.VARIABLE:
            self._take_variable(name, x)
        elif rule is _kinds.OBJECT:
            self._take_object(name, x)
        elif cls in (list, tuple, dict):
            self._take_container(name, x, cls, numbers=numbers)
        else:
            self.take_static(name, x)

    def add_root(self, name: str) -> None:
        """Add an object that can keep what plans know of it, and that is known to be the same."""
        self.roots.append(name)
        self.starts.append(len(self.leaves))

    def take_static(self, name: str, x: Any) -> None:
        """Compare a static value."""
        value, cls = self.source.constant(x), self.source.constant(type(x))
        if type(x) in _static.EXACT_BY_TYPE:
            same = f"{name} is {value} or (type({name}) is {cls} and {name} == {value})"
        elif type(x) in (float, complex):
            same = f"{name} is {value}"
        else:
            raise Unplannable
        self.source.unless(same)

    def _take_variable(self, name: str, x: Any) -> None:
        source, value = self.source, self.source.fresh()
        cls, metadata = source.constant(type(x)), source.constant(x._metadata)
        source.unless(f"type({name}) is {cls} and {name}._metadata is {metadata}")
        self.nodes.append(name)
        source.add(f"{value} = {name}._value")
        if _classify.RULES.get(type(x._value)) in (_classify.LEAF, _classify.NUMBER):
            self.leaves.append(value)  # what is no leaf, JAX takes for another structure
        else:
            self.take(value, x._value)

    def _take_object(self, name: str, x: Any) -> None:
        source, cls = self.source, type(x)
        plain = cls.__getattribute__ is object.__getattribute__ and hasattr(x, "__dict__")
        if not plain or _module.slot_names(cls):
            raise Unplannable
        attributes = source.fresh()
        source.unless(f"type({name}) is {source.constant(cls)}")
        source.add(f"{attributes} = {name}.__dict__")
        source.unless(f"[*{attributes}] == {source.constant([*vars(x)])}")
        self.nodes.append(name)
        self.take_all(f"{attributes}.values()", [*vars(x).values()], numbers=False)

    def _take_container(self, name: str, x: Any, cls: type, *, numbers: bool) -> None:
        source = self.source
        source.unless(f"type({name}) is {cls.__name__} and len({name}) == {len(x)}")
        children = [*x.values()] if cls is dict else [*x]
        if cls is dict:
            if any(type(key) is not str for key in x):
                raise Unplannable
            source.unless(f"[*{name}] == {source.constant([*x])}")
        if cls is not tuple:
            self.nodes.append(name)
        expression = f"{name}.values()" if cls is dict else name
        self.take_all(expression, children, numbers=numbers)

    def take_all(self, expression: str, children: Sequence[Any], *, numbers: bool) -> None:
        """Compare all children."""
        if len(self.source.lines) > _LINES:
            raise Unplannable
        if children:
            names = [self.source.fresh() for _ in children]
            self.source.add(f"{', '.join(names)}, = {expression}")
            for name, child in zip(names, children, strict=True):
                self.take(name, child, numbers=numbers)

    def check_nodes(self, segments: Sequence[str]) -> None:
        """Compare nodes with one another, and with what hangs on roots: all must be different."""
        if len(self.nodes) == 1:
            for segment in segments:
                self.source.unless(f"id({self.nodes[0]}) not in {segment}.ids")
        elif self.nodes:
            ids = "{" + ", ".join([f"id({name})" for name in self.nodes]) + "}"
            self.source.add(f"ids = {ids}")
            self.source.unless(f"len(ids) == {len(self.nodes)}")
            for segment in segments:
                self.source.unless(f"ids.isdisjoint({segment}.ids)")


def _leaf_types(numbers: bool) -> frozenset[type]:
    leaf = (_classify.LEAF, _classify.NUMBER) if numbers else (_classify.LEAF,)
    return frozenset([cls for cls, rule in [*_classify.RULES.items()] if rule in leaf])
