"""A1: workers killed at random steps and phases, in every layout. A25: crash loops stop."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from statistics import median, quantiles
from typing import Any

import pytest

from tests.end_to_end.command import Place, ended
from tests.faults.conftest import Drills, Results
from tests.faults.layouts import LAYOUTS

STEPS = 120
BUDGET = f"train.budget={STEPS} steps"


def kills_of(dice: random.Random, workers: int) -> list[str]:
    """Two kills, whose phases the drill draws by its own seed."""
    return [word for _ in range(2) for word in ("--kill", f"{dice.randrange(workers)}@{dice.randint(1, STEPS - 20)}")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a1_killed_workers_change_nothing(
    drills: Drills, results: Results, seed: int, pytestconfig: pytest.Config, layout: str
) -> None:
    workers, settings = LAYOUTS[layout]
    asked, place = pytestconfig.getoption("--seeds"), list(LAYOUTS).index(layout)
    count = asked // len(LAYOUTS) + (place < asked % len(LAYOUTS))
    if not count:
        pytest.skip(f"none of {asked} seeds is left for it")
    name, dice, reports, phases = (
        f"a1-{layout}",
        random.Random(f"{seed} {layout}"),
        list[dict[str, Any]](),
        Counter[str](),
    )
    for _ in range(2 * count):  # one whose kill came after the run's end proves nothing
        if len(reports) == count:
            break
        drilled = drills.run(name, *settings, BUDGET, *kills_of(dice, workers), "--seed", f"{dice.randrange(1 << 30)}")
        report = drilled.report
        if all(fault["found_after_s"] is None for fault in report["faults"]):
            continue
        carried = [fault for fault in report["faults"] if fault["found_after_s"] is not None]
        assert report["final_equal"] == "bits" and not report["samples_lost"] + report["samples_repeated"], drilled
        assert len(drills.incidents(name)) == len(carried) and not drilled.end.err, drilled
        phases.update(fault["phase"] for fault in carried)
        reports.append(report)
    assert len(reports) == count
    faults = [fault for report in reports for fault in report["faults"] if fault["found_after_s"] is not None]
    back = [fault["back_after_s"] for fault in faults]
    results.setdefault("A1", {})[layout] = {
        "runs": count,
        "kills": len(faults),
        "equal": sum(report["final_equal"] == "bits" for report in reports),
        "samples_lost": sum(report["samples_lost"] for report in reports),
        "samples_repeated": sum(report["samples_repeated"] for report in reports),
        "phases": dict(phases),
        "found_after_s_median": median(fault["found_after_s"] for fault in faults),
        "back_after_s_median": median(back),
        "back_after_s_p95": quantiles(back, n=20, method="inclusive")[-1] if len(back) > 1 else back[0],
        "steps_lost_most": max(fault["steps_lost"] for fault in faults),
    }


def test_a1_controls_a_run_left_alone_has_no_incident_and_one_that_may_not_recover_ends(
    drills: Drills, place: Place, results: Results
) -> None:
    off = drills.run("a1-off", BUDGET, "recover.mode=never", "--kill", "1@40")
    assert off.end.code == 1 and not off.report["ok"] and off.report["final_equal"] == "no"
    assert "killed by SIGKILL" in off.report["ended_by"]
    healthy = place.path("a1-off-left-alone")
    assert not (healthy / "incidents.jsonl").exists()
    results["A1 controls"] = {"without recovery": off.report["final_equal"], "incidents of a healthy run": 0}


def test_a25_a_crash_loop_stops_with_a_report(place: Place, results: Results) -> None:
    name = "a25"
    never_saved = ("checkpoint.every=never", "train.budget=100000 steps")
    process = place.start("train", "tiny.toml", f"run.name={name}", *never_saved, "--no-check")
    killed: set[int] = set()
    while process.poll() is None:  # a worker that dies in every start
        for pid in place.rank_processes(name, 1):
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
    last = ended(process)
    assert last.code == 93 and last.sentence().startswith("gave up after 3 failures without a new checkpoint")
    assert "rank 1" in last.sentence() and "incidents.jsonl" in last.sentence()
    place.assert_nobody_left()
    results["A25"] = {"exit code": last.code, "starts": len(killed), "sentence": last.sentence()}


def test_a25_control_failures_between_saves_never_end_a_run(drills: Drills, results: Results) -> None:
    kills = [word for step in range(15, 105, 15) for word in ("--kill", f"1@{step}")]
    drilled = drills.run("a25-gets-on", BUDGET, "recover.give_up_after=2", *kills, "--seed", "7")
    assert drilled.end.code == 0 and drilled.report["final_equal"] == "bits", drilled
    results["A25 control"] = {"kills with a save between": len(drilled.report["faults"]), "exit code": 0}
