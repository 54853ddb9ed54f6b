"""How fast each processor is just now: one and the same small product, timed again and again by processor time.

A virtual machine's processors change their pace by half within seconds, with nothing stolen and nobody else at work:
who shares a core's units with another machine's programs computes more slowly, and no account tells. `python -m
benchmarks.lab.pace CORE FILE` appends lines to a file until its input ends, and takes a thousandth of the core.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

SIZE, TIMES = 256, 4
EVERY_S = 0.5
ROOT = Path(__file__).parents[2]


class Pace:
    """Watches some processors until it is ended."""

    def __init__(self, cores: Sequence[int], folder: Path) -> None:
        self._files = {core: folder / f"pace-{core}" for core in sorted(set(cores))}
        self._watchers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.lab.pace", str(core), str(file)],
                cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            for core, file in self._files.items()
        ]  # fmt: skip

    def end(self) -> None:
        """Let nobody watch any more."""
        for watcher in self._watchers:
            assert watcher.stdin
            watcher.stdin.close()
            watcher.wait()

    def product_s(self, core: int, begin_s: float, end_s: float) -> float:
        """Processor seconds of the product on a core, its mean between two moments of time.monotonic; 0: not seen."""
        file = self._files[core]
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        seen = [(float(at), float(took)) for at, took in (line.split() for line in lines)]
        during = [took for at, took in seen if begin_s <= at <= end_s]
        return mean(during) if during else 0.0


def main() -> None:
    import numpy as np

    core, file = int(sys.argv[1]), Path(sys.argv[2])
    os.sched_setaffinity(0, {core})
    left = right = np.full((SIZE, SIZE), 0.5, dtype=np.float32)
    with file.open("w", buffering=1) as out:
        while not select.select([sys.stdin], [], [], EVERY_S)[0]:
            took = []
            for _ in range(TIMES):  # the first ones find their caches cold
                begun = time.process_time_ns()
                np.matmul(left, right)
                took.append(time.process_time_ns() - begun)
            out.write(f"{time.monotonic():.3f} {min(took) / 1e9:.9f}\n")


if __name__ == "__main__":
    main()
