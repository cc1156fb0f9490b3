"""The source of a follower."""

from __future__ import annotations

from typing import Any

FILE = f"<{__name__}>"
"""The file that the frame of a follower says it is in."""


class Source:
    """The source of a function, and the names that it uses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._count = 0

    def add(self, line: str, depth: int = 1) -> None:
        """Add a line."""
        self.lines.append("    " * depth + line)

    def unless(self, condition: str) -> None:
        """Go the general way unless a condition holds."""
        self.add(f"if not ({condition}): return AGAIN")

    def guard(self, start: int) -> None:
        """Go the general way if one of the lines from `start` on fails.

        They fail where somebody writes what they read, or where it has another length than the
        names that it is unpacked to.
        """
        lines = [f"    {line}" for line in self.lines[start:]]
        self.lines[start:] = ["    try:", *lines]
        self.add("except (LookupError, ValueError, RuntimeError): return AGAIN")

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
        source = "\n".join(["def follow(args, kwargs):", *self.lines])
        exec(compile(source, FILE, "exec"), self.names)
        return self.names["follow"]
