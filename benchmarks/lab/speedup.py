"""`python -m benchmarks.lab.speedup --json OUT`: how much faster 2, 4 and 8 equal hosts are than one.

Each host has the same small share of a core, so that eight of them fit on one machine, and the same part of a step's
sequences, so that every host always has enough to do. The measure is tokens a second over those that one of them
reaches by itself with its part: the mean of all hosts while the others do the same, right before and right after, at
the pace that the processors have meanwhile (pace.py). Both are taken in turns, ROUNDS times, and the median round is
told: the same work takes several per cent more or less from one minute to the next.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.lab.alone import side_by_side
from benchmarks.lab.cut import LONGEST, WARM_UP, Cutting, Turn
from benchmarks.lab.drawing import bars
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.turns import take_turn
from benchmarks.lab.unequal import speeds_at
from benchmarks.machine import describe
from plait.errors import RunFailed
from plait.hosts.handshake import new_secret

WORK = Path(__file__).parents[2] / ".plait" / "speedup"
CORES = 0.18
COUNTS = (2, 4, 8)
SEQUENCE, SEQUENCES_A_HOST = 256, 64
STEPS = 5
ROUNDS = 3
SHAPE = {"layers": 4, "width": 128, "heads": 4, "vocabulary": 1024}
CLASSIC = {2: 1.7, 4: 3.5, 8: 6.2}
"""What eight GPUs of a workstation without fast links are usually said to reach."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.speedup")
    parser.add_argument(
        "--json", type=Path, required=True, help="one line a number of hosts; what stands there is kept"
    )
    flags = parser.parse_args()
    require_root()
    sweep()
    done = {line["hosts"] for line in read_lines(flags.json, "hosts")}
    for hosts in COUNTS:
        if hosts not in done:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            append_line(flags.json, {**_run(hosts), "date": now, "machine": describe()})
    lines = sorted(read_lines(flags.json, "hosts"), key=lambda line: line["hosts"])
    print(table(lines))
    rows = {f"{line['hosts']} hosts": {"of n times one": line["speedup"] / line["hosts"]} for line in lines}
    flags.json.with_suffix(".svg").write_text(
        bars("Speed of equal hosts over so many times one host's", rows, goal=0.95)
    )


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """As a receipt tells it: speed, speed-up, efficiency; with what eight GPUs classically reach, as Markdown."""
    rows = ["| hosts | tokens/s | speed-up | efficiency | eight GPUs, classically |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        hosts, speedup = line["hosts"], line["speedup"]
        cells = (
            hosts,
            f"{line['tokens_per_s']:.0f}",
            f"{speedup:.2f}",
            f"{speedup / hosts:.0%}",
            CLASSIC.get(hosts, ""),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _run(hosts: int) -> dict[str, Any]:
    runner = JoinedRunner(new_secret().text)
    for left in ("runs", "recipes", "logs"):
        shutil.rmtree(WORK / left, ignore_errors=True)
        (WORK / left).mkdir(parents=True)
    case = Case(
        cores=(CORES,) * hosts, rate="unshaped", model="", shape=SHAPE, batch_sequences=SEQUENCES_A_HOST * hosts,
        sequence=SEQUENCE, files="own", baselines=(),
    )  # fmt: skip
    name = f"hosts{hosts}"
    recipe = WORK / "recipes" / f"{name}.toml"
    recipe.write_text(recipe_text(case, {"replicate": hosts}, name=name, steps=WARM_UP + LONGEST * STEPS))
    with Lab(case.cores, case.rate, work=WORK, files=runner.files) as lab:
        party = runner.party(recipe, WORK / "runs" / name, lab.hosts)
        own = [replace(case, batch_sequences=SEQUENCES_A_HOST)] * hosts
        alone, turns, speedups = [side_by_side(lab, runner, own, WORK, steps=STEPS)], list[Turn](), list[float]()
        for number in range(ROUNDS):
            shutil.rmtree(WORK / "runs" / name, ignore_errors=True)
            cutting = Cutting(steps=STEPS, fastest_s=float("inf"))
            turns.append(take_turn(lab, party, cutting, WORK / "logs" / f"{name}-{number}"))
            alone.append(side_by_side(lab, runner, own, WORK, steps=STEPS))
            if failed := [one.sentence for one in (turns[-1], *alone[-2], *alone[-1]) if not one.seconds]:
                raise RunFailed(f"{hosts} hosts: {failed[0]}")
            one = mean(speeds_at(turns[-1], alone[-2:], [SEQUENCES_A_HOST] * hosts))
            speedups.append(_tokens(case) / mean(turns[-1].seconds) / one)
            print(f"{hosts} hosts: {turns[-1].step_s:.3g} s a step, {speedups[-1]:.2f} times one", flush=True)
    return {
        "hosts": hosts,
        "cores": CORES,
        "tokens_per_s": median(_tokens(case) / mean(turn.seconds) for turn in turns),
        "speedup": median(speedups),
        "rounds": speedups,
        "turns": [turn.to_values() for turn in turns],
        "alone": [[one.to_values() for one in taken] for taken in alone],
    }


def _tokens(case: Case) -> int:
    """Of a step."""
    return case.batch_sequences * case.sequence


if __name__ == "__main__":
    main()
