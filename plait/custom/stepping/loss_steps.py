"""One loss's step, global sums and update: the same in a run, in its proof, and where layouts are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.custom.group import Workers
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.program import Program
from plait.custom.stepping.gradients import GlobalSums, StepPlace, divisor_of, sum_gradients
from plait.custom.stepping.loss_scale import LossScale
from plait.custom.stepping.update import UpdateEnd, update_weights


class LossSteps:
    """Takes steps of a program's losses, and knows of each loss what its next step needs; `scale` is the factor on
    losses of float16."""

    def __init__(self, program: Program, parallel: ParallelProgram, workers: Workers, scale: LossScale) -> None:
        self._program, self._parallel, self._workers, self._scale = program, parallel, workers, scale
        self._divisors: dict[int, Tensor] = {}
        """Of each loss of one term the last global count (0-dim, float64), by which the next step's gradients are
        divided first; of others, and before a loss's first step, it is not known."""
        self._terms: dict[int, int] = {}
        """For each loss that has taken a step, the number of its terms."""

    def sum(self, index: int, micros: Sequence[Any], place: StepPlace) -> GlobalSums:
        """Leave each parameter the global gradient of this loss of a batch, of which these are this worker's parts.

        Gradients of float16 are scaled before they are anything else, and would not be finite as a sum over the batch.
        Every worker must call it; blocks.
        """
        scaled = self._program.precision == "fp16"
        place = replace(
            place,
            divided_by=self._divisors.get(index, "own counts"),
            terms=self._terms.get(index),
            loss_scale=self._scale.factor if scaled else 1.0,
        )
        sums = sum_gradients(self._program, self._parallel, self._workers, index, micros, place)
        self._terms[index] = len(sums.counts)
        if len(sums.counts) == 1 and not scaled:
            self._divisors[index] = divisor_of(sums.counts[0])
        return sums

    def update(self, index: int, sums: GlobalSums, place: StepPlace, rate_factor: float = 1.0) -> UpdateEnd:
        """Update the weights by the gradients that `sum` left. Every worker must call it; blocks."""
        return update_weights(self._program, self._parallel, index, sums, rate_factor, place.step)

    def saved(self) -> dict[str, float]:
        """The values that a resume needs, as JSON, so that the next step rounds in the same way."""
        return {str(index): float(divisor) for index, divisor in self._divisors.items()}

    def resume(self, saved: Mapping[str, float]) -> None:
        """Go on as a saved run would have."""
        device = self._workers.device
        self._divisors = {int(k): torch.tensor(one, dtype=torch.float64, device=device) for k, one in saved.items()}
