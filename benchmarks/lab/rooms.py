"""`python -m benchmarks.lab.rooms --json OUT`: hosts in two rooms with a narrow road between them.

Of four equal hosts, numbered by their addresses, the first and the third are in one room, the second and the fourth in
another. The order in which plait puts them is held against that of their addresses, in turns; shares that a person
names, equal ones here, are for hosts as they are numbered.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.lab.cut import LONGEST, WARM_UP, Cutting, Turn
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.journal import append_line
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.turns import take_turn
from benchmarks.machine import describe
from plait.errors import RunFailed
from plait.hosts.handshake import new_secret
from plait.planner.plan_file import read_plan

WORK = Path(__file__).parents[2] / ".plait" / "rooms"
CASE = Case(
    cores=(0.45,) * 4, rate=1e9, model="", shape={"layers": 8, "width": 320, "heads": 8, "vocabulary": 2048},
    batch_sequences=16, sequence=256, files="own", baselines=(),
)  # fmt: skip
ROAD = 50e6
"""Bits a second between the rooms."""
LAYOUT = {"pipeline": 2, "replicate": 2}
ORDERS: Mapping[str, Mapping[str, Any]] = {"plait's": {}, "by address": {"shares": [8, 8]}}
STEPS, ROUNDS = 5, 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.rooms")
    parser.add_argument("--json", type=Path, required=True, help="a line for each time this was run")
    flags = parser.parse_args()
    require_root()
    sweep()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {**_run(), "date": now, "machine": describe()}
    append_line(flags.json, line)
    print(f"\n{table(line)}")


def table(line: Mapping[str, Any]) -> str:
    """Each order with its steps and its forecast, as Markdown."""
    rows = ["| order | hosts | seconds a step | forecast |", "| --- | --- | --- | --- |"]
    for name, found in line["orders"].items():
        steps = ", ".join(f"{mean(turn['seconds']):.3g}" for turn in found["turns"])
        rows.append(f"| {name} | {', '.join(found['hosts'])} | {steps} | {found['forecast_s']:.3g} |")
    return "\n".join(rows)


def _run() -> dict[str, Any]:
    runner = JoinedRunner(new_secret().text)
    for left in ("runs", "recipes", "logs"):
        shutil.rmtree(WORK / left, ignore_errors=True)
        (WORK / left).mkdir(parents=True)
    found: dict[str, dict[str, Any]] = {}
    with Lab(CASE.cores, CASE.rate, work=WORK, files=runner.files) as lab:
        lab.part(lab.hosts[1::2], ROAD)
        for _ in range(ROUNDS):
            for number, (name, more) in enumerate(ORDERS.items()):
                turn, told = _turn(lab, runner, f"order{number}", {**LAYOUT, **more})
                print(f"{name:14} {turn.step_s:.3g} s a step, hosts {told['hosts']}", flush=True)
                kept = found.setdefault(name, {**told, "turns": []})
                kept["turns"].append(turn.to_values())
    return {"layout": LAYOUT, "road": ROAD, "cables": CASE.rate, "cores": list(CASE.cores), "orders": found}


def _turn(lab: Lab, runner: JoinedRunner, name: str, layout: Mapping[str, Any]) -> tuple[Turn, dict[str, Any]]:
    recipe, run = WORK / "recipes" / f"{name}.toml", WORK / "runs" / name
    recipe.write_text(recipe_text(CASE, layout, name=name, steps=WARM_UP + LONGEST * STEPS))
    shutil.rmtree(run, ignore_errors=True)
    party = runner.party(recipe, run, lab.hosts)
    turn = take_turn(lab, party, Cutting(steps=STEPS, fastest_s=float("inf")), WORK / "logs" / name)
    if not turn.seconds:
        raise RunFailed(f"the run did not end: {turn.sentence}")
    plan = read_plan(run / "plan.json")
    hosts = [share.name for share in plan.machines.hosts]  # of one name, so that a number tells who came from where
    return turn, {"hosts": hosts, "forecast_s": plan.forecast.step_s if plan.forecast else 0.0}


if __name__ == "__main__":
    main()
