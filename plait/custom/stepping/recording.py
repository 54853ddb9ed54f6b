"""Records some steps of a program in detail on all workers, and writes them as a trace or a page."""

from __future__ import annotations

from pathlib import Path

from plait.checkpoint.durable import write_durably
from plait.custom.group import Workers
from plait.errors import PlaitError, disk_advice
from plait.parallel.exchange import first_ones
from plait.report.trace_events import trace_json
from plait.trainer.recording.recorder import MOST_STEPS, StepRecorder, gather_timeline


class RecordedProgram:
    """A recording of the next steps; call `take` at the beginning and the end of each step until `is_done`."""

    def __init__(self, path: Path, steps: int, workers: Workers, layout: str) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise PlaitError(f"run.record_steps takes 1 to {MOST_STEPS} steps, not {steps}")
        self._path, self._steps, self._workers, self._layout = path, steps, workers, layout
        self.recorder = StepRecorder(workers.device)

    @property
    def is_done(self) -> bool:
        """Whether all steps were recorded."""
        return self.recorder.steps == self._steps

    def write(self) -> None:
        """Write what all workers recorded: a page for a name that ends with .html, else a trace. Every worker must call
        it; the first one writes. Raises PlaitError on all of them where the disk refuses it."""
        timeline = gather_timeline(self.recorder, self._workers.sums)

        def write() -> None:
            text = trace_json([timeline])
            if self._path.suffix == ".html":
                from plait.run_files.timeline_page import TimelinePage, timeline_html

                text = timeline_html(
                    TimelinePage(
                        run=self._path.stem,
                        layout=f'layout "{self._layout}"',
                        measured=timeline,
                        planned=None,
                        recorded="Recorded by the program itself.",
                    )
                )
            try:
                write_durably(self._path, text.encode())
            except OSError as error:
                raise PlaitError(f"{self._path} cannot be written ({error.strerror}); {disk_advice(error)}") from None

        first_ones(write, self._workers.sums)
