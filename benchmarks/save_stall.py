"""`python -m benchmarks.save_stall`: for how long a save stops training, in parts of a step, and what saving costs in
all.

Whole runs of `plait train` with two workers and 36 MB of weights and moments, by turns without a save, with one every
50 steps and one every 10 steps. A save's stall is what each run's own workers report: the copy, and any wait for an
earlier save. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save
from plait.commands.monitoring.session import Session
from plait.commands.train import train
from plait.launch.values.job import Message
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import some_text

STALL_BAR, COST_BAR = 0.15, 0.01
"""Of a step at the 95th percentile; of the throughput with a save every 50 steps."""
EVERY = {"never": "never", "every 50": "50 steps", "every 10": "10 steps"}
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_stall")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "play.txt").write_text(some_text(4000))
        numbers = iter(range(10**6))

        def turn(name: str) -> dict[str, Any]:
            return _turn(Path(folder), name, flags.steps, next(numbers))

        turn("never")  # prepares the text, the plan and the caches
        turns = alternate(list(EVERY), flags.rounds, turn)
    stalls = {name: [s for one in each for s in one["stalls_s"]] for name, each in turns.items()}
    step_s = median(one["step_s"] for one in turns["never"])
    standings = compare({name: [one["whole_s"] for one in each] for name, each in turns.items()}, "never")
    print(f"a step takes {step_s * 1e3:.1f} ms; {turns['never'][0]['state_mb']:.0f} MB of weights and moments")
    print("| saves | stall, median | 95th percentile of a step | bar | steps' time over never | bar |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = {}
    for one in standings:
        values = stalls[one.name]
        p95 = quantiles(values, n=20)[-1] / step_s if len(values) > 1 else float("nan")
        stall_bar = f"{STALL_BAR:.0%} {'met' if p95 <= STALL_BAR else 'missed'}" if values else ""
        cost_told = f"{COST_BAR:.0%} {'met' if one.ratio <= 1 + COST_BAR else 'missed'}"
        cost_bar = cost_told if one.name == "every 50" else ""
        middle = f"{median(values) * 1e3:.2f} ms" if values else ""
        print(f"| {one.name} | {middle} | {p95:.1%} | {stall_bar} | {one.ratio:.3f} | {cost_bar} |")
        stall = p95 if values else None
        found[one.name] = {"stall_p95_of_a_step": stall, "time_ratio": one.ratio, "saves": len(values)}
    result = {"machine": describe(), "step_s": step_s, "standings": found, "turns": turns}
    print(f"\nwritten to {save('save-stall', result)}")


def _turn(folder: Path, name: str, steps: int, number: int) -> dict[str, Any]:
    recipe = {
        "run": {"name": f"run-{number}"},
        "data": {"files": str(folder / "play.txt"), "holdout": 0},
        "model": {"layers": 4, "width": 240, "heads": 4, "vocabulary": 512},
        "train": {"sequence": 128, "batch_tokens": 2048, "budget": f"{steps} steps", "matmul_backend": "default"},
        "layout": {"replicate": 2},
        "checkpoint": {"every": EVERY[name]},
    }
    stalls: list[float] = []
    times: list[float] = []
    original = Session.on_message

    def listening(self: Session, message: Message) -> None:
        if message.kind == "saved" and message.values["step"] < steps:  # at the end it waits for the disk, as it should
            stalls.append(message.values["seconds"])
        if message.kind == "step":
            times.append(message.values["step_s"])
        original(self, message)

    Session.on_message = listening  # type: ignore[method-assign]
    try:
        end = train(recipe, check="never", screen=SilentScreen(), working=WorkingFolder(folder))
    finally:
        Session.on_message = original  # type: ignore[method-assign]
    assert end.stopped_by == "finished", end
    saved = sum(path.stat().st_size for path in (folder / "runs" / f"run-{number}").rglob("*.safetensors"))
    checkpoints = len(list((folder / "runs" / f"run-{number}" / "checkpoints").glob("step-*")))
    return {
        "stalls_s": stalls,
        "step_s": median(times[WARM_UP:]),
        "whole_s": sum(times[WARM_UP:]),
        "state_mb": saved / checkpoints / 1e6,
    }


if __name__ == "__main__":
    main()
