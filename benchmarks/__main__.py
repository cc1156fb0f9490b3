"""Measure anabranch against bare JAX, flax nnx and equinox.

    python -m benchmarks --rows 1,4 --quick

All contestants of a line are measured in one run, in turn. Prints tables, and writes
`results.json` and `results.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import models, report
from benchmarks.measure import CLOCKS, CONTESTANTS, FULL, QUICK, Absent, Line
from benchmarks.rows import ROWS, TITLES

OUT = Path(__file__).parent / "out"


def rows_of(text: str) -> list[int]:
    """Read `1,4` or `2-5`; raise `ArgumentTypeError` for a row that is not there."""
    chosen: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            chosen += range(int(first), int(last or first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no row: write 1,4 or 2-5") from None
    unknown = [row for row in chosen if row not in ROWS]
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"there is no row {unknown}; rows are 1 to {max(ROWS)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure anabranch against bare JAX, flax nnx and equinox.",
        epilog="\n".join(f"{row}  {title}" for row, title in TITLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=rows_of, default=list(ROWS), help="1,4 or 2-5; default all")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument(
        "--contestants", default=",".join(CONTESTANTS), help="some of them, separated by commas"
    )
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="elapsed time, or on a busy machine the CPU time of the process",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where JSON and picture go")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # other libraries warn of what they are about to change
    effort = (QUICK if options.quick else FULL)._replace(
        contestants=tuple(options.contestants.split(",")), clock=options.clock
    )
    for library in (models.flax_nnx, models.equinox):
        with contextlib.suppress(Absent):
            library()  # JAX compiles everything anew after flax was imported
    start = time.perf_counter()
    found: list[Line] = []
    print("  ".join(f"{name} {version}" for name, version in report.machine()["versions"].items()))
    print(f"{options.clock} time of a call, and the ratio to bare jax\n", flush=True)
    for row in options.rows:
        lines = list(ROWS[row](effort))
        report.show(row, lines)
        found += lines
        jax.clear_caches()
    options.out.mkdir(parents=True, exist_ok=True)
    report.write_json(found, options.clock, options.out / "results.json")
    drawn = report.write_picture(found, options.out / "results.png")
    written = "results.json" + (" and results.png" if drawn else "")
    print(f"{written} in {options.out}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
