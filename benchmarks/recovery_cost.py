"""`python -m benchmarks.recovery_cost`: what a healthy run pays for being able to go on after failures.

A whole `plait train` with two workers, whose added code is counted directly: processor seconds of what publishes
progress, copies and writes checkpoints, judges numbers and looks for hangs, and the waits in it. Their sum stands over
the run's own processor seconds and waits, which are its workers times its time. A difference of two runs' times would
drown in noise.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.pairing import save
from benchmarks.recovery_cost_rank import FOLDER, Counted
from plait.commands.monitoring import session
from plait.commands.train import train
from plait.launch.local.hang_monitor import HangMonitor
from plait.screen.screen import SilentScreen
from plait.workers import ENTRIES, TRAINING_ENTRY
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import some_text

BAR = 0.02
RANK = "benchmarks.recovery_cost_rank:main"
MODELS: dict[str, dict[str, Any]] = {
    "1M": {"layers": 4, "width": 128, "heads": 4, "vocabulary": 512, "tokens": 1024, "every": "auto"},
    "3M": {"layers": 4, "width": 240, "heads": 4, "vocabulary": 512, "tokens": 2048, "every": "auto"},
    "3M, saved every 10 steps": {
        "layers": 4, "width": 240, "heads": 4, "vocabulary": 512, "tokens": 2048, "every": "10 steps"
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_cost")
    parser.add_argument("--steps", type=int, default=400)
    flags = parser.parse_args()
    found = {}
    print("| model | step | publishing | saving | numbers | supervising | in all | bar |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = one = _measured(Path(folder), model, flags.steps)
        shares = one["shares"]
        print(
            f"| {name} | {one['step_s'] * 1e3:.1f} ms | {shares['publishing']:.3%} | {shares['saving']:.3%} "
            f"| {shares['numbers']:.3%} | {shares['supervising']:.3%} | {one['share']:.2%} "
            f"| {BAR:.0%} {'met' if one['share'] <= BAR else 'missed'} |",
            flush=True,
        )
    print(f"\nwritten to {save('recovery-cost', {'machine': describe(), 'bar': BAR, 'models': found})}")


def _measured(folder: Path, model: dict[str, Any], steps: int) -> dict[str, Any]:
    (folder / "play.txt").write_text(some_text(4000))
    recipe = {
        "run": {"name": "healthy"},
        "data": {"files": str(folder / "play.txt"), "holdout": 0},
        "model": {key: model[key] for key in ("layers", "width", "heads", "vocabulary")},
        "train": {"sequence": 128, "batch_tokens": model["tokens"], "budget": f"{steps} steps"},
        "layout": {"replicate": 2},
        "checkpoint": {"every": model["every"]},
    }
    supervising, look, run = Counted(), HangMonitor.look, session.run_session
    spent = {"wall_s": 0.0, "cpu_s": 0.0}

    def timed_session(*values: Any) -> Any:
        began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        try:
            return run(*values)
        finally:
            after = resource.getrusage(resource.RUSAGE_SELF)
            spent["wall_s"] += time.monotonic() - began_s
            spent["cpu_s"] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    entries = replace(ENTRIES, functions={**ENTRIES.functions, TRAINING_ENTRY: RANK})
    undo = [_put(HangMonitor, "look", supervising.wrap(look)), *_sessions(timed_session)]
    try:
        end = train(recipe, check="never", screen=SilentScreen(), working=WorkingFolder(folder), entries=entries)
    finally:
        for each in undo:
            each()
    assert end.stopped_by == "finished" and end.receipt is not None, end
    ranks = [json.loads(path.read_text()) for path in sorted((folder / "runs" / "healthy" / FOLDER).glob("*.json"))]
    whole_s = sum(one["wall_s"] for one in ranks)
    seconds = {kind: sum(one["seconds"][kind] for one in ranks) for kind in ("publishing", "saving", "numbers")} | {
        "supervising": supervising.cpu_s
    }
    return {
        "ranks": ranks,
        "step_s": whole_s / len(ranks) / steps,
        "supervisor_cpu_s": spent["cpu_s"],
        "supervisor_cpu_share": spent["cpu_s"] / whole_s,
        "shares": {kind: value / whole_s for kind, value in seconds.items()},
        "share": sum(seconds.values()) / whole_s,
    }


def _sessions(timed: Callable[..., Any]) -> list[Callable[[], None]]:
    from plait.commands.monitoring import training

    return [_put(training, "run_session", timed)]


def _put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


if __name__ == "__main__":
    main()
