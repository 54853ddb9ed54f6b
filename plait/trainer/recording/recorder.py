"""Records what one rank does in a few steps, and puts the records of all ranks together."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from plait.accelerator import is_accelerator, synchronize
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import gather_json
from plait.parallel.watched import WATCH
from plait.report.step_timeline import (
    Lane,
    MessageKind,
    RankTimeline,
    SpanKind,
    StepTimeline,
    StepWork,
    TimelineSpan,
    with_stage_messages,
)
from plait.trainer.balance.meter import StepClock, clock_of
from plait.trainer.recording.clock_offsets import clock_offsets

MOST_STEPS = 50
"""The most steps in one recording."""
MOST_SPANS = 100_000
"""The most spans of one rank, about 30 MB; later ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """A span between two marks of the clock."""

    lane: Lane
    kind: SpanKind
    step: int
    begin: Any
    end: Any
    stage: int
    micro: int
    n_bytes: int


class StepRecorder:
    """A rank's recorded activity in some steps, as its WATCH describes it.

    On a GPU all marks are events in its streams, which are not waited for before `read`. On a CPU only the thread that
    takes the steps is recorded: others, such as the one that saves, work concurrently.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: StepClock = clock_of(device)
        self._device = device
        self._thread: int | Literal["any"] = "any" if is_accelerator(device) else threading.get_ident()
        self._marked: list[_Marked] = []
        self._bounds: list[tuple[int, Any, Any]] = []
        self._step = 0
        self._origin, self._origin_s = self._clock.mark(), self._now_s()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block as the step of this number."""
        self.begin_step(number)
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self, number: int) -> None:
        """Begin a step, whose events are recorded until `end_step`."""
        self._step, self._begun = number, self._clock.mark()
        WATCH.recorder = self

    def end_step(self) -> None:
        """End the step; nothing is recorded from here on."""
        WATCH.recorder = None
        self._bounds.append((self._step, self._begun, self._clock.mark()))

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self._bounds)

    def work(self, kind: StepWork, *, stage: int, micro: int) -> _Block:
        return _Block(self, "work", kind, stage, micro)

    def wait(self, kind: MessageKind) -> _Block:
        return _Block(self, "wait", kind, -1, -1)

    def message(self, kind: MessageKind, n_bytes: int) -> _Pending:
        return _Pending(self, kind, n_bytes, self._step, self._clock.mark())

    def mark(self) -> Any:
        """The present moment on the recorder's clock."""
        return self._clock.mark()

    def add(
        self,
        lane: Lane,
        kind: SpanKind,
        begin: Any,
        *,
        stage: int = -1,
        micro: int = -1,
        n_bytes: int = 0,
        step: int | None = None,
    ) -> None:
        """Add a span that ends now. Its step defaults to the present one: weights that are sent at the end of a step
        arrive in the next one."""
        if self._thread not in ("any", threading.get_ident()) or len(self._marked) >= MOST_SPANS:
            return
        end = self._clock.mark()
        self._marked.append(
            _Marked(
                lane=lane,
                kind=kind,
                step=self._step if step is None else step,
                begin=begin,
                end=end,
                stage=stage,
                micro=micro,
                n_bytes=n_bytes,
            )
        )

    def read(self) -> tuple[list[tuple[int, float, float]], list[TimelineSpan]]:
        """The steps with their begin and end, and all spans in the order in which they began, in seconds of this
        process's time.perf_counter. On a GPU it waits for the device."""
        synchronize(self._device)
        bounds = [(step, self._seconds(begin), self._seconds(end)) for step, begin, end in self._bounds]
        spans = [
            TimelineSpan(
                lane=one.lane,
                kind=one.kind,
                step=one.step,
                start_s=self._seconds(one.begin),
                end_s=self._seconds(one.end),
                stage=one.stage,
                micro=one.micro,
                n_bytes=one.n_bytes,
            )
            for one in self._marked
        ]
        return bounds, sorted(spans, key=lambda span: (span.start_s, -span.end_s))

    def _seconds(self, mark: Any) -> float:
        return self._origin_s + self._clock.seconds(self._origin, mark)

    def _now_s(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


class _Block:
    """A block of work or of waiting."""

    __slots__ = ("_begin", "_kind", "_lane", "_micro", "_recorder", "_stage")

    def __init__(self, recorder: StepRecorder, lane: Lane, kind: SpanKind, stage: int, micro: int) -> None:
        self._recorder, self._stage, self._micro = recorder, stage, micro
        self._lane: Lane = lane
        self._kind: SpanKind = kind

    def __enter__(self) -> None:
        self._begin = self._recorder.mark()

    def __exit__(self, *error: object) -> None:
        self._recorder.add(self._lane, self._kind, self._begin, stage=self._stage, micro=self._micro)


class _Pending:
    """A message that has begun."""

    __slots__ = ("_begin", "_kind", "_n_bytes", "_recorder", "_step")

    def __init__(self, recorder: StepRecorder, kind: MessageKind, n_bytes: int, step: int, begin: Any) -> None:
        self._recorder, self._n_bytes, self._step, self._begin = recorder, n_bytes, step, begin
        self._kind: MessageKind = kind

    def end(self) -> None:
        self._recorder.add("message", self._kind, self._begin, n_bytes=self._n_bytes, step=self._step)


# The records of all ranks as one timeline.


def gather_timeline(recorder: StepRecorder, world: Communicator) -> StepTimeline:
    """The recorded steps of all ranks, on one clock, on every rank. Every rank must call it after the same steps;
    blocks."""
    bounds, spans = recorder.read()
    offsets = clock_offsets(world)
    rows = [[s.lane, s.kind, s.step, s.start_s, s.end_s, s.stage, s.micro, s.n_bytes] for s in spans]
    gathered = gather_json({"host": platform.node(), "bounds": bounds, "spans": rows}, world)
    origin_s = min(own["bounds"][0][1] - o.offset_s for own, o in zip(gathered, offsets, strict=True))
    ranks = []
    for rank, (own, clock) in enumerate(zip(gathered, offsets, strict=True)):
        shift_s = origin_s + clock.offset_s
        ranks.append(
            RankTimeline(
                rank=rank,
                host=own["host"] if any(one["host"] != own["host"] for one in gathered) else "",
                clock_error_s=clock.error_s,
                spans=tuple(_span(row, shift_s) for row in own["spans"]),
            )
        )
    every = [
        (
            min(own["bounds"][step][1] - o.offset_s for own, o in zip(gathered, offsets, strict=True)) - origin_s,
            max(own["bounds"][step][2] - o.offset_s for own, o in zip(gathered, offsets, strict=True)) - origin_s,
        )
        for step in range(len(bounds))
    ]
    found = StepTimeline(source="measured", first_step=bounds[0][0], bounds_s=tuple(every), ranks=tuple(ranks))
    return with_stage_messages(found)


def _span(row: Sequence[Any], shift_s: float) -> TimelineSpan:
    lane, kind, step, start_s, end_s, stage, micro, n_bytes = row
    return TimelineSpan(
        lane=lane,
        kind=kind,
        step=step,
        start_s=start_s - shift_s,
        end_s=end_s - shift_s,
        stage=stage,
        micro=micro,
        n_bytes=n_bytes,
    )
