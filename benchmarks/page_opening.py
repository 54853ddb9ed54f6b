"""How long a run of a million steps takes to open, by the clock: `plait watch` is asked for all that its page asks for.

    .venv/bin/python -m benchmarks.page_opening [--steps 1000000] [--rounds 5]   # on a machine that does nothing else

Each round starts a server of its own, which has read nothing yet. The clock runs from the first request, for the page,
to the last byte of the run's curves; starting Python is not counted, nor drawing, of 1,024 buckets at most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from benchmarks.machine import ROOT, describe
from benchmarks.pairing import save
from plait.working_folder import WorkingFolder
from tests.report.test_report_metrics import step_report
from tests.run_files.written_runs import written_run

NAME, BAR_S = "long", 1.5
REQUESTED = ("", "watch.css", "watch.js", "api/runs", f"api/runs/{NAME}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One round."""

    seconds: float
    """Of all requests."""
    run_s: float
    """Of the request for the run's curves."""
    answer_bytes: int
    """Length of that answer."""


def main() -> None:
    """Open the run once in each round, and judge the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    with TemporaryDirectory() as folder:
        size = write_run(Path(folder), flags.steps)
        rounds = [open_once(Path(folder), flags.steps) for _ in range(flags.rounds)]
    seconds = median(one.seconds for one in rounds)
    for one in rounds:
        print(f"{one.seconds:.3f} s, of which {one.run_s:.3f} s for a run's curves of {one.answer_bytes:,} bytes")
    print(f"median {seconds:.3f} s for {flags.steps:,} lines ({size:,} bytes), bar {BAR_S} s")
    result = {
        "machine": describe(),
        "steps": flags.steps,
        "metrics_bytes": size,
        "median_s": seconds,
        "bar_s": BAR_S,
        "rounds": [asdict(one) for one in rounds],
    }
    print(f"written to {save('page-opening', result)}")
    if seconds > BAR_S:
        sys.exit("the bar is missed")


def write_run(folder: Path, steps: int) -> int:
    """A run of that many steps, with numbers as long as a run writes them; returns the bytes of its metrics."""
    run = written_run(WorkingFolder(folder), NAME)
    line = json.loads(step_report(1).to_line()) | {"loss": 2.345678901234567, "step_s": 0.6123456789012345}
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            line |= {"step": step, "tokens": step * 6144}
            file.write(json.dumps(line) + "\n")
    return run.metrics.stat().st_size


def open_once(folder: Path, steps: int) -> Opening:
    """Start the server, and request what the page requests."""
    command = [sys.executable, "-m", "plait", "watch", NAME, "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    seconds, text = list[float](), b""
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            printed = next(line for line in server.stdout if line.startswith("page "))
            page, _, token = printed.split()[-1].partition("?")
            for path in REQUESTED:
                began_s = time.perf_counter()
                with urlopen(f"{page}{path}?{token}", timeout=60) as answer:
                    text = answer.read()
                seconds.append(time.perf_counter() - began_s)
        finally:
            server.terminate()
    assert json.loads(text)["step"] == steps, "the whole run was read"
    return Opening(seconds=sum(seconds), run_s=seconds[-1], answer_bytes=len(text))


if __name__ == "__main__":
    main()
