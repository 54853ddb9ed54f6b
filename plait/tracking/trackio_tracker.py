"""Trackio as a tracker: a local database, or a Space where TRACKIO_SPACE_ID names one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from plait.report.samples_file import SampleReport
from plait.tracking.trackers import EndState, MetricRow, TrackedRun


def open_trackio(run: TrackedRun, run_id: str) -> TrackioTracker:
    """The run in Trackio's project of the folder's name, or that of TRACKIO_PROJECT."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    trackio: Any = import_module("trackio")
    project = os.environ.get("TRACKIO_PROJECT", run.project)
    resume = "allow" if run_id else "never"
    opened = trackio.init(project=project, name=run.name, resume=resume, config=dict(run.settings))
    return TrackioTracker(opened, trackio.Markdown, project)


class TrackioTracker:
    """One run in Trackio."""

    def __init__(self, run: Any, markdown: Any, project: str) -> None:
        self._run, self._markdown = run, markdown
        self.run_id: str = run.name
        self.last_step = 0
        self.address = f"trackio show --project {project}"

    def log(self, rows: Sequence[MetricRow]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def sample(self, report: SampleReport) -> None:
        self._run.log({"sample": self._markdown(f"{report.prompt}{report.text}")}, step=report.step)

    def finish(self, state: EndState) -> None:
        self._run.finish()
