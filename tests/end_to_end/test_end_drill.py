"""`plait drill`: failures on purpose, and what is told of them."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.end_to_end.command import Ended, Place, ended, wait_while_running
from tests.end_to_end.test_end_recovery import done_steps, incidents

LONGER = "train.budget=120 steps"


def drilled(place: Place, *words: str) -> tuple[Ended, dict[str, Any]]:
    """How a drill ended, and its report."""
    found = place.run("drill", *words, "--json", "drill.json", within_s=300)
    return found, json.loads((place.folder / "drill.json").read_text())


@pytest.mark.slow
def test_a_drill_rehearses_failures_and_says_what_came_of_them(place: Place) -> None:
    asked = ("tiny.toml", "run.name=rehearsal", LONGER, "--kill", "1@25", "--corrupt", "60", "--seed", "5")
    found, report = drilled(place, *asked)
    assert found.code == 0, found
    assert report["ok"] and report["final_equal"] == "bits" and report["seed"] == 5 and not report["ended_by"]
    assert report["samples_lost"] == report["samples_repeated"] == 0 and 0 < report["useful_share"] < 1
    kill, corrupt = report["faults"]
    assert (kill["kind"], kill["rank"], kill["step"]) == ("kill", 1, 25) and kill["phase"]
    assert 0 <= kill["found_after_s"] < 5 and kill["found_after_s"] < kill["back_after_s"] < 60
    assert kill["steps_lost"] <= 10 < corrupt["steps_lost"] and "step-" in corrupt["what"]
    assert [line["rank"] for line in incidents(place, "rehearsal-drill") if "cause" in line] == [1, 0]
    assert found.out.count("\nskipped  ") == 1 and "(seed 5)" in found.out
    assert not (place.path("rehearsal-left-alone") / "incidents.jsonl").exists()
    again = place.run("drill", *asked)
    assert again.code == 2 and again.sentence().startswith('"runs/rehearsal-drill" is there from an earlier drill')


@pytest.mark.slow
def test_a_slow_worker_is_waited_for_and_a_full_disk_survived(place: Place) -> None:
    longest = "train.budget=400 steps"  # so that a save fails and another one goes well long before the hang
    asked = ("tiny.toml", "run.name=slow", longest, "--slow", "0@10", "--fill-disk", "40", "--hang", "1@300")
    found, report = drilled(place, *asked)
    assert found.code == 0 and report["final_equal"] == "bits", found
    slow, full, hang = report["faults"]
    assert (slow["found_after_s"], slow["steps_lost"]) == (None, 0) and slow["back_after_s"] >= 2
    assert 0 < full["found_after_s"] < full["back_after_s"] and full["steps_lost"] == 0
    assert found.out.count("\nwarning  could not save") == 1 and hang["found_after_s"] > 4
    assert [line["cause"] for line in incidents(place, "slow-drill") if "cause" in line] == ["hung"]


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
    found, report = drilled(place, "tiny.toml", "run.name=times", "--random", "45 s", "--seed", "3")
    assert found.code == 0 and report["final_equal"] == "bits", found
    assert 1 <= len(report["faults"]) <= 4 and "train.budget is 45 s" in found.out


@pytest.mark.slow
def test_a_run_that_is_over_is_rehearsed_and_stays_as_it_is(place: Place) -> None:
    assert place.train("over").code == 0
    before = {path: path.stat().st_mtime_ns for path in place.path("over").rglob("*")}
    found, report = drilled(place, "over", "--kill", "0@30")
    assert found.code == 0 and report["final_equal"] == "bits", found
    assert "runs/over is not at work" in found.out
    assert {path: path.stat().st_mtime_ns for path in place.path("over").rglob("*")} == before


@pytest.mark.slow
def test_a_run_at_work_is_disturbed_only_where_somebody_says_so(place: Place) -> None:
    name = "at-work"
    process = place.start_training(name, "train.budget=3000 steps", "--no-check")
    wait_while_running(lambda: done_steps(place, name) > 30, process)
    refused = place.run("drill", name, "--kill", "1@500")
    assert refused.code == 2 and "is at work" in refused.sentence() and "say --yes" in refused.sentence()
    for words in (("--nan", "1@500"), ("--fill-disk", "500"), ("--lose-host", "1@500")):
        odd = place.run("drill", name, *words, "--yes")
        assert odd.code == 2 and "rehearse anything else" in odd.sentence()
    assert not incidents(place, name)
    at = done_steps(place, name) + 400
    found, report = drilled(place, name, "--kill", f"1@{at}", "--yes")
    assert found.code == 0 and report["ok"], found
    assert report["compared_with"] == "its own ledger" and report["final_equal"] == "samples"
    assert [line["rank"] for line in incidents(place, name) if "cause" in line] == [1]
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process).code == 130


@pytest.mark.slow
def test_a_run_that_gives_up_is_told_in_the_report(place: Place) -> None:
    asked = ("tiny.toml", "run.name=gives-up", LONGER, "recover.mode=never", "--kill", "1@30")
    found, report = drilled(place, *asked)
    assert found.code == 1 and not report["ok"] and "killed by SIGKILL" in report["ended_by"]
    assert report["final_equal"] == "no" and "end      too early: rank 1" in found.out
