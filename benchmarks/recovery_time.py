"""`python -m benchmarks.recovery_time`: seconds from a kill -9 to the first new step, of plait's own workers and of the
same training under torchrun.

Each round kills one worker of a run of plait ("warm": the process that starts workers has torch loaded), the process
that starts workers itself ("cold": another one has to load torch), and a worker below `torchrun --max-restarts`, which
starts `plait train` again. All are seen from outside in the same way: a new line in starts.jsonl, then a new step in
metrics.jsonl. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from tests.end_to_end.command import Place, wait_while_running

BARS_S = {"warm": 1.0, "cold": 3.0}
"""At the 95th percentile."""
KILLS_OF_A_RUN = 5
STEPS_BETWEEN = 25
RECIPE = """
[data]
files = "play.txt"

[model]
layers = 4
width = 128
heads = 4
vocabulary = 300

[train]
sequence = 64
batch_tokens = 512
budget = "1000000 steps"
matmul_backend = "default"

[layout]
replicate = 2

[checkpoint]
every = "10 steps"

[recover]
give_up_after = 1000
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1000")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_time")
    parser.add_argument("--rounds", type=int, default=4, help=f"each kills {KILLS_OF_A_RUN} times in each contender")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    flags = parser.parse_args()
    print(f"seed {flags.seed}")
    dice = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), RECIPE)
        ended = place.run("train", "tiny.toml", "run.name=prepares", "train.budget=3 steps")
        assert ended.code == 0, ended
        contenders = {"warm": "-m plait", "cold": "-m plait", "torchrun": "torchrun -m plait"}
        turns = alternate(list(contenders), flags.rounds, lambda name: _turn(place, name, dice))
    seconds = {name: [one for turn in each for one in turn] for name, each in turns.items()}
    print("| killed | times | median s | 95th percentile | most | bar |")
    print("| --- | --- | --- | --- | --- | --- |")
    standings = {}
    for name, values in seconds.items():
        p95 = quantiles(values, n=20)[-1]
        bar = BARS_S.get(name)
        told = "" if bar is None else f"{bar} {'met' if p95 <= bar else 'missed'}"
        print(f"| {name} | {len(values)} | {median(values):.2f} | {p95:.2f} | {max(values):.2f} | {told} |")
        standings[name] = {"median_s": median(values), "p95_s": p95, "most_s": max(values), "bar_s": bar}
    result = {"machine": describe(), "seed": flags.seed, "standings": standings, "turns": turns}
    print(f"\nwritten to {save('recovery-time', result)}")


def _turn(place: Place, name: str, dice: random.Random) -> list[float]:
    """Seconds to the first new step after each kill in one run."""
    run = f"{name}-{dice.randrange(1 << 30)}"
    words, module = ("train", "tiny.toml", f"run.name={run}", "--no-check"), ("-m", "plait")
    words, module = (("-m", "plait", *words), TORCHRUN) if name == "torchrun" else (words, module)
    process = place.start(*words, module=module)
    try:
        victims = [_victim(place, run, name, process, dice) for _ in range(KILLS_OF_A_RUN)]
        return [_back_after_s(place, run, process, victim) for victim in victims]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        while place.processes():
            time.sleep(0.05)


def _back_after_s(place: Place, run: str, process: subprocess.Popen[str], victim: Callable[[], int]) -> float:
    target = _steps(place, run) + STEPS_BETWEEN
    wait_while_running(lambda: _steps(place, run) >= target, process)
    pid, starts = victim(), _lines(place.path(run) / "starts.jsonl")
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_while_running(lambda: _lines(place.path(run) / "starts.jsonl") > starts, process)
    # The metrics are cut back before the line of the new start is written, so that any more lines are new.
    done = json.loads((place.path(run) / "starts.jsonl").read_text().splitlines()[-1])["steps_done"]
    wait_while_running(lambda: _steps(place, run) > done, process)
    return time.monotonic() - at


def _victim(
    place: Place, run: str, name: str, process: subprocess.Popen[str], dice: random.Random
) -> Callable[[], int]:
    rank = dice.randrange(2)
    if name == "cold":
        return lambda: _fork_server(process.pid)
    if name == "torchrun":
        return lambda: _children(process.pid)[rank]
    return lambda: place.rank_process(run, rank)


def _fork_server(pid: int) -> int:
    return next(one for one in _children(pid) if b"forkserver" in Path(f"/proc/{one}/cmdline").read_bytes())


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _steps(place: Place, run: str) -> int:
    path = place.path(run) / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main()
