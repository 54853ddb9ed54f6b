"""A tool that keeps runs in a folder of JSON lines: the second implementation of Tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.report.samples_file import SampleReport
from plait.tracking.trackers import EndState, MetricRow, OpenTracker, TrackedRun, Tracker


class FileTracker:
    """One run, each of whose calls is a line; it refuses a step that is before one that it has, as W&B does."""

    def __init__(self, store: Path, run: TrackedRun, run_id: str, fails_at: int | None) -> None:
        self.run_id = run_id or f"run-{len(list(store.glob('*.jsonl'))) + 1}"
        self.address = f"at {store}"
        self._file, self._fails_at = store / f"{self.run_id}.jsonl", fails_at
        self.last_step = 0
        if not run_id:
            self._write({"settings": dict(run.settings), "name": run.name, "project": run.project})

    def log(self, rows: Sequence[MetricRow]) -> None:
        for step, values in rows:
            if self._fails_at is not None and step >= self._fails_at:
                raise ConnectionError("the network is\nunreachable")
            self._write({"step": step, **values})

    def sample(self, report: SampleReport) -> None:
        self._write({"step": report.step, "text": report.text})

    def finish(self, state: EndState) -> None:
        self._write({"ended": state})

    def _write(self, line: Mapping[str, Any]) -> None:
        last = max((one["step"] for one in lines_of(self._file) if "step" in one), default=0)
        assert line.get("step", last) >= last, "a step before the newest one"
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def file_tool(store: Path, fails_at: int | None = None) -> OpenTracker:
    """Opens runs in this folder; fails from a step on as if a network were gone."""

    def open_run(run: TrackedRun, run_id: str) -> Tracker:
        return FileTracker(store, run, run_id, fails_at)

    return open_run


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
