"""`plait timeline` as a person uses it: on a finished run, and on one that trains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.end_to_end.command import Place, ended, wait_until
from tests.report.trace_rules import check_trace


def trace_of(place: Place, name: str) -> list[dict[str, Any]]:
    trace = json.loads((place.folder / f"{name}-timeline.json").read_text())
    check_trace(trace)
    return trace["traceEvents"]


def test_a_finished_run_is_recorded_and_stays_as_it_is(place: Place, reference: Any) -> None:
    name = reference(2)
    before = {path: path.stat().st_mtime_ns for path in place.path(name).rglob("*")}
    end = place.run("timeline", name, "--steps", "2")
    assert end.code == 0 and not end.err, end
    assert "timeline A step took" in end.out and f"written  {name}-timeline.html" in end.out
    assert {path: path.stat().st_mtime_ns for path in place.path(name).rglob("*")} == before
    events = trace_of(place, name)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"work, as planned", "work, as it was", "messages, as it was"} <= names | {
        one.replace("messages 1", "messages") for one in names
    }
    assert {event["pid"] for event in events} == {0, 1}
    updates = [event["args"]["step"] for event in events if event["name"] == "optimizer update" and event["pid"] == 0]
    assert len(updates) == 4 and len(set(updates)) == 2  # two steps, planned and as they were
    page = (place.folder / f"{name}-timeline.html").read_text()
    assert "Planned and measured, by kind" in page and "<script" not in page


@pytest.mark.slow
def test_a_run_that_trains_records_itself(place: Place) -> None:
    name = "recorded-live"
    process = place.start("train", "tiny.toml", f"run.name={name}", "train.budget=20000 steps", "--no-check")
    wait_until(lambda: (place.path(name) / "metrics.jsonl").exists() or process.poll() is not None, within_s=90)
    end = place.run("timeline", name, "--steps", "3")
    assert end.code == 0 and not end.err, end
    steps = {event["args"]["step"] for event in trace_of(place, name) if event["ph"] == "X"}
    assert len(steps) == 3 and min(steps) > 1
    assert not list(place.path(name).glob("timeline-*"))
    process.terminate()
    assert ended(process).code == 143
    assert max(steps) < place.lines(name)[-1]["step"]


def test_what_is_wrong_is_a_sentence(place: Place, reference: Any, run_warm: Any) -> None:
    name = reference(2)
    assert f'there is no run "{name}x"' in run_warm(place, "timeline", f"{name}x").sentence()
    wrong = run_warm(place, "timeline", name, "--html", "nowhere/page.html")
    assert wrong.code == 2 and "cannot write nowhere/page.html" in wrong.sentence()
    assert run_warm(place, "timeline", name, "--steps", "0").code == 2
