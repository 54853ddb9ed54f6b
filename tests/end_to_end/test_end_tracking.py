"""A run with samples and a CSV: the numbers of one without, its files whole, also after a kill."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running

ASKED = ('report.to=["tensorboard", "csv"]', "report.samples=3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "a place")


def samples_of(place: Place, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (place.path(name) / "samples.jsonl").read_text().splitlines()]


def rows_of(place: Place, name: str) -> list[dict[str, str]]:
    with (place.path(name) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_samples_change_no_number_and_are_in_the_files(place: Place) -> None:
    plain, sampled = place.train("plain"), place.train("sampled", *ASKED)
    assert plain.code == sampled.code == 0, plain.err + sampled.err
    assert place.numbers("sampled") == place.numbers("plain")
    assert not (place.path("plain") / "samples.jsonl").exists()
    found = samples_of(place, "sampled")
    assert [one["step"] for one in found] == [0, 20, 40, 60] and len({one["text"] for one in found}) > 1
    assert [line[:14] for line in sampled.out.splitlines() if line.startswith("sample ")] == ["sample   step "] * 4
    rows = rows_of(place, "sampled")
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["eval_loss"]] == ["30", "60"]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_samples_and_rows(place: Place) -> None:
    whole = place.train("whole", *ASKED)
    assert whole.code == 0, whole.err
    process = place.start_training("killed", *ASKED)
    wait_while_running(lambda: any(step >= 20 for step in place.checkpoints("killed")), process)
    process.send_signal(signal.SIGKILL)
    ended(process, 60)
    assert place.train("killed", *ASKED).code == 0
    assert samples_of(place, "killed") == samples_of(place, "whole")
    assert place.numbers("killed") == place.numbers("whole")
    assert [int(row["step"]) for row in rows_of(place, "killed")] == list(range(1, STEPS + 1))
