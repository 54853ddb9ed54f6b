"""Records a timeline during training: a request arrives in the run's folder, and the ranks record their next steps.

Rank 0 looks for the request once a second. The others learn of it in the agreement that follows each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError
from plait.report.atomic import replace_file
from plait.report.timeline_request import TimelineFiles
from plait.trainer.assemble import Assembly
from plait.trainer.loop import Observer
from plait.trainer.recording.recorder import MOST_STEPS, StepRecorder, gather_timeline
from plait.trainer.state import TrainState

LOOK_FOR_REQUEST_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Recording:
    recorder: StepRecorder
    steps: int


class LiveTimeline:
    """One rank's part. Every rank must make one, and call the same methods at the same steps."""

    def __init__(self, assembly: Assembly, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._assembly, self._files, self._clock = assembly, TimelineFiles(folder), clock
        self._looked_at_s = clock()
        self._recording: _Recording | None = None

    def requested(self) -> int:
        """The number of requested steps; 0 if there is no request, and on all ranks but the first."""
        if self._assembly.sums.index > 0 or self._recording is not None:
            return 0
        now_s = self._clock()
        if now_s < self._looked_at_s + LOOK_FOR_REQUEST_S:
            return 0
        self._looked_at_s = now_s
        return min(MOST_STEPS, self._files.requested_steps())

    def agreed(self, steps: int) -> None:
        """Record this many steps from the next one on; 0: nothing new."""
        if steps:
            self._recording = _Recording(recorder=StepRecorder(self._assembly.device), steps=steps)

    @property
    def observer(self) -> Observer:
        """The observer for the loop. It must be the last, so that its work is in no step."""
        return Observer(before_step=self._before_step, after_step=self._after_step)

    def _before_step(self, state: TrainState) -> None:
        if self._recording is not None:
            self._recording.recorder.begin_step(state.step + 1)

    def _after_step(self, _: TrainState) -> None:
        recording = self._recording
        if recording is None:
            return
        recording.recorder.end_step()
        if recording.recorder.steps < recording.steps:
            return
        self._recording = None
        timeline = gather_timeline(recording.recorder, self._assembly.sums)
        if self._assembly.sums.index == 0:
            with suppress(PlaitError):  # a full disk: the run goes on training, and whoever asked sees no answer
                replace_file(self._files.answer, timeline.to_json().encode(), failure=PlaitError)
            self._files.request.unlink(missing_ok=True)
