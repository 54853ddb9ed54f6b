"""One turn of fine-tuning by plait or by TRL, in processes of its own: losses, seconds of steps, and peak memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.data.rows import IGNORED_TARGET
from plait.data.samples.opening import training_samples
from plait.data.shards import open_corpus
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.report.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 2
LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuningTurn:
    """What a turn came to. `tokens` are those of the examples of each step, without padding."""

    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    peak_bytes: int
    """Of all its processes together, at the worst moment; what several share is counted once."""

    @property
    def tokens_per_s(self) -> float:
        """After the steps that warm up."""
        return sum(self.tokens[WARM_UP_STEPS:]) / sum(self.step_s[WARM_UP_STEPS:])


def plait_turn(place: Path, recipe: Path, name: str) -> tuple[FinetuningTurn, Plan]:
    """Train a recipe under this name in the folder `place`; also returns the plan of it."""
    command = [sys.executable, "-m", "plait", "train", str(recipe), f"run.name={name}", "--no-check"]
    peak = run_watched([command], place, [{}], place / f"{name}.log")
    run = place / "runs" / name
    plan, (steps, _) = read_plan(run / "plan.json"), read_metrics(run / "metrics.jsonl")
    turn = FinetuningTurn(
        losses=tuple(step.loss for step in steps),
        tokens=tuple(
            sum(sum(row["seq_lengths"]) - len(row["seq_lengths"]) for row in rows) for rows in read_steps(place, plan)
        ),
        step_s=tuple(step.step_s for step in steps),
        peak_bytes=peak,
    )
    return turn, plan


def trl_turn(folder: Path, job: Mapping[str, object], ranks: int) -> FinetuningTurn:
    """Train by TRL what a job says (peers/trl_sft.py), in so many processes."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({**job, "folder": str(folder)}))
    command = [sys.executable, "-m", "benchmarks.peers.trl_sft", str(folder / "job.json")]
    peak = run_watched([command] * ranks, ROOT, _variables(ranks), folder / "trl.log")
    answers = [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(ranks)]
    return FinetuningTurn(
        # Each rank's loss is multiplied by their number, as their gradients' mean is taken.
        losses=tuple(sum(each) / ranks for each in zip(*(one["losses"] for one in answers), strict=True)),
        tokens=tuple(sum(each) for each in zip(*(one["tokens"] for one in answers), strict=True)),
        step_s=tuple(max(each) for each in zip(*(one["step_s"] for one in answers), strict=True)),
        peak_bytes=peak,
    )


def read_steps(place: Path, plan: Plan) -> list[list[dict[str, list[int]]]]:
    """The windows of each step of a run in `place`, as TRL takes packed rows: of an example of n + 1 tokens plait reads
    n and predicts n; here it is there with all its tokens, and a label for each."""
    reader = training_samples(open_corpus(place / plan.job.corpus), 1, plan.job.sequence, overlong="drop")
    steps = list[list[dict[str, list[int]]]]()
    for step in range(plan.job.steps):
        positions = np.arange(step * plan.job.batch_sequences, (step + 1) * plan.job.batch_sequences)
        found = reader.read(reader.places(positions))
        rows = [{"input_ids": [], "labels": [], "seq_lengths": []} for _ in positions]
        begin = 0
        for length in found.lengths.tolist():
            row, first = divmod(begin, plan.job.sequence)
            inputs, targets = (one[row, first : first + length].tolist() for one in (found.inputs, found.targets))
            begin += length
            if set(targets) != {IGNORED_TARGET}:  # else it is what examples leave free
                rows[row]["input_ids"] += [*inputs, targets[-1]]
                rows[row]["labels"] += [IGNORED_TARGET, *targets]
                rows[row]["seq_lengths"].append(length + 1)
        steps.append(rows)
    return steps


def run_watched(
    commands: Sequence[Sequence[str]], place: Path, variables: Sequence[Mapping[str, str]], log: Path
) -> int:
    """Run commands side by side to their end and return the peak of their memory in bytes; ends the benchmark with the
    tail of their log where one fails."""
    path = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    with log.open("wb") as file:
        running = [
            subprocess.Popen(
                command,
                cwd=place,
                env={**os.environ, "PYTHONPATH": path, **own},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for command, own in zip(commands, variables, strict=True)
        ]
    try:
        with MemoryWatch([one.pid for one in running]) as watch:
            codes = [one.wait() for one in running]
    finally:
        for one in running:
            one.kill()
    if any(codes):
        sys.exit(f"a contender ended with {codes}:\n{log.read_text()[-4000:]}")
    return watch.peak_bytes


class MemoryWatch:
    """Looks a few times a second how much memory processes and their children hold together."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = 0
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_bytes, with_children(self._pids))))


def with_children(pids: Sequence[int]) -> list[int]:
    """These processes and all that descend from them."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    found, waiting = list[int](), list(pids)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += [child for child, parent in parents.items() if parent == pid]
    return found


def proportional_bytes(pid: int) -> int:
    """A process' resident memory; a page that n processes share counts an nth. 0 of one that is over."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _variables(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
