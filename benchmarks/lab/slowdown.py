"""`python -m benchmarks.lab.slowdown --json OUT`: a host loses 70 % of its processor during a run, and gets it back.

Two equal hosts train with shares that follow them. The measure is tokens a second of the steps from SETTLED after each
change on, over the sum of what both hosts reach by themselves at that time. The same run without the disturbance must
have the same losses, since shares never change which samples form a step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from benchmarks.lab.alone import side_by_side
from benchmarks.lab.checks import until
from benchmarks.lab.drawing import COLOURS, INK, PALE, path, stroke, svg, text
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.turns import start_party
from benchmarks.machine import describe
from plait.hosts.handshake import new_secret

WORK = Path(__file__).parents[2] / ".plait" / "slowdown"
CORES, SLOW = 0.6, 0.3
SHAPE = {"layers": 4, "width": 128, "heads": 4, "vocabulary": 1024}
SEQUENCE, SEQUENCES = 256, 64
SLOWED_AT, RESTORED_AT, STEPS = 41, 101, 160
SETTLED = 30
"""Steps after a change within which shares must have followed."""
ALONE_STEPS = 10
STEP_WITHIN_S, END_WITHIN_S = 120.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A run's steps: seconds and losses, and its shares.jsonl."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    changes: tuple[dict[str, Any], ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.slowdown")
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    require_root()
    sweep()
    runner = JoinedRunner(new_secret().text)
    for left in ("runs", "recipes", "logs"):
        shutil.rmtree(WORK / left, ignore_errors=True)
        (WORK / left).mkdir(parents=True)
    case = _case(SEQUENCES)
    with Lab(case.cores, case.rate, work=WORK, files=runner.files) as lab:
        halves = [_case(SEQUENCES // 2)] * 2
        equal = sum(_speeds(side_by_side(lab, runner, halves, WORK, steps=ALONE_STEPS), halves))
        slow_part = round(SEQUENCES * SLOW / (1 + SLOW))
        parts = [_case(SEQUENCES - slow_part), _case(slow_part)]
        lab.grant(lab.hosts[1], CORES * SLOW)
        slowed = sum(_speeds(side_by_side(lab, runner, parts, WORK, steps=ALONE_STEPS), parts))
        lab.grant(lab.hosts[1], CORES)
        print(f"alone    both {equal:.0f} tokens/s, one slowed {slowed:.0f}", flush=True)
        ways = {name: _run(lab, runner, name) for name in ("undisturbed", "disturbed")}
    told = judged(ways["disturbed"], ways["undisturbed"], equal=equal, slowed=slowed)
    for name, value in told.items():
        print(f"{name:45} {value:.3g}")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    values = {name: {"seconds": w.seconds, "losses": w.losses, "changes": w.changes} for name, w in ways.items()}
    alone = {"equal_tokens_per_s": equal, "slowed_tokens_per_s": slowed}
    append_line(flags.json, {**told, **alone, **values, "date": now, "machine": describe()})
    flags.json.with_suffix(".svg").write_text(picture(read_lines(flags.json, "disturbed")[-1]))


def picture(line: Mapping[str, Any]) -> str:
    """Seconds of each step of both runs, the moments of each change, and the ideal at either speed."""
    tokens, seconds = SEQUENCES * SEQUENCE, {name: line[name]["seconds"] for name in ("undisturbed", "disturbed")}
    tall = 1.05 * max(max(values) for values in seconds.values())

    def place(step: float, taken_s: float) -> tuple[float, float]:
        return 60 + 4.5 * step, 320 - 260 * taken_s / tall

    parts = [text(10, 22, "A host loses 70 % of its processor in step 41, and has it back in step 101", size=15)]
    for taken_s in range(int(tall) + 1):
        parts += [stroke(place(0, taken_s), place(STEPS, taken_s), PALE)]
        parts += [text(50, place(0, taken_s)[1] + 4, f"{taken_s} s", anchor="end")]
    for step in (1, 41, 101, STEPS):
        parts.append(text(place(step, 0)[0], 338, f"step {step}" if step == 1 else str(step), anchor="middle"))
    for change in line["disturbed"]["changes"]:
        shares = " + ".join(map(str, change["shares"]))
        parts.append(stroke(place(change["step"], 0), place(change["step"], 0.93 * tall), INK, dash="2 4"))
        parts.append(text(place(change["step"], 0)[0] + 4, place(0, 0.9 * tall)[1], f"shares {shares}"))
    ideals = [(1, SLOWED_AT, "equal"), (SLOWED_AT, RESTORED_AT, "slowed"), (RESTORED_AT, STEPS, "equal")]
    for first, last, name in ideals:
        ideal_s = tokens / line[f"{name}_tokens_per_s"]
        parts.append(stroke(place(first, ideal_s), place(last, ideal_s), INK, dash="6 4"))
    for number, (name, values) in enumerate(seconds.items()):
        parts.append(path([place(step, taken_s) for step, taken_s in enumerate(values, 1)], COLOURS[number]))
        parts.append(text(60 + 170 * number, 362, name))
        parts.append(stroke((140 + 170 * number, 358), (180 + 170 * number, 358), COLOURS[number], width=2))
    parts.append(text(420, 362, "dashes: the sum of both hosts' own speeds"))
    return svg(800, 376, parts)


def judged(way: Way, undisturbed: Way, *, equal: float, slowed: float) -> dict[str, float]:
    """What was reached of each ideal once shares had followed, before they could, and how far losses are apart."""

    def reached(first: int, last: int, ideal: float) -> float:
        return SEQUENCES * SEQUENCE / median(way.seconds[first - 1 : last - 1]) / ideal

    pairs = zip(way.losses, undisturbed.losses, strict=True)
    return {
        "reached before": reached(SLOWED_AT - 20, SLOWED_AT, equal),
        "reached right after the slow-down": reached(SLOWED_AT + 1, SLOWED_AT + 10, slowed),
        "reached 30 steps after the slow-down": reached(SLOWED_AT + SETTLED, RESTORED_AT, slowed),
        "reached 30 steps after the recovery": reached(RESTORED_AT + SETTLED, STEPS, equal),
        "largest relative difference of a loss": max(abs(a / b - 1) for a, b in pairs),
    }


def _case(sequences: int) -> Case:
    return Case(
        cores=(CORES, CORES), rate="unshaped", model="", shape=SHAPE, batch_sequences=sequences, sequence=SEQUENCE,
        files="own", baselines=(),
    )  # fmt: skip


def _speeds(turns: Sequence[Any], cases: Sequence[Case]) -> list[float]:
    return [case.batch_sequences * SEQUENCE / turn.step_s for turn, case in zip(turns, cases, strict=True)]


def _run(lab: Lab, runner: JoinedRunner, name: str) -> Way:
    recipe, folder, logs = WORK / "recipes" / f"{name}.toml", WORK / "runs" / name, WORK / "logs" / name
    logs.mkdir()
    values = tomllib.loads(recipe_text(_case(SEQUENCES), {"replicate": 2}, name=name, steps=STEPS))
    recipe.write_text(tomli_w.dumps({**values, "balance": {"every": "10 steps"}}))
    party = runner.party(recipe, folder, lab.hosts)
    started = start_party(lab, party, logs)
    try:
        if name == "disturbed":
            _await_step(party.steps_file, SLOWED_AT - 1, started)
            lab.grant(lab.hosts[1], CORES * SLOW)
            _await_step(party.steps_file, RESTORED_AT - 1, started)
            lab.grant(lab.hosts[1], CORES)
        _await_step(party.steps_file, STEPS, started)
        until((folder / "receipt.json").exists, "the run has ended", END_WITHIN_S)
    finally:
        lab.grant(lab.hosts[1], CORES)
        lab.end_commands()
    lines = [values for line in party.steps_file.read_text().splitlines() if "step_s" in (values := json.loads(line))]
    file = folder / "shares.jsonl"
    changes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(f"{name}: {len(changes)} changes of shares", flush=True)
    return Way(
        seconds=tuple(line["step_s"] for line in lines),
        losses=tuple(line["loss"] for line in lines),
        changes=tuple(changes),
    )


def _await_step(file: Path, step: int, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait while steps come."""
    done = 0
    while done < step:
        before = done
        until(_more_than(file, before, started), f"step {before + 1} ends", STEP_WITHIN_S)
        done = _steps(file)
        if done == before:
            raise SystemExit(f"the run ended after step {done}; see {WORK / 'logs'}")


def _more_than(file: Path, count: int, started: Sequence[subprocess.Popen[bytes]]) -> Callable[[], bool]:
    return lambda: _steps(file) > count or any(process.poll() is not None for process in started)


def _steps(file: Path) -> int:
    return sum('"step_s"' in line for line in file.read_text().split("\n")[:-1]) if file.exists() else 0


if __name__ == "__main__":
    main()
