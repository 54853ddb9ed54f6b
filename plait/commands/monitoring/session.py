"""One start of a run's workers: what they send is shown, compared with the forecast, and kept in the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.commands.monitoring.forecast_monitor import ForecastMonitor, note_message
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.workers import WorkerPool, log_folder
from plait.launch.values.job import Job, JobResult, Message
from plait.planner.plan import Plan
from plait.report.console import Console
from plait.report.metrics import EvalReport, StepReport


class Session:
    """Takes the messages of one start of the workers; `step` is the last one that was saved."""

    def __init__(self, folder: RunFolder, bar: Console, compared: ForecastMonitor | None, devices: int) -> None:
        self.step = 0
        self._folder, self._bar, self._compared, self._devices = folder, bar, compared, devices
        self._counted_at = time.monotonic()

    def on_message(self, message: Message) -> None:
        values = dict(message.values)
        if self._compared:
            note_message(self._compared, message.kind, values)
        if message.kind == "step":
            self._bar.step(StepReport(**_numbers(values)))
        elif message.kind == "evaluation":
            self._bar.evaluation(EvalReport(**_numbers(values)))
        elif message.kind == "note":
            self._bar.note(values["text"])
        elif message.kind == "memory":
            self.count(**{key: tuple(value) for key, value in values.items()})
        elif message.kind == "saved":
            self.step = values["step"]
            self.count()

    def close(self) -> None:
        """No more messages will come."""
        self._bar.close()
        self.count()

    def count(self, **peaks: Sequence[int]) -> None:
        """Add the time since the last count, and memory peaks where they are news."""
        now, so_far = time.monotonic(), self._folder.so_far
        took_s = now - self._counted_at
        times = {"wall_s": so_far.wall_s + took_s, "device_s": so_far.device_s + took_s * self._devices}
        self._folder.note_so_far(replace(so_far, **times, **peaks))
        self._counted_at = now


def run_session(
    plan: Plan, folder: RunFolder, workers: WorkerPool, done: int, resume: str | None, session: Session
) -> tuple[JobResult, int]:
    """Start the workers and wait for their end; returns also the step that is saved."""
    session.step = done
    job = Job(
        entry="plait.trainer.worker:main",
        argument=json.dumps({"folder": str(folder.path.resolve()), "resume": resume, "parts": "here"}),
        world_size=plan.world_size,
        threads=plan.threads,
        log_dir=log_folder(folder.path),
    )
    try:
        return workers.run(job, session.on_message), session.step
    finally:
        session.close()


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo what JSON could not say: "nan" and "inf" came as words."""
    return {key: float(value) if isinstance(value, str) else value for key, value in values.items()}
