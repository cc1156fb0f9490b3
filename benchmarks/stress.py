"""Many threads at once on shared objects, for as long as you like.

    python benchmarks/stress.py --seconds 60 --threads 8

The tasks are those of `tests/property/stress.py`: what reads must be right, what is counted must be
counted once. Prints what was done, and ends with an error if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=float, default=10.0, help="seconds with one set of objects")
    options = parser.parse_args()

    from tests.property.stress import Crowd

    done: Counter[str] = Counter()
    begin, rounds = time.monotonic(), 0
    while (left := options.seconds - (time.monotonic() - begin)) > 0:
        crowd = Crowd(options.seed + rounds)
        crowd.run(options.threads, min(left, options.round))
        done += crowd.done
        rounds += 1
    print(f"{options.threads} threads, {rounds} rounds, {time.monotonic() - begin:.0f} s")
    for name in sorted(done):
        print(f"{done[name]:9,} {name}")
    print("nothing went wrong")


sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

if __name__ == "__main__":
    main()
