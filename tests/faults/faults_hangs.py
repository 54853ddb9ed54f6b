"""A5: workers that hang are named, and nobody is who does not."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from statistics import median

import pytest

from tests.end_to_end.command import Place, ended, wait_while_running
from tests.faults.conftest import Drills, Results
from tests.faults.layouts import LAYOUTS

HANGS_OF_A_RUN = 4
STEPS = 200
WITHOUT_WATCH = """
from plait.launch.local.hang_monitor import HangMonitor
HangMonitor.look = lambda self, sites: setattr(self, "next_at_s", self.next_at_s + 0.5)
from plait.cli import main
main()
"""


def test_a5_the_one_that_hangs_is_named(
    drills: Drills, results: Results, seed: int, pytestconfig: pytest.Config
) -> None:
    asked, dice = pytestconfig.getoption("--hangs"), random.Random(f"{seed} hangs")
    named, phases, found, wrong = Counter[tuple[int, int]](), Counter[str](), list[float](), list[str]()
    layouts = list(LAYOUTS.items())
    while named.total() < asked:
        layout, (workers, settings) = layouts[named.total() // HANGS_OF_A_RUN % len(layouts)]
        steps = sorted(dice.sample(range(10, STEPS - 30), HANGS_OF_A_RUN))
        hangs = [word for step in steps for word in ("--hang", f"{dice.randrange(workers)}@{step}")]
        name = f"a5-{layout}"
        budget = f"train.budget={STEPS} steps"
        drilled = drills.run(name, *settings, budget, *hangs, "--seed", f"{dice.randrange(1 << 30)}")
        assert drilled.report["final_equal"] == "bits", drilled
        faults = [fault for fault in drilled.report["faults"] if fault["found_after_s"] is not None]
        incidents = drills.incidents(name)
        assert len(incidents) == len(faults) > 0, drilled
        for fault, incident in zip(faults, incidents, strict=True):
            named[fault["rank"], incident["rank"]] += 1
            phases[fault["phase"]] += 1
            found.append(fault["found_after_s"])
            if (incident["cause"], incident["rank"]) != ("hung", fault["rank"]) or not incident["stack"]:
                wrong.append(f"{layout}: {fault} was told as {incident['sentence']}")
    right = sum(count for (stopped, told), count in named.items() if stopped == told)
    results["A5"] = {
        "hangs": named.total(),
        "right": right,
        "wrong": wrong,
        "confusion": {f"rank {stopped} told as rank {told}": count for (stopped, told), count in sorted(named.items())},
        "phases": dict(phases),
        "found_after_s_median": median(found),
        "found_after_s_most": max(found),
    }
    print(results["A5"])
    assert right == named.total() and not wrong


def test_a5_no_false_alarm_in_a_healthy_run(place: Place, results: Results, pytestconfig: pytest.Config) -> None:
    steps, name = pytestconfig.getoption("--healthy-steps"), "a5-healthy"
    often = ("report.evaluate=100 steps", "checkpoint.every=20 steps")
    last = place.run("train", "tiny.toml", f"run.name={name}", f"train.budget={steps} steps", *often, within_s=1200)
    assert last.code == 0 and not last.err, last
    assert not (place.path(name) / "incidents.jsonl").exists()
    results["A5 healthy"] = {"steps": steps, "false alarms": 0}


def test_a5_control_without_the_watch_nobody_notices(place: Place, results: Results) -> None:
    name = "a5-off"
    words = ("train", "tiny.toml", f"run.name={name}", "train.budget=100000 steps", "--no-check")
    process = place.start(*words, module=("-c", WITHOUT_WATCH))
    wait_while_running(lambda: bool(place.checkpoints(name)), process)
    os.kill(place.rank_process(name, 1), signal.SIGSTOP)
    threading.Event().wait(20.0)
    incidents = place.path(name) / "incidents.jsonl"
    noticed = [json.loads(line) for line in incidents.read_text().splitlines()] if incidents.exists() else []
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)
    place.assert_nobody_left()
    results["A5 control"] = {"noticed within 20 s without the watch": len(noticed)}
    assert not noticed
