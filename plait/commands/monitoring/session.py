"""One start of a run's workers: what they send is shown, compared with the forecast, and kept in the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.commands.monitoring.forecast_monitor import ForecastMonitor, pass_to_monitor
from plait.errors import StopSignal, signal_in_words
from plait.launch.values.job import DETAIL, NOTE, STOP_IN_WORDS, STOPPING, Job, JobResult, Message
from plait.planner.plan import Plan
from plait.report.metrics import EvalReport, StepReport
from plait.report.samples_file import SampleReport
from plait.run_folder import RunFolder
from plait.screen.screen import StepDisplay
from plait.trainer.divergence import BadStep
from plait.workers import TRAINING_ENTRY, WorkerPool, make_log_folder, modules_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where one start of the workers begins: its number in the run, the steps done, and the checkpoint's name.

    `lineage` is the number of the start with which its line of copies in memory began: its own, unless it goes on
    `from_copies`.
    """

    generation: int
    lineage: int
    steps_done: int = 0
    resume_from: str | None = None
    from_copies: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The workers' instructions about skipped samples and bad numbers."""

    def as_argument(self) -> Mapping[str, Any]:
        """This start, as its workers are given it."""
        copied = {"from_copies": self.steps_done if self.from_copies else 0, "lineage": self.lineage}
        return {"resume": self.resume_from, "generation": self.generation, **copied, **self.numbers}


class Session:
    """Takes the messages of one start of the workers; `saved_step` is the last one that was saved.

    `require_present` raises RunFailed where the run's folder is no longer there, which ends the workers.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: StepDisplay,
        monitor: ForecastMonitor | None,
        devices: int,
        *,
        require_present: Callable[[], None],
        on_first_step: Callable[[], None] = lambda: None,
        on_detail: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.saved_step = self.last_step = 0
        self.step_times: dict[int, float] = {}
        """Seconds of each step that was reported and is not saved yet."""
        self.has_stepped = False
        self.bad_step: BadStep | None = None
        """The step at which the workers ended because its numbers are bad."""
        self.copies_lost = ""
        """Why the workers could not go on from the copies in memory, and ended."""
        self._copies_s, self._copies_uncounted = 0.0, 0
        self._on_first_step, self._on_detail, self._began_at = on_first_step, on_detail, time.monotonic()
        self._require_present = require_present
        self._folder, self._display, self._monitor, self._devices = folder, display, monitor, devices
        self._totals_updated_at = time.monotonic()

    def on_message(self, message: Message) -> None:
        values = dict(message.values)
        if self._monitor:
            pass_to_monitor(self._monitor, message.kind, values)
        if message.kind == "step":
            self._require_present()
            self._note_step(StepReport(**_parse_floats(values)))
        elif message.kind == "evaluation":
            self._display.evaluation(EvalReport(**_parse_floats(values)))
        elif message.kind == "sample":
            self._display.note(SampleReport(**values).in_short())
        elif message.kind == NOTE:
            self._display.note(values["text"])
        elif message.kind == DETAIL:
            self._on_detail(values["text"])
        elif message.kind == STOPPING:
            self._display.note(stopping_text(values["signal"]))
        elif message.kind == "bad step":
            self.bad_step = BadStep(**values)
        elif message.kind == "copies lost":
            self.copies_lost = values["why"]
        elif message.kind == "copied":
            self._copies_s += values["seconds"]
            self._copies_uncounted += 1
        elif message.kind == "memory":
            self.update_totals(**{key: tuple(value) for key, value in values.items()})
        elif message.kind == "saved":
            self.saved_step = saved = values["step"]
            self.step_times = {step: step_s for step, step_s in self.step_times.items() if step > saved}
            so_far = self._folder.totals
            self._folder.write_totals(replace(so_far, save_s=so_far.save_s + values["seconds"]))
            self.update_totals()

    def _note_step(self, report: StepReport) -> None:
        if not self.has_stepped:
            self.has_stepped = True
            so_far, start_s = self._folder.totals, time.monotonic() - self._began_at - report.step_s
            self._folder.write_totals(replace(so_far, start_s=so_far.start_s + max(0.0, start_s)))
            self._on_first_step()
        self.last_step = report.step
        self.step_times[report.step] = report.step_s
        self._display.step(report)

    def close(self) -> None:
        """Close the display and save the totals; call it after the last message."""
        self._display.close()
        self.update_totals()

    def update_totals(self, **peaks: Sequence[int]) -> None:
        """Add the time since the last count, and memory peaks where they are news."""
        self._require_present()
        now, so_far = time.monotonic(), self._folder.totals
        took_s = now - self._totals_updated_at
        times = {"wall_s": so_far.wall_s + took_s, "device_s": so_far.device_s + took_s * self._devices}
        times |= {"copy_s": so_far.copy_s + self._copies_s, "copies": so_far.copies + self._copies_uncounted}
        self._folder.write_totals(replace(so_far, **times, **peaks))
        self._totals_updated_at = now
        self._copies_s, self._copies_uncounted = 0.0, 0


def run_session(
    plan: Plan, folder: RunFolder, workers: WorkerPool, start: Start, session: Session
) -> tuple[JobResult, int]:
    """Start the workers and wait for their end; returns also the step that is saved."""
    session.saved_step = session.last_step = start.steps_done
    job = Job(
        entry=TRAINING_ENTRY,
        argument=json.dumps({"folder": str(folder.path.resolve()), "parts": "here", **start.as_argument()}),
        world_size=plan.world_size,
        threads=plan.placement.threads,
        log_dir=make_log_folder(folder.path),
        needs=modules_needed(plan),
    )
    try:
        return workers.run(job, session.on_message), session.saved_step
    finally:
        session.close()


def stopping_text(signal: StopSignal) -> str:
    """The output at the moment of a stop: saving comes after the current step, which may take long."""
    again = "SIGTERM" if signal in ("SIGHUP", "SIGUSR1") else signal  # a terminal ends, a scheduler warns, only once
    repeated = f"{'again' if again == signal else again} quits without saving"
    return f"stop     {signal_in_words(signal)}: {STOP_IN_WORDS}; {repeated}"


def _parse_floats(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the strings "nan" and "inf", for which JSON has no numbers, back into floats."""
    return {key: float(value) if isinstance(value, str) else value for key, value in values.items()}
