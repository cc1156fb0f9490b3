"""How many random programs behave under a transform as they do plainly.

    python benchmarks/random_programs.py --count 10000 --jobs 2
    python benchmarks/random_programs.py --count 20000 --jobs 2 --transform nested

`nested` puts one to three transforms, chosen by the seed, around each function. In `captured`,
functions reach objects by closures, globals, defaults and such; in `untraced`, they run under
`jax.disable_jit`. `loops` are of several steps, and compared with the Python loop; in `lanes`, each
lane has values of its own, and is compared with the function called on that lane alone.

Prints the counts of equal, unequal and refused programs and the first failures, made smaller, as
Python. The programs are those of `tests/property`: a seed is a program.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 50
CLEAR_EVERY = 10
"""Chunks between two clearings of JAX's caches: every program compiles functions of its own."""


NO_PROGRAM = "no programs: what they do is nothing that a transform has to support"


def run_chunk(chunk: tuple[str, int, int, bool]) -> tuple[Counter[str], list[str]]:
    """Run the programs of some seeds; return the counts, and the failures as text."""
    import jax

    from tests.property.chains import CASES
    from tests.property.failures import failure
    from tests.property.worlds import NotAProgramError, run

    name, start, stop, small = chunk
    counts: Counter[str] = Counter()
    texts: list[str] = []
    for seed in range(start, stop):
        case = CASES[name](seed)
        try:
            outcome = run(case)
        except NotAProgramError:
            counts[NO_PROGRAM] += 1
            continue
        counts[outcome.kind] += 1
        counts["calls that raised, in both worlds"] += outcome.raised
        if outcome.kind == "unequal":
            whole = f"{case.scenario.text()}\n{outcome.kind}: {outcome.message}"
            texts.append(failure(case) if small else whole)
    if start // CHUNK % CLEAR_EVERY == 0:
        jax.clear_caches()
    return counts, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--transform", default="jit")
    parser.add_argument("--show", type=int, default=5, help="how many failures to print")
    parser.add_argument("--whole", action="store_true", help="do not make the failures smaller")
    options = parser.parse_args()
    stop = options.start + options.count
    chunks = [
        (options.transform, seed, min(seed + CHUNK, stop), not options.whole)
        for seed in range(options.start, stop, CHUNK)
    ]
    counts: Counter[str] = Counter()
    failures = 0
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for found, texts in pool.imap(run_chunk, chunks):
            counts += found
            for text in texts:
                failures += 1
                if failures <= options.show:
                    print(text, end="\n\n", flush=True)
    print(f"{options.transform}: {options.count:,} programs, {time.perf_counter() - begin:.0f} s")
    for kind in ("equal", "unequal", "refused", NO_PROGRAM, "calls that raised, in both worlds"):
        print(f"{counts[kind]:8,} {kind}")
    sys.exit(failures > 0)


sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

if __name__ == "__main__":
    main()
