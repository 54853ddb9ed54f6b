"""`python -m benchmarks.first_step`: from `plait train` to a run's first step, on a quiet machine and beside a program.

A model of 1M parameters on Shakespeare, whose text is prepared. A round is four starts: on a machine where nothing was
measured yet, the same command again, then with another batch, and with another model of similar sizes, each with what
the first start measured. Of each the longest silence is kept, too. Written to results/first-step-DATE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.machine import ROOT, ProcessorSeconds, describe
from benchmarks.pairing import save

RECIPE = """
[run]
name = "first"
[data]
files = "shakespeare.txt"
[model]
size = "1M"
[train]
budget = "24 steps"
[report]
evaluate = "never"
"""
CASES: Mapping[str, tuple[str, ...]] = {
    "a new machine": (),
    "the same command again": (),
    "another batch": ("train.batch_tokens=8192",),
    "another model": ("model.layers=5", "model.width=160"),
}
BARS_S: Mapping[str, float] = {"a new machine": 10.0, "another batch": 6.0, "another model": 6.0}
"""On a quiet machine."""
SILENCE_BAR_S = 10.0
ENDS_WITHIN_S = 600.0
BUSY = "while True: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start: seconds from the command to its first step, and the longest between two of its lines until then."""

    first_step_s: float
    silence_s: float


def main() -> int:
    """Print and save the medians; 1 where a bar is missed on a quiet machine."""
    flags = _flags()
    found: dict[str, dict[str, list[Start]]] = {}
    others: dict[str, float] = {}
    for load in ("quiet", "busy"):
        before = ProcessorSeconds.now()
        with tempfile.TemporaryDirectory(prefix="plait-first-step-") as name, _competitor(load):
            found[load] = time_rounds(Path(name), 1 if flags.smoke else flags.rounds)
        after = ProcessorSeconds.now()
        others[load] = (after.busy_s - before.busy_s) / max(1e-9, _whole_s(after) - _whole_s(before))
    missed = print_table(found)
    if flags.smoke:
        return 0
    starts = {
        load: {case: [asdict(one) for one in some] for case, some in cases.items()} for load, cases in found.items()
    }
    result = {
        "machine": describe(),
        "bars_s": BARS_S,
        "silence_bar_s": SILENCE_BAR_S,
        "busy_share": others,
        "starts": starts,
    }
    print(f"written to {save('first-step', result)}")
    return int(missed)


def time_rounds(folder: Path, rounds: int) -> dict[str, list[Start]]:
    """The starts of each case, in a folder of its own whose text is prepared first."""
    (folder / "first.toml").write_text(RECIPE)
    shutil.copy(ROOT / "recipes" / "shakespeare.txt", folder)
    subprocess.run([*_plait("data", "first.toml")], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    found: dict[str, list[Start]] = {case: [] for case in CASES}
    cache, kept = folder / ".plait", folder / "kept"
    for _ in range(rounds):
        for case, overrides in CASES.items():
            if case == "a new machine":
                _remove(cache / "timings", cache / "plans", cache / "verified", kept)
            elif case != "the same command again":  # only with what the first start measured
                _remove(cache / "timings", cache / "plans")
                shutil.copytree(kept, cache / "timings")
            found[case].append(start := time_start(folder, overrides))
            print(f"  {case}: {start.first_step_s:.1f} s", file=sys.stderr, flush=True)
            if case == "a new machine" and (cache / "timings").exists():
                shutil.copytree(cache / "timings", kept)
            kept.mkdir(exist_ok=True)
    return found


def time_start(folder: Path, overrides: tuple[str, ...]) -> Start:
    """Start a new run and end it after its first step; raises RuntimeError where it has none."""
    _remove(folder / "runs")
    command, metrics = _plait("train", "first.toml", *overrides), folder / "runs" / "first" / "metrics.jsonl"
    began_s = last_s = time.monotonic()
    silence_s = 0.0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = _lines_of(process)
        while not (metrics.exists() and metrics.read_text()):
            with contextlib.suppress(queue.Empty):
                lines.get(timeout=0.02)
                silence_s, last_s = max(silence_s, time.monotonic() - last_s), time.monotonic()
            if process.poll() is not None or time.monotonic() - began_s > ENDS_WITHIN_S:
                process.kill()
                raise RuntimeError(f"{' '.join(command)} took no step")
        first_step_s = time.monotonic() - began_s
        process.send_signal(signal.SIGTERM)
        process.wait(ENDS_WITHIN_S)
    return Start(first_step_s=first_step_s, silence_s=max(silence_s, began_s + first_step_s - last_s))


def print_table(found: Mapping[str, Mapping[str, list[Start]]]) -> bool:
    """Print the medians of all cases; returns whether a bar is missed."""
    missed = False
    print("| machine | start | to the first step | bar | longest silence |")
    print("| --- | --- | --- | --- | --- |")
    for load, cases in found.items():
        for case, starts in cases.items():
            first_step_s, silence_s = median(one.first_step_s for one in starts), max(one.silence_s for one in starts)
            bar_s = BARS_S.get(case) if load == "quiet" else None
            missed |= silence_s > SILENCE_BAR_S + 1 or (bar_s is not None and first_step_s > bar_s)
            bar = f"{bar_s:g} s" if bar_s else "none"
            print(f"| {load} | {case} | {first_step_s:.1f} s | {bar} | {silence_s:.1f} s |")
    return missed


@contextlib.contextmanager
def _competitor(load: str) -> Iterator[None]:
    """A program that takes a core for as long as the block lasts, on a "busy" machine."""
    if load == "quiet":
        yield
        return
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        try:
            yield
        finally:
            process.kill()


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str]:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _plait(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "plait", *arguments]


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _whole_s(now: ProcessorSeconds) -> float:
    return now.busy_s + now.idle_s


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one round, to see that all works; nothing is saved")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
