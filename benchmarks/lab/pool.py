"""`python -m benchmarks.lab.pool --json OUT [--quick]`: a pool of lab hosts, priced by the planner and then used.

Three hosts, the second one slow and dear for its speed. From one probe of all, the planner prices the first alone, the
first two, and all three. The cheapest of these choices, the fastest, and the one that another beats in both are then
trained on. They should come out in the predicted order, each within 10 % of its predicted time, and so of its cost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.lab.checks import cable_rates
from benchmarks.lab.cut import LONGEST, WARM_UP, Cutting, Turn
from benchmarks.lab.forecast import Section, layout_section, recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import ROOT, Lab, require_root
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.paper_request import paper_request
from benchmarks.lab.probed import PROBE_WITHIN_S, probed_cluster
from benchmarks.lab.turns import take_turn
from benchmarks.machine import describe
from plait.errors import PlaitError, RunFailed
from plait.hosts.handshake import new_secret
from plait.machines.cluster import Cluster
from plait.machines.pool import Pool, PoolDevices
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes
from plait.planner.pools.choice import Aims, PoolChoice, Work, best_choice, choices_of, frontier
from plait.planner.pools.selection import Selection
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search
from plait.recipe.load import load_recipe

WORK = ROOT / ".plait" / "lab-pool"
CORES, PRICES = (0.45, 0.2, 0.45), (1.0, 4.0, 1.0)
"""Of the hosts: shares of a core, and prices of an hour. The second has 0.44 of the others' speed at four times the
price, so that the first two together are slower and dearer than all three."""
RATE = 2e8
RUN_STEPS = 1000
"""Of the run that is priced."""
WITHIN = 0.10
PATIENT_S = 1200.0
"""How long a trial, whose times do not count, waits for the probe on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of the pool, and the settings that make a run follow it."""

    choice: PoolChoice
    hosts: int
    layout: Section
    is_beaten: bool
    """Whether another choice is both faster and cheaper."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.pool")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it works")
    flags = parser.parse_args()
    require_root()
    sweep()
    result = run(rounds=1 if flags.quick else 2, steps=2 if flags.quick else 4, is_trial=flags.quick)
    values = {
        **result,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe(),
    }
    flags.json.write_text(json.dumps(values, indent=1) + "\n")
    print(f"\n{table(result)}\n\n{verdict(result)}")


def run(*, rounds: int, steps: int, is_trial: bool) -> dict[str, Any]:
    """Build the hosts, price the pool, and train on the choices by turns; a trial goes on with slow cables."""
    runner, began_s = JoinedRunner(new_secret().text), time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    for left in ("runs", "recipes", "logs"):
        shutil.rmtree(WORK / left, ignore_errors=True)
        (WORK / left).mkdir()
    case = Case(
        cores=CORES, rate=RATE, model="narrow", shape={"layers": 6, "width": 192, "heads": 6, "vocabulary": 1024},
        batch_sequences=22, sequence=256, files="own", baselines=(),
    )  # fmt: skip
    with Lab(case.cores, case.rate, work=WORK, files=runner.files) as lab:
        try:
            print(
                f"cables   {', '.join(f'{rate / 1e6:.0f}' for rate in cable_rates(lab, case.rate))} Mbit/s", flush=True
            )
        except PlaitError as error:
            if not is_trial:
                raise
            print(f"cables   {error}", flush=True)
        probed_s = time.monotonic()
        cluster = probed_cluster(lab, runner, case, WORK, within_s=PATIENT_S if is_trial else PROBE_WITHIN_S)
        assert cluster is not None
        pace_s = mean(lab.product_s(probed_s, time.monotonic()))
        candidates = priced(case, cluster)
        for one in candidates:
            print(f"predicted {_text(one)}", flush=True)
        cheapest, fastest = (
            best_choice([one.choice for one in candidates], Aims(objective=aim)) for aim in ("cheapest", "fastest")
        )
        if not is_trial and (cheapest is fastest or not any(one.is_beaten for one in candidates)):
            raise RunFailed("by the forecast no choice is rejected on these hosts; change CORES or PRICES")
        turns: dict[str, list[Turn]] = {str(one.choice.selection): [] for one in candidates}
        for number in range(rounds):
            for one in candidates[number % len(candidates) :] + candidates[: number % len(candidates)]:
                name = f"hosts-{one.hosts}-{number}"
                recipe = WORK / "recipes" / f"{name}.toml"
                recipe.write_text(recipe_text(case, one.layout, name=name, steps=WARM_UP + LONGEST * steps))
                party = runner.party(recipe, WORK / "runs" / name, lab.hosts[: one.hosts])
                cutting = Cutting(steps=steps, fastest_s=float("inf"))
                turn = take_turn(lab, party, cutting, WORK / "logs" / name)
                if not turn.seconds:
                    raise RunFailed(f"{one.choice.selection} did not train: {turn.sentence}")
                turns[str(one.choice.selection)].append(turn)
                print(f"measured  {one.choice.selection}: {turn.step_s:.3g} s, others {turn.others:.0%}", flush=True)
    return {
        "cores": CORES,
        "prices": PRICES,
        "bits_per_s": RATE,
        "pace_s": pace_s,
        "took_s": round(time.monotonic() - began_s),
        "choices": [_values(one, turns[str(one.choice.selection)], pace_s) for one in candidates],
    }


def priced(case: Case, cluster: Cluster) -> list[Candidate]:
    """The first host, the first two and all, each with its best layout by the probe; the cheapest first."""
    nodes = [island for island in cluster.islands for _ in range(island.nodes)]
    entries = tuple(
        PoolDevices(device=replace(island.device, name=f"host {number}"), count=1, per_node=1, price=price)
        for number, (island, price) in enumerate(zip(nodes, PRICES, strict=True))
    )
    pool = Pool(name="lab", devices=entries)
    path = WORK / "recipes" / "priced.toml"
    path.write_text(recipe_text(case, {}, name="priced", steps=RUN_STEPS))
    workload = paper_request(load_recipe(path), cluster).workload
    work = Work(steps=RUN_STEPS, tokens=RUN_STEPS * workload.batch_tokens)
    found: list[tuple[PoolChoice, int, Section]] = []
    for hosts in range(1, len(nodes) + 1):
        here = search(workload, cluster_of_nodes(cluster, range(hosts)))
        row, counts = here.candidates.row(here.chosen), tuple(int(number < hosts) for number in range(len(nodes)))
        step_s = float(here.step_s[here.chosen])
        [choice] = choices_of(
            Selection(pool, counts), work, step_s=step_s, layout=layout_text(row), precision="float32", sent={}
        )
        found.append((choice, hosts, {"replicate": 1, **layout_section(row)}))
    choices = [choice for choice, _, _ in found]
    unbeaten = frontier(choices)
    return [
        Candidate(choice=choice, hosts=hosts, layout=layout, is_beaten=choice not in unbeaten)
        for choice, hosts, layout in sorted(found, key=lambda one: one[0].cost or 0.0)
    ]


def _text(one: Candidate) -> str:
    beaten = ", rejected: another is faster and cheaper" if one.is_beaten else ""
    cost = f"${one.choice.cost:.3f}, {one.choice.layout}"
    return f"{one.choice.selection}: {one.choice.step_s:.3g} s a step, {cost}{beaten}"


def _values(one: Candidate, turns: Sequence[Turn], pace_s: float) -> dict[str, Any]:
    measured_s = median(second for turn in turns for second in turn.at_pace(pace_s).seconds)
    assert one.choice.cost is not None
    return {
        "machines": str(one.choice.selection),
        "layout": dict(one.layout),
        "rejected": one.is_beaten,
        "predicted_s": one.choice.step_s,
        "measured_s": measured_s,
        "predicted_cost": one.choice.cost,
        "measured_cost": one.choice.cost * measured_s / one.choice.step_s,
        "turns": [turn.to_values() for turn in turns],
    }


def table(result: Mapping[str, Any]) -> str:
    """Predicted and measured time and cost, as Markdown."""
    rows = ["| machines | step predicted | measured | error | cost predicted | measured |", "| --- |" + " --- |" * 5]
    for one in result["choices"]:
        name = f"{one['machines']}{' (rejected)' if one['rejected'] else ''}"
        error = one["predicted_s"] / one["measured_s"] - 1
        rows.append(
            f"| {name} | {one['predicted_s']:.3f} s | {one['measured_s']:.3f} s | {error:+.1%} "
            f"| ${one['predicted_cost']:.3f} | ${one['measured_cost']:.3f} |"
        )
    return "\n".join(rows)


def verdict(result: Mapping[str, Any]) -> str:
    """Whether the choices came out in the predicted order, each within the bound."""
    choices = result["choices"]
    wrong = [
        what
        for what in ("s", "cost")
        if sorted(choices, key=lambda one: one[f"predicted_{what}"])
        != sorted(choices, key=lambda one: one[f"measured_{what}"])
    ]
    far = [one["machines"] for one in choices if abs(one["predicted_s"] / one["measured_s"] - 1) > WITHIN]
    order = "in the predicted order" if not wrong else f"in another order than predicted, by {' and '.join(wrong)}"
    error = f"{' and '.join(far)} not within" if far else "all within"
    return f"{order}; {error} {WITHIN:.0%} of the predicted time; took {result['took_s']} s"


if __name__ == "__main__":
    main()
