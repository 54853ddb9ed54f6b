"""`python -m benchmarks.submit_start`: from `plait submit` to the first step, beyond the scheduler's own time.

A real Slurm of this machine (root, and the packages that `make slurm` installs), two nodes of one core each, a tiny
model. The run was begun and stopped before, so its plan is kept and its text is prepared. A round types the command
again and waits for the first step after the checkpoint; the scheduler's own time is from the start of sbatch to the
first sign of the job's script, which is its log. Kept in results/submit-start-DATE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.pairing import save
from tests.end_to_end.command import RECIPE, Place
from tests.slurm.cluster import SlurmCluster, wait_for

BAR_S = 5.0
NAME = "start"
ENDLESS = RECIPE.replace('budget = "60 steps"', 'budget = "1000000 steps"')
EVEN = ("layout.shares=[4, 3]", 'balance.every="never"')
_SHIM = '#!/bin/sh\ndate +%s.%N >"{mark}"\nexec {sbatch} "$@"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start: seconds from the command to sbatch, in Slurm, and from the job's script to the first step."""

    to_sbatch_s: float
    in_slurm_s: float
    to_first_step_s: float

    @property
    def beyond_s(self) -> float:
        return self.to_sbatch_s + self.to_first_step_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submit_start")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plait-submit-") as name, slurm_in(Path(name)) as slurm:
        place = Place(Path(name) / "shared", ENDLESS)
        mark = shim_of_sbatch(Path(name))
        one_start(slurm, place, mark, Path(name))  # makes the plan and the data
        starts = [one_start(slurm, place, mark, Path(name)) for _ in range(flags.rounds)]
    print("| round | to sbatch | Slurm's own | from the job's script to the first step | beyond Slurm |")
    print("| --- | --- | --- | --- | --- |")
    for number, one in enumerate(starts, 1):
        parts = f"{one.to_sbatch_s:.2f} s | {one.in_slurm_s:.2f} s | {one.to_first_step_s:.2f} s"
        print(f"| {number} | {parts} | {one.beyond_s:.2f} s |")
    beyond_s = median(one.beyond_s for one in starts)
    met = beyond_s <= BAR_S
    rounds = [{**asdict(one), "beyond_s": one.beyond_s} for one in starts]
    path = save("submit-start", {"machine": describe(), "bar_s": BAR_S, "beyond_s": beyond_s, "rounds": rounds})
    print(f"\nmedian {beyond_s:.2f} s, bar {BAR_S:g} s: {'met' if met else 'missed'}; written to {path}")
    return int(not met)


@contextlib.contextmanager
def slurm_in(folder: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder / "daemons")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def shim_of_sbatch(folder: Path) -> Path:
    """An sbatch first in PATH that notes when it was started; returns where."""
    real, mark = shutil.which("sbatch"), folder / "sbatch-began"
    if real is None:
        raise SystemExit("sbatch is not here; make slurm installs it")
    shim = folder / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text(_SHIM.format(mark=mark, sbatch=real))
    shim.chmod(0o755)
    return mark


def one_start(slurm: SlurmCluster, place: Place, mark: Path, folder: Path) -> Start:
    """Submit, wait for the first step that is new, stop, and wait until all is over."""
    before = len(starts_of(place))
    environment = {**slurm.environment, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    words = ("submit", "tiny.toml", f"run.name={NAME}", *EVEN, "--on", "slurm", "--nodes", "2")
    began_s = time.time()
    told = place.run(*words, environment=environment)
    if told.code:
        raise SystemExit(told.err)
    number = told.out.split("job ")[1].split()[0]
    log = place.folder / f"{NAME}-{number}.log"
    wait_for(log.exists, "the job's log", 120)
    script_s = birth_of(log)
    while not has_stepped(place, before):
        time.sleep(0.01)
    first_step_s = time.time()
    wait_for(lambda: bool(place.checkpoints(NAME)), "a checkpoint", 240)
    slurm.ask("scancel", number)
    slurm.wait_for_job(number, "CANCELLED")
    sbatch_s = float(mark.read_text())
    return Start(
        to_sbatch_s=sbatch_s - began_s, in_slurm_s=script_s - sbatch_s, to_first_step_s=first_step_s - script_s
    )


def birth_of(file: Path) -> float:
    """When a file was made, in seconds since 1970, as stat(1) tells it."""
    done = subprocess.run(["stat", "--format=%.9W", str(file)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def starts_of(place: Place) -> list[int]:
    """For each start of the run's workers the steps done before it."""
    file = place.path(NAME) / "starts.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["steps_done"] for line in lines if line.endswith("}")]


def has_stepped(place: Place, starts_before: int) -> bool:
    """Whether a start after those has told of a step of its own; what came after its checkpoint was cut off before."""
    starts, metrics = starts_of(place), place.path(NAME) / "metrics.jsonl"
    if len(starts) <= starts_before or not metrics.exists():
        return False
    steps = [json.loads(line).get("step", 0) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return bool(steps) and steps[-1] > starts[-1]


if __name__ == "__main__":
    sys.exit(main())
