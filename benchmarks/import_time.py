"""What `import anabranch` costs on top of `import jax`.

    python benchmarks/import_time.py [repeats]

Each import runs in a fresh interpreter, in turns, and the fastest of each counts: what disturbs an
import only makes it slower.
"""

import subprocess
import sys

_TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
STATEMENTS = {"jax": "import jax, jax.numpy", "anabranch": "import jax, jax.numpy, anabranch"}


def import_seconds(statement: str) -> float:
    command = [sys.executable, "-c", _TIMED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    import_seconds(STATEMENTS["anabranch"])  # writes the bytecode
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(repeats):
        for name, statement in STATEMENTS.items():
            seconds[name].append(import_seconds(statement))
    bare, ours = (1e3 * min(seconds[name]) for name in ("jax", "anabranch"))
    print(f"fastest of {repeats}")
    print(f"jax              {bare:8.1f} ms")
    print(f"jax + anabranch  {ours:8.1f} ms   {ours - bare:+.1f} ms, {ours / bare:.3f} x")


if __name__ == "__main__":
    main()
