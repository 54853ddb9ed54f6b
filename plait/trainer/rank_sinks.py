"""Where a rank's reports go: rank 0 writes the run's files and tells the supervisor, the others report nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.report.metrics import EvalReport, StepReport
from plait.report.sinks import MetricsFile, Several, Sink, TensorBoard


def sinks_of_rank(rank: int, send: Callable[..., None], folder: Path, steps_done: int) -> Sink:
    """Rank 0 writes the files and reports to the supervisor, which owns the terminal; the other ranks report
    nothing."""
    if rank != 0:
        return Several([])
    return Several(
        [
            MetricsFile(folder / "metrics.jsonl"),
            TensorBoard(folder / "tensorboard", steps_done),
            _SupervisorSink(send),
        ]
    )


class _SupervisorSink:
    """A sink that passes reports on to the supervisor."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def step(self, report: StepReport) -> None:
        self._send("step", **_plain(asdict(report)))

    def evaluation(self, report: EvalReport) -> None:
        self._send("evaluation", **_plain(asdict(report)))

    def note(self, text: str) -> None:
        self._send("note", text=text)

    def close(self) -> None:
        """Does nothing: the sink holds no resources."""


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every infinity or NaN as a string, since JSON cannot express them."""
    return {k: v if not isinstance(v, float) or abs(v) < float("inf") else str(v) for k, v in values.items()}
