"""Figures of the last steps of a run, for the lines and bars that people watch."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import mean, median_low

from plait.report.metrics import StepReport

SMOOTHING_STEPS = 20


class RecentSteps:
    """Running figures of about the last SMOOTHING_STEPS steps, right from the first step on: the loss is a mean; the
    time of a step a median, as the steps that are compiled take hundreds of times as long and come once."""

    def __init__(self) -> None:
        self._loss_weight = self._loss = 0.0
        self._taken = deque[tuple[float, float]](maxlen=SMOOTHING_STEPS)
        """Seconds and tokens of each step."""

    def add(self, report: StepReport) -> None:
        # A step without a finite loss is shown, and its neighbours are not lost with it.
        decay = 1 - 1 / SMOOTHING_STEPS if isfinite(self._loss) and isfinite(report.loss) else 0.0
        earlier = self._loss if decay else 0.0
        self._loss_weight = self._loss_weight * decay + 1
        self._loss = earlier * decay + report.loss
        self._taken.append((report.step_s, report.tokens_per_s * report.step_s))

    @property
    def loss(self) -> float:
        return self._loss / self._loss_weight

    @property
    def step_s(self) -> float:
        return median_low(seconds for seconds, _ in self._taken)

    @property
    def tokens_per_s(self) -> float:
        return mean(tokens for _, tokens in self._taken) / self.step_s if self.step_s else 0.0
