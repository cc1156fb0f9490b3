"""Whether calls that fail leave everything as it was, wherever they fail.

    python benchmarks/faults.py --count 200 --jobs 2
    python benchmarks/faults.py --count 2000 --most 6

The programs are the random ones of `tests/property`, under one to three transforms that the seed
chooses, or under those that `random_programs.py` names. Each call is made to fail at every point
(see `tests/property/faults.py`), or at `--most` of them, by an exception or by an interrupt; then
it has to equal the plain call. Each program runs twice: the second time its calls fail while they
are compiled, and while they run.

Prints how often calls failed, and where, and the programs that were left otherwise than they were.
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
CLEAR_EVERY = 10
"""Programs between two clearings of JAX's caches."""


def fail_everywhere(task: tuple[str, int, int | None]) -> tuple[Counter[str], str]:
    """Let the calls of one program fail; return the counts, and what went wrong as text."""
    import dataclasses

    import jax

    from tests.property.chains import CASES
    from tests.property.faults import Failing, every_point, late, some_points, weakened
    from tests.property.worlds import run

    name, seed, most = task
    case = CASES[name](seed)
    counts: Counter[str] = Counter()
    wrong = ""
    early = every_point if most is None else some_points(most)
    for program, attempts in ((case.scenario, early), (weakened(case.scenario), late)):
        failing = Failing(case.transform, attempts, seed)
        outcome = run(dataclasses.replace(case, scenario=program, transform=failing))
        counts += failing.counts + Counter({f"programs: {outcome.kind}": 1})
        if outcome.kind == "unequal":
            wrong += f"{name} {program.text()}\n{outcome.message}\n"
    if seed % CLEAR_EVERY == 0:
        jax.clear_caches()
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--transform", default="nested", help="see random_programs.py")
    parser.add_argument("--most", type=int, help="how many points of a call; all, if not given")
    parser.add_argument("--show", type=int, default=5, help="how many failures to print")
    options = parser.parse_args()
    seeds = range(options.start, options.start + options.count)
    tasks = [(options.transform, seed, options.most) for seed in seeds]
    counts: Counter[str] = Counter()
    failures = 0
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for found, text in pool.imap_unordered(fail_everywhere, tasks):
            counts += found
            failures += bool(text)
            if text and failures <= options.show:
                print(text, end="\n\n", flush=True)
    print(f"{options.count:,} programs, {time.perf_counter() - begin:.0f} s")
    for name in sorted(counts):
        print(f"{counts[name]:8,} {name}")
    print(f"{failures:8,} programs went wrong")
    sys.exit(failures > 0)


sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

if __name__ == "__main__":
    main()
