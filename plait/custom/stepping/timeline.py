"""Each worker's use of time in the last steps: spans, and a file of them for trace viewers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from plait.checkpoint.durable import write_durably
from plait.custom.group import Workers
from plait.errors import PlaitError, disk_advice
from plait.parallel.exchange import first_ones, gather_json

SpanName = Literal["wait for data", "forward and backward", "wait for sums", "update"]
SPANS_KEPT = 4000
"""Most spans per worker: about a thousand steps."""


class SpanLog:
    """The last spans of this worker: their steps, and when they began and ended by time.perf_counter."""

    def __init__(self) -> None:
        self._spans: deque[tuple[SpanName, int, float, float]] = deque(maxlen=SPANS_KEPT)

    def add(self, name: SpanName, step: int, begin_s: float, end_s: float) -> None:
        """Keep one more."""
        self._spans.append((name, step, begin_s, end_s))

    def before(self, moment_s: float) -> list[list[str | int | float]]:
        """All of them, as JSON, in seconds from a moment on."""
        return [[name, step, begin - moment_s, end - moment_s] for name, step, begin, end in self._spans]


def write_timeline(path: Path, spans: SpanLog, workers: Workers, names: Sequence[str]) -> None:
    """Write the spans of all workers as a JSON trace, which Perfetto and chrome://tracing open: a row for each worker.

    Clocks are compared by one message, so rows agree to a fraction of a millisecond. Every worker must call it; the
    first one writes. Raises PlaitError on GPUs, whose work runs later than it is asked for.
    """
    if workers.device.type != "cpu":
        raise PlaitError("run.timeline records CPUs only; on GPUs use torch.profiler")
    workers.announce("run.timeline")()
    everybody = gather_json(spans.before(time.perf_counter()), workers.sums)

    def write() -> None:
        begun = min((begin for some in everybody for _, _, begin, _ in some), default=0.0)
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
            for rank, name in enumerate(names)
        ]
        for rank, some in enumerate(everybody):
            for name, step, begin, end in some:
                at = {"ts": (begin - begun) * 1e6, "dur": (end - begin) * 1e6, "pid": 0, "tid": rank}
                events.append({"name": name, "ph": "X", **at, "args": {"step": step}})
        try:
            write_durably(path, json.dumps({"traceEvents": events}).encode())
        except OSError as error:
            raise PlaitError(f"{path} cannot be written ({error.strerror}); {disk_advice(error)}") from None

    first_ones(write, workers.sums)
