"""Steps with bad numbers, as a run's incidents tell of them: what follows the next one, and what each start is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.report.incidents import Incident, skipped_steps
from plait.report.metrics import StepReport
from plait.trainer.divergence import SPIKE_WINDOW_STEPS, BadStep

Treatment = Literal["again", "skip", "let pass"]
MOST_SKIPPED_STEPS = 10
"""Steps of a run whose samples may be skipped: more of them are no accident."""
MOST_REWINDS = 6
"""Rewinds to one checkpoint, after which the run goes on as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What follows a bad step. `skipped` are the first and last position of the samples that are left out, where they
    are; steps up to `judged_after` are not judged from now on."""

    treatment: Treatment
    sentence: str
    skipped: tuple[int, int] | None = None
    judged_after: int = 0


def after_bad_step(
    bad: BadStep,
    earlier: Sequence[Incident],
    *,
    resumed_from: int,
    batch_sequences: int,
    samples: Literal["endless", "as many as epochs have"],
) -> Followed:
    """What follows a bad step of a run with these incidents, whose newest checkpoint is of step `resumed_from`."""
    told = f"step {bad.step} had {bad.what}"
    treatment = _treatment(bad, earlier, resumed_from, samples)
    if treatment == "again":
        return Followed(treatment=treatment, sentence=told)
    if treatment == "skip":
        first = (bad.step - 1 + sum(step < bad.step for step in skipped_steps(earlier))) * batch_sequences
        last = first + batch_sequences - 1
        sentence = f"{told} a second time, so its samples {first} to {last} are skipped"
        return Followed(treatment=treatment, sentence=sentence, skipped=(first, last))
    sentence = f"{told} again, so it is let pass, and so is what follows up to step {bad.step + SPIKE_WINDOW_STEPS}"
    return Followed(treatment=treatment, sentence=sentence, judged_after=bad.step + SPIKE_WINDOW_STEPS)


def _treatment(bad: BadStep, earlier: Sequence[Incident], resumed_from: int, samples: str) -> Treatment:
    rewinds = sum(one.bad_step > 0 and one.resumed_from == resumed_from for one in earlier)
    times = sum(one.bad_step == bad.step for one in earlier)
    if rewinds >= MOST_REWINDS:
        return "let pass"
    if times == 0:
        return "again"
    # A run of this many epochs has no further samples to take instead.
    may_skip = samples == "endless" and len(skipped_steps(earlier)) < MOST_SKIPPED_STEPS
    return "skip" if times == 1 and may_skip else "let pass"


def guard_argument(
    incidents: Sequence[Incident], reports: Sequence[StepReport], judged_after: int
) -> Mapping[str, Any]:
    """What the workers of a start are told: the steps whose samples are skipped, and how numbers are judged, after
    `judged_after` at the earliest. `reports` are those of the steps done."""
    last = [report for report in reports[-SPIKE_WINDOW_STEPS:] if report.is_finite]
    return {
        "skipped": list(skipped_steps(incidents)),
        "guard": {
            "judged_after": max([judged_after, *(one.judged_after for one in incidents)]),
            "losses": [report.loss for report in last],
            "norms": [report.grad_norm for report in last],
        },
    }
