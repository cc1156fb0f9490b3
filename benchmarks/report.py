"""Tables on the screen, JSON and a picture in a folder."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import BARE, CONTESTANTS, Line
from benchmarks.rows import TITLES

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "equinox", "optax")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def cells(line: Line, notes: list[str]) -> list[str]:
    """Return the cells of a line; why a contestant is missing becomes a note."""
    size = "" if line.size is None else f"{line.size:,}"
    row = [line.case, size]
    for name in CONTESTANTS:
        if name in line.values:
            value = _number(line.values[name])
            ratio = line.ratios.get(name)
            row.append(value if name == BARE or ratio is None else f"{value} ({ratio:.2f}x)")
        elif name in line.absent:
            note = f"{name}: {line.absent[name]}"
            if note not in notes:
                notes.append(note)
            row.append(f"[{notes.index(note) + 1}]")
        else:
            row.append("-")
    return [*row[:2], line.unit, *row[2:]]


def _number(value: float) -> str:
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show(row: int, lines: Sequence[Line]) -> None:
    """Print the table of a row: with rich if it is there, plainly otherwise."""
    notes: list[str] = []
    head = ["", "size", "unit", *CONTESTANTS]
    body = [cells(line, notes) for line in lines]
    used = [i for i in range(len(head)) if i < 3 or any(cell[i] != "-" for cell in body)]
    head = [head[i] for i in used]
    body = [[cell[i] for i in used] for cell in body]
    title = f"{row}. {TITLES[row]}"
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(title)
        print(plain(head, body))
    else:
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(head):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
        for cell in body:
            table.add_row(*[Text(text) for text in cell])
        console = Console()
        # a pipe has no width: tables are not cut there
        Console(width=max(console.width, 200) if not console.is_terminal else None).print(table)
    for i, note in enumerate(notes):
        print(f"  [{i + 1}] {note}")
    print(flush=True)


def plain(head: list[str], body: list[list[str]]) -> str:
    """Return a table without colours."""
    rows = [head, *body]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def write_json(lines: Sequence[Line], clock: str, path: Path) -> None:
    """Write all that was measured."""
    found = {"machine": machine(), "clock": clock, "lines": [line._asdict() for line in lines]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def write_picture(lines: Sequence[Line], path: Path) -> bool:
    """Draw cost against size, where a case has several sizes; tell whether there was something."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    panels: dict[tuple[int, str, str], list[Line]] = {}
    for line in lines:
        panels.setdefault((line.row, line.case, line.unit), []).append(line)
    panels = {key: found for key, found in panels.items() if len(found) > 1}
    if not panels:
        return False
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = matplotlib.figure.Figure(figsize=(5.5 * columns, 4 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, ((row, case, unit), found) in zip(axes, panels.items(), strict=False):
        for i, name in enumerate(CONTESTANTS):
            points = [(line.size, line.values[name]) for line in found if name in line.values]
            if points:
                style = (
                    {"color": "black", "linestyle": "--"} if name == BARE else {"color": f"C{i}"}
                )
                axis.plot(*zip(*points, strict=True), marker="o", label=name, **style)
        axis.set(xscale="log", yscale="log", title=f"{row}. {case}", xlabel="leaves", ylabel=unit)
        axis.grid(visible=True, which="both", alpha=0.2)
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return True
