"""One step of a program on this worker: what is looked at before it, all its losses, and their updates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.checked_json import one_line
from plait.custom.arithmetic.library import ProductLibrary
from plait.custom.cutting import BatchCut
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.stepping.additive import check_additive, examples_to_check, is_copied
from plait.custom.stepping.gradients import GlobalSums, StepPlace, TimedOrNot, divisor_of, sum_gradients
from plait.custom.stepping.parts import ShareParts
from plait.custom.stepping.timeline import SpanLog
from plait.custom.stepping.unchanged import ModelWatch
from plait.custom.stepping.update import update_weights
from plait.custom.strands.description import CustomLayout, Strands
from plait.errors import PlaitError


class StepTaker:
    """Takes the steps of a program; every worker's takes the same."""

    def __init__(
        self,
        program: Program,
        strands: Strands,
        workers: Workers,
        layout: CustomLayout,
        cut: BatchCut | None,
        library: ProductLibrary,
    ) -> None:
        self._program, self._strands, self._workers, self._cut = program, strands, workers, cut
        self._library = library
        self._parts, self._watch = ShareParts(program, workers, layout, cut), ModelWatch(program, workers)
        self._taken = 0
        self.divisors: list[Tensor] = []
        """Of each loss the last global count (0-dim, float64), by which the next step's gradients are divided first."""
        self.spans = SpanLog()

    def take(
        self, batch: Any, *, step: int, number: int, clock: TimedOrNot, rate_factor: float
    ) -> tuple[list[Tensor], float]:
        """A step, of this number, with this worker's share of a batch, the `number`th that it was given: the global
        mean of each loss (0-dim, float64), and the seconds that this worker computed for their gradients, without
        waiting for others."""
        with self._library.step(step):
            return self._take(batch, StepPlace(step=step, batch=number, clock=clock), rate_factor)

    def _take(self, batch: Any, place: StepPlace, rate_factor: float) -> tuple[list[Tensor], float]:
        agree = self._workers.announce("run.step", place.batch)
        place = replace(place, agree=agree)
        if self._taken == 0 or self._parts.waits_within:
            agree()  # else while the backward pass goes on
        if self._taken == 0:
            self._check_losses(batch)
        self._watch.look(self._strands, self._taken)
        micros = self._parts.of_share(batch)
        means, own_s, divisors = list[Tensor](), 0.0, list[Tensor]()
        for index in range(len(self._program.losses)):
            place = replace(place, gradients_of="mean", divisor=self.divisors[index] if self.divisors else None)
            sums = self._sum_gradients(index, micros, place, batch)
            divisors.append(divisor_of(sums.total[1]))
            own_s += sums.own_s
            means.append(update_weights(self._program, self._strands, index, sums, rate_factor))
            began, computed, summed = sums.moments
            self.spans.add("forward and backward", place.step, began, computed)
            self.spans.add("wait for sums", place.step, computed, summed)
            self.spans.add("update", place.step, summed, time.perf_counter())
        for scheduler in self._program.schedulers:
            scheduler.step()
        self.divisors = divisors
        self._taken += 1
        return means, own_s

    def _sum_gradients(self, index: int, micros: Sequence[Any], place: StepPlace, batch: Any) -> GlobalSums:
        try:
            return sum_gradients(self._program, self._strands, self._workers, index, micros, place)
        except RuntimeError as error:
            if not self._parts.is_empty(batch):
                raise
            raise PlaitError(
                f"the last batch of a pass has fewer examples than workers, and the model cannot run on none of them "
                f'({one_line(str(error))}); take last="drop", or fewer workers'
            ) from error

    def foresee(self, divisors: Sequence[float]) -> None:
        """Go on from a saved run's last global counts, so that the next step rounds as it would have there."""
        self.divisors = [torch.tensor(one, dtype=torch.float64, device=self._workers.device) for one in divisors]

    def _check_losses(self, batch: Any) -> None:
        """Before the first step: whether losses are sums. All workers look, or none, as models may wait for each
        other."""
        few = torch.tensor([int(examples_to_check(batch, self._cut) < 2)])
        if int(self._workers.sums.largest(few)) == 0:
            cut_up = bool(self._program.skeletons) and is_copied(self._program)
            weights = self._strands.full_weights() if cut_up else None
            for index in range(len(self._program.losses)):
                check_additive(self._program, index, batch, self._cut, weights)
