"""One step of a program on this worker: what is looked at before it, all its losses, and their updates."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.custom.cutting import BatchCut
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.stepping.additive import check_additive, examples_to_check
from plait.custom.stepping.gradients import StepPlace, sum_gradients
from plait.custom.stepping.parts import ShareParts
from plait.custom.stepping.timeline import SpanLog
from plait.custom.stepping.unchanged import ModelWatch
from plait.custom.stepping.update import update_weights
from plait.custom.strands.description import CustomLayout, Strands


class StepTaker:
    """Takes the steps of a program; every worker's takes the same."""

    def __init__(
        self, program: Program, strands: Strands, workers: Workers, layout: CustomLayout, cut: BatchCut | None
    ) -> None:
        self._program, self._strands, self._workers, self._cut = program, strands, workers, cut
        self._parts, self._watch = ShareParts(program, workers, layout, cut), ModelWatch(program)
        self._taken = 0
        self.spans = SpanLog()

    def take(self, batch: Any, place: StepPlace, rate_factor: float) -> tuple[list[Tensor], float]:
        """A step with this worker's share of a batch: the global mean of each loss (0-dim, float64), and the seconds
        that this worker computed for their gradients, without waiting for others."""
        agree = self._workers.announce("run.step", place.batch)
        place = replace(place, agree=agree)
        if self._taken == 0 or self._parts.waits_within:
            agree()  # else while the backward pass goes on
        if self._taken == 0:
            self._check_losses(batch)
        self._watch.look(self._strands, self._taken)
        micros = self._parts.of_share(batch)
        means, own_s = list[Tensor](), 0.0
        for index in range(len(self._program.losses)):
            sums = sum_gradients(self._program, self._strands, self._workers, index, micros, place)
            own_s += sums.own_s
            means.append(update_weights(self._program, self._strands, index, sums, rate_factor))
            began, computed, summed = sums.moments
            self.spans.add("forward and backward", place.step, began, computed)
            self.spans.add("wait for sums", place.step, computed, summed)
            self.spans.add("update", place.step, summed, time.perf_counter())
        for scheduler in self._program.schedulers:
            scheduler.step()
        self._taken += 1
        return means, own_s

    def _check_losses(self, batch: Any) -> None:
        """Before the first step: whether losses are sums. All workers look, or none, as models may wait for each
        other."""
        few = torch.tensor([int(examples_to_check(batch, self._cut) < 2)])
        if int(self._workers.sums.largest(few)) == 0:
            self._strands.settle()
            for index in range(len(self._program.losses)):
                check_additive(self._program, index, batch, self._cut)
