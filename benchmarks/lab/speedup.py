"""`python -m benchmarks.lab.speedup --json OUT`: how much faster 2, 4 and 8 equal hosts are than one.

Each host has the same small share of a core, so that eight of them fit on one machine, and the same part of a step's
sequences, so that every host always has enough to do; the measure is tokens a second over those of one host.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.cut import LONGEST, WARM_UP, Cutting
from benchmarks.lab.drawing import bars
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.turns import take_turn
from benchmarks.machine import describe
from plait.errors import RunFailed
from plait.launch.secret import new_secret

WORK = Path(__file__).parents[2] / ".plait" / "speedup"
CORES = 0.18
COUNTS = (1, 2, 4, 8)
SEQUENCE, SEQUENCES_A_HOST = 256, 64
STEPS = 5
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
    lines = read_lines(flags.json, "hosts")
    print(table(lines))
    [one] = [line["tokens_per_s"] for line in lines if line["hosts"] == 1]
    rows = {f"{line['hosts']} hosts": {"of n times one": line["tokens_per_s"] / one / line["hosts"]} for line in lines}
    flags.json.with_suffix(".svg").write_text(
        bars("Speed of equal hosts over so many times one host's", rows, goal=0.95)
    )


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """As a receipt tells it: speed, speed-up, efficiency; with what eight GPUs classically reach, as Markdown."""
    [one] = [line["tokens_per_s"] for line in lines if line["hosts"] == 1]
    rows = ["| hosts | tokens/s | speed-up | efficiency | eight GPUs, classically |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        hosts, speedup = line["hosts"], line["tokens_per_s"] / one
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
        turn = take_turn(lab, party, Cutting(steps=STEPS, fastest_s=float("inf")), WORK / "logs" / name)
    if not turn.seconds:
        raise RunFailed(f"{hosts} hosts: {turn.sentence}")
    tokens_per_s = case.batch_sequences * SEQUENCE / turn.step_s
    print(
        f"{hosts} hosts: {turn.step_s:.3g} s a step, {tokens_per_s:.0f} tokens/s, others {turn.others:.1%}", flush=True
    )
    return {"hosts": hosts, "cores": CORES, "tokens_per_s": tokens_per_s, "turn": turn.to_values()}


if __name__ == "__main__":
    main()
