"""What a case's turns come to, contender by contender, at one and the same pace of the processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.lab.cut import Turn

Line = Mapping[str, Any]
"""A finished case, as it stands in a file of results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contender of a case."""

    name: str
    seconds: tuple[float, ...]
    """Of all its full steps; one lower bound where `bound` is "at least"."""
    bound: str
    """"exact", "at least" or "failed"."""
    predicted_s: float | None
    sent_bytes: float
    """Of the busiest host, a step."""
    tensor_error: float | None
    """Predicted over measured - 1 of live tensors on the fullest rank; None where nothing was told."""
    process_error: float | None
    """The same of its whole process."""
    sentence: str

    @property
    def step_s(self) -> float:
        return median(self.seconds)


def measured(line: Line) -> list[Measured]:
    """All contenders of a case, baselines last and without a prediction."""
    layouts = [_measured(name, turns_of(line, one["turns"]), one) for name, one in line["layouts"].items()]
    return layouts + [_measured(name, turns_of(line, turns), {}) for name, turns in line["baselines"].items()]


def turns_of(line: Line, turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """At the pace that the processors had when they were probed."""
    return [Turn.from_values(turn).at_pace(line.get("probed_product_s", 0.0)) for turn in turns]


def _measured(name: str, taken: Sequence[Turn], one: Mapping[str, Any]) -> Measured:
    exact = [turn for turn in taken if turn.ended in ("finished", "cut")]
    bound = "exact" if exact else "at least" if any(turn.ended == "longer" for turn in taken) else "failed"
    kept = exact or taken
    fullest = max(kept, key=lambda turn: turn.peak_tensor_bytes, default=None)
    tensors, process = fullest and fullest.peak_tensor_bytes, fullest and fullest.peak_rss_bytes
    return Measured(
        name=name,
        seconds=tuple(second for turn in kept for second in turn.seconds),
        bound=bound,
        predicted_s=one.get("step_s"),
        sent_bytes=median(turn.sent_bytes for turn in kept) if kept else 0.0,
        tensor_error=_error(fullest and (fullest.planned_tensor_bytes or one.get("tensor_bytes")), tensors),
        process_error=_error(fullest and (fullest.planned_rss_bytes or one.get("all_bytes")), process),
        sentence=next((turn.sentence for turn in taken if turn.sentence), ""),
    )


def _error(said: float | None, found: float | None) -> float | None:
    return said / found - 1 if said and found else None
