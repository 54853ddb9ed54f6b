"""`make speedrun`: a record to beat. How long until two cores have learned Shakespeare to a fixed held-out loss?

    python -m benchmarks.speedrun [--seeds 1 2 3] [SETTING ...]

Each seed is one `plait train` of recipe 01's text, with SETTINGS (and those named behind the command) and a fixed
number of steps, whose held-out text is read twenty times. What counts is the first reading at TARGET or below: the
seconds of the steps until then, and the processor seconds of the whole command. Model, batch, order of the data and
arithmetic are named, so that the losses are the same to the bit on the same processor, however busy it is; the seconds
are not. Written to benchmarks/results, with the versions; docs/speed.md has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import ROOT, describe
from benchmarks.pairing import save

RECIPE = ROOT / "recipes" / "01-shakespeare.toml"
TARGET = 1.37
"""Nats a byte: what AdamW, a cosine and the rates of 2024's rules reached here in four minutes."""
STEPS = 720
SETTINGS = (
    "run.workers=1", "run.threads=2", "model.size=500K", "train.precision=float32", "train.matmul_backend=onednn",
    "train.batch_tokens=4096", f"train.budget={STEPS} steps", f"report.evaluate={STEPS // 20} steps",
    "optimizer.kind=muon", "optimizer.schedule=linear",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One seed; the first three are None where the target was not reached."""

    seed: int
    step: int | None
    tokens: int | None
    train_s: float | None
    """Seconds of the steps until the target was read."""
    processor_s: float
    """Of the whole command."""
    last_loss: float


def main() -> int:
    """Train by each seed; 1 where the target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("settings", nargs="*", help="settings that override the record's own")
    flags = parser.parse_args()
    trials = []
    for seed in flags.seeds:
        trials.append(_trial(seed, (*SETTINGS, *flags.settings)))
        print(_line(trials[-1]), flush=True)
    reached = [trial for trial in trials if trial.train_s is not None]
    if len(reached) == len(trials):
        median = statistics.median(trial.train_s for trial in reached if trial.train_s is not None)
        print(f"median {median:.0f} s of training to {TARGET} nats a byte")
    values = {"machine": describe(), "target": TARGET, "settings": [*SETTINGS, *flags.settings]}
    print(f"written to {save('speedrun', {**values, 'trials': [asdict(trial) for trial in trials]})}")
    return int(len(reached) < len(trials))


def _trial(seed: int, settings: Sequence[str]) -> Trial:
    path = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "plait",
            "train",
            str(RECIPE),
            "run.name=record",
            f"run.seed={seed}",
            *settings,
        ]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"seed {seed} failed:\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "runs" / "record" / "metrics.jsonl").read_text().splitlines()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return read_trial(seed, [json.loads(line) for line in lines], spent)


def read_trial(seed: int, lines: Sequence[dict[str, float]], processor_s: float) -> Trial:
    """What a run's metrics say."""
    steps = [line for line in lines if "step_s" in line]
    read = [line for line in lines if line.get("eval_nats_per_byte") is not None]
    first = next((line for line in read if line["eval_nats_per_byte"] <= TARGET), None)
    until = [line for line in steps if first is not None and line["step"] <= first["step"]]
    return Trial(
        seed=seed,
        step=None if first is None else int(first["step"]),
        tokens=int(until[-1]["tokens"]) if until else None,
        train_s=round(sum(line["step_s"] for line in until), 1) if until else None,
        processor_s=round(processor_s, 1),
        last_loss=read[-1]["eval_nats_per_byte"],
    )


def _line(trial: Trial) -> str:
    if trial.train_s is None:
        return f"seed {trial.seed}: {TARGET} nats a byte not reached; {trial.last_loss:.4f} at the end"
    return (
        f"seed {trial.seed}: {TARGET} nats a byte after {trial.step} steps, {trial.tokens:,} tokens, "
        f"{trial.train_s:.0f} s of training; {trial.last_loss:.4f} at the end"
    )


if __name__ == "__main__":
    sys.exit(main())
