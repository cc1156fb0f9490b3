"""The source of a function that is written by the program."""

from __future__ import annotations

from typing import Any


class Source:
    """The source of a function, and the names that it uses.

    Arguments:
        head: its name and its arguments.
        otherwise: the expression that it returns where what it was written for does not hold.
        file: the name of the file that its frames say they are in.
    """

    def __init__(self, head: str, otherwise: str, file: str) -> None:
        self._head, self._otherwise, self._file = head, otherwise, file
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._count = 0

    def add(self, line: str, depth: int = 1) -> None:
        """Add a line."""
        self.lines.append("    " * depth + line)

    def unless(self, condition: str) -> None:
        """Give up unless a condition holds."""
        self.add(f"if not ({condition}): return {self._otherwise}")

    def guard(self, start: int) -> None:
        """Give up if one of the lines from `start` on fails.

        They fail where somebody writes what they read, or where it has another length than the
        names that it is unpacked to.
        """
        lines = [f"    {line}" for line in self.lines[start:]]
        self.lines[start:] = ["    try:", *lines]
        self.add(f"except (LookupError, ValueError, RuntimeError): return {self._otherwise}")

    def prefer(self, start: int, line: str) -> None:
        """Put an `if` with all that it does before the lines from `start` on, its `else`."""
        lines = [f"    {line}" for line in self.lines[start:]]
        self.lines[start:] = [f"    {line}", "    else:", *lines]

    def fresh(self, prefix: str = "a") -> str:
        """Return the name of a new variable."""
        self._count += 1
        return f"{prefix}{self._count}"

    def constant(self, value: Any) -> str:
        """Return the name of a value."""
        name = self.fresh("c")
        self.names[name] = value
        return name

    def compile(self) -> Any:
        """Return the function."""
        source = "\n".join([f"def {self._head}:", *self.lines])
        exec(compile(source, self._file, "exec"), self.names)
        return self.names[self._head.partition("(")[0]]
