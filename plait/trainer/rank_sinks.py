"""The destinations of a rank's reports: rank 0 writes the run's files and informs the supervisor, the others report
nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.report.metrics import EvalReport, StepReport
from plait.report.samples_file import SampleReport
from plait.report.sinks import BestEffort, CsvFile, MetricsFile, SamplesFile, Several, Sink, TensorBoard


def sinks_of_rank(
    rank: int,
    send: Callable[..., None],
    folder: Path,
    steps_done: int,
    to: Collection[str],
    settings: Mapping[str, float | str | bool],
) -> Sink:
    """Rank 0 writes the files and reports to the supervisor, which owns the terminal; the other ranks report nothing.

    The run needs metrics.jsonl, and goes on without the others where they cannot be written. `to` are the recipe's
    destinations, of which those outside the folder are the supervisor's (plait/tracking).
    """
    if rank != 0:
        return Several([])
    metrics = folder / "metrics.jsonl"

    def tensorboard() -> Sink:
        return TensorBoard(folder / "tensorboard", steps_done, settings)

    def say(text: str) -> None:
        send("note", text=text)

    sinks: list[Sink] = [MetricsFile(metrics)]
    sinks.append(BestEffort("samples.jsonl", lambda: SamplesFile(folder / "samples.jsonl", steps_done), say))
    if "csv" in to:
        sinks.append(BestEffort("metrics.csv", lambda: CsvFile(folder / "metrics.csv", metrics), say))
    if "tensorboard" in to:
        sinks.append(BestEffort("TensorBoard", tensorboard, say))
    return Several([*sinks, _SupervisorSink(send)])


class _SupervisorSink:
    """A sink that passes reports on to the supervisor."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def step(self, report: StepReport) -> None:
        self._send("step", **_plain(asdict(report)))

    def evaluation(self, report: EvalReport) -> None:
        self._send("evaluation", **_plain(asdict(report)))

    def sample(self, report: SampleReport) -> None:
        self._send("sample", **asdict(report))

    def note(self, text: str) -> None:
        self._send("note", text=text)

    def close(self) -> None:
        """Does nothing: the sink holds no resources."""


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every infinity or NaN as a string, since JSON cannot express them."""
    return {k: v if not isinstance(v, float) or abs(v) < float("inf") else str(v) for k, v in values.items()}
