"""`plait drill`: failures on purpose, and what is told of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.end_to_end.command import Ended, Place, ended, wait_while_running
from tests.end_to_end.conftest import RunWarm
from tests.end_to_end.test_end_recovery import done_steps, incidents

LONGER = "train.budget=120 steps"


def drilled(place: Place, *words: str) -> tuple[Ended, dict[str, Any]]:
    """How a drill ended, and its report."""
    found = place.run("drill", *words, "--json", "drill.json", within_s=900)
    return found, json.loads((place.folder / "drill.json").read_text())


@pytest.mark.slow
def test_a_drill_rehearses_failures_and_says_what_came_of_them(place: Place, run_warm: RunWarm) -> None:
    """Of one run: a slow worker is waited for, a full disk survived, and what was killed, damaged or stopped is done
    again."""
    longest = "train.budget=400 steps"  # so that a save fails and another one goes well long before the hang
    faults = ("--slow", "0@10", "--kill", "1@45", "--fill-disk", "80", "--corrupt", "180", "--hang", "1@300")
    asked = ("tiny.toml", "run.name=rehearsal", longest, *faults, "--seed", "5")
    found, report = drilled(place, *asked)
    assert found.code == 0, found
    assert report["ok"] and report["final_equal"] == "bits" and report["seed"] == 5 and not report["ended_by"]
    assert report["samples_lost"] == report["samples_repeated"] == 0 and 0 < report["useful_share"] < 1
    slow, kill, full, corrupt, hang = report["faults"]
    assert (slow["found_after_s"], slow["steps_lost"]) == (None, 0) and slow["back_after_s"] >= 2
    assert (kill["kind"], kill["rank"], kill["step"]) == ("kill", 1, 45) and kill["phase"]
    assert 0 <= kill["found_after_s"] < 5 and kill["found_after_s"] < kill["back_after_s"] < 60
    assert 0 < full["found_after_s"] < full["back_after_s"] and full["steps_lost"] == 0
    assert kill["steps_lost"] <= 10 < corrupt["steps_lost"] and "step-" in corrupt["what"]
    assert found.out.count("\nwarning  saving finds no room") == 1 and hang["found_after_s"] > 4
    assert found.out.count("\nskipped  ") == 1 and "(seed 5)" in found.out
    told = [line for line in incidents(place, "rehearsal-drill") if "cause" in line]
    assert [(line["cause"], line["rank"]) for line in told] == [("killed", 1), ("killed", 0), ("hung", 1)]
    assert told[2]["what"] == "stopped" and "of step" in told[2]["place"] and "plait/" in told[2]["stack"]
    assert not (place.path("rehearsal-left-alone") / "incidents.jsonl").exists()
    again = run_warm(place, "drill", *asked)
    assert again.code == 2 and again.sentence().startswith('"runs/rehearsal-drill" is there from an earlier drill')


@pytest.mark.slow
def test_a_lost_host_needs_no_rights_and_its_run_goes_on(place: Place) -> None:
    found, report = drilled(place, "tiny.toml", "run.name=hosts", LONGER, "--lose-host", "1@40")
    assert found.code == 0 and report["ok"], found
    (fault,) = report["faults"]
    assert fault["kind"] == "lose-host" and fault["found_after_s"] < 15 and fault["back_after_s"] < 90
    assert report["final_equal"] in ("bits", "samples") and place.plan("hosts-left-alone")["hosts"]
    assert not list((place.folder / ".plait").glob("*-drill-hosts"))
    place.assert_nobody_left()


@pytest.mark.slow
def test_faults_by_time_come_one_after_the_other(place: Place) -> None:
    """A shorter time leaves none to measure in, and then each of the two runs may get another number of steps."""
    found, report = drilled(place, "tiny.toml", "run.name=times", "--random", "45 s", "--seed", "3")
    assert found.code == 0 and report["final_equal"] == "bits", found
    assert 1 <= len(report["faults"]) <= 4 and "train.budget is 45 s" in found.out


@pytest.mark.slow
def test_a_run_that_is_over_is_rehearsed_and_stays_as_it_is_and_the_report_says_that_the_drill_gave_up(
    place: Place, reference: Callable[[int], str]
) -> None:
    name = reference(2)
    before = {path: path.stat().st_mtime_ns for path in place.path(name).rglob("*")}
    found, report = drilled(place, name, "recover.mode=never", "--kill", "1@30")
    assert f"runs/{name} is not at work" in found.out
    assert {path: path.stat().st_mtime_ns for path in place.path(name).rglob("*")} == before
    assert found.code == 1 and not report["ok"] and "killed by SIGKILL" in report["ended_by"]
    assert report["final_equal"] == "no" and "end      too early: rank 1" in found.out


@pytest.mark.slow
def test_a_run_at_work_is_disturbed_only_where_somebody_says_so(place: Place, run_warm: RunWarm) -> None:
    name = "at-work"
    process = place.start_training(name, "train.budget=3000 steps", "recover.state_every=3", "--no-check")
    wait_while_running(lambda: done_steps(place, name) > 30, process)
    refused = run_warm(place, "drill", name, "--kill", "1@500")
    assert refused.code == 2 and "is at work" in refused.sentence() and "give --yes" in refused.sentence()
    for words in (("--nan", "1@500"), ("--fill-disk", "500"), ("--lose-host", "1@500")):
        odd = run_warm(place, "drill", name, *words, "--yes")
        assert odd.code == 2 and "rehearse anything else" in odd.sentence()
    assert not incidents(place, name)
    at = done_steps(place, name) + 200
    found, report = drilled(place, name, "--kill", f"1@{at}", "--yes")
    assert found.code == 0 and report["ok"], found
    assert report["compared_with"] == "its own ledger" and report["final_equal"] == "samples"
    assert [0 <= fault["steps_lost"] <= 3 for fault in report["faults"]] == [True], "copies in memory"
    assert [line["rank"] for line in incidents(place, name) if "cause" in line] == [1]
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process).code == 130
