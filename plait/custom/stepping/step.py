"""One step of a program on this worker: what is looked at before it, all its losses, and their updates."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plait.checked_json import one_line
from plait.custom.arithmetic.library import ProductLibrary
from plait.custom.cutting import BatchCut
from plait.custom.gathering import Gathering
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.stepping.additive import check_additive, examples_to_check, is_copied
from plait.custom.stepping.gradients import GlobalSums, StepPlace, TimedOrNot, divisor_of, sum_gradients
from plait.custom.stepping.loss_scale import LossScale
from plait.custom.stepping.parts import ShareParts
from plait.custom.stepping.timeline import SpanLog
from plait.custom.stepping.unchanged import ModelWatch
from plait.custom.stepping.update import update_weights
from plait.custom.strands.description import CustomLayout
from plait.custom.strands.program_strands import Strands
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
        gathering: Gathering,
    ) -> None:
        self._program, self._strands, self._workers, self._cut = program, strands, workers, cut
        self._library, self._gathering = library, gathering
        self._parts, self._watch = ShareParts(program, workers, layout, cut), ModelWatch(program, workers)
        self._taken = 0
        self.divisors: dict[int, Tensor] = {}
        """Of each loss of one term the last global count (0-dim, float64), by which the next step's gradients are
        divided first; of others, and before a loss's first step, it is not known."""
        self._terms: dict[int, int] = {}
        """Of each loss that has taken a step the number of its terms."""
        self.scale = LossScale()
        self.spans = SpanLog()

    def take(
        self,
        batch: Any,
        *,
        step: int,
        number: int,
        clock: TimedOrNot,
        rate_factor: float,
        losses: Sequence[int],
    ) -> tuple[list[Tensor], float]:
        """A step, of this number, with this worker's share of a batch, the `number`th that it was given: the global
        mean of each of these losses (0-dim, float64), and the seconds that this worker computed for their gradients,
        without waiting for others."""
        place = StepPlace(step=step, batch=number, clock=clock, waited_s=lambda: self._gathering.waited_s)
        with self._library.step(step):
            return self._take(batch, place, rate_factor, losses)

    def _take(
        self, batch: Any, place: StepPlace, rate_factor: float, losses: Sequence[int]
    ) -> tuple[list[Tensor], float]:
        agree = self._workers.announce("run.step", place.batch)
        place = replace(place, agree=agree)
        if self._taken == 0 or self._parts.waits_within:
            agree()  # else while the backward pass goes on
        if self._taken == 0:
            self._check_losses(batch)
        self._watch.look(self._strands, self._taken)
        micros = self._parts.of_share(batch)
        means, own_s, ended = list[Tensor](), 0.0, dict[int, Literal["finite", "skipped"]]()
        for index in losses:
            sums = self._sum_gradients(index, micros, self._place_of(index, place), batch)
            own_s += sums.own_s
            means.append(sums.mean)
            ended[index] = update_weights(self._program, self._strands, index, sums, rate_factor, place.step)
            self._terms[index] = len(sums.counts)
            if len(sums.counts) == 1 and self._program.precision != "fp16":
                self.divisors[index] = divisor_of(sums.counts[0])
            began, computed, summed = sums.moments
            self.spans.add("forward and backward", place.step, began, computed)
            self.spans.add("wait for sums", place.step, computed, summed)
            self.spans.add("update", place.step, summed, time.perf_counter())
        self._move_on(ended)
        return means, own_s

    def _place_of(self, index: int, place: StepPlace) -> StepPlace:
        """How gradients of this loss are divided. Those of float16 are scaled before they are anything else, and would
        not be finite as a sum over the batch."""
        scale = self.scale.factor if self._program.precision == "fp16" else 1.0
        divisor = self.divisors.get(index)
        of = "counted mean" if divisor is None else "mean"
        return replace(place, gradients_of=of, divisor=divisor, loss_scale=scale, terms=self._terms.get(index))

    def _move_on(self, ended: Mapping[int, Literal["finite", "skipped"]]) -> None:
        """Step the schedulers of the optimizers that have updated, and the scale of float16's gradients."""
        updated = {
            id(optimizer)
            for index, how in ended.items()
            for optimizer in self._program.optimizers_of(index)
            if how == "finite"
        }
        for scheduler in self._program.schedulers:
            # What waits for a number, as ReduceLROnPlateau, is the program's own to step.
            if not isinstance(scheduler, ReduceLROnPlateau) and _is_of(scheduler, updated):
                scheduler.step()
        if self._program.precision == "fp16":
            self.scale.note("skipped" if "skipped" in ended.values() else "finite")
        self._taken += 1

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

    def progress(self) -> dict[str, Any]:
        """What a resume needs, as JSON: so that the next step rounds as it would here."""
        divisors = {str(index): float(divisor) for index, divisor in self.divisors.items()}
        return {"divisors": divisors, "loss_scale": self.scale.saved()}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on as a saved run would have."""
        device = self._workers.device
        self.divisors = {
            int(index): torch.tensor(one, dtype=torch.float64, device=device)
            for index, one in progress["divisors"].items()
        }
        self.scale.resume(progress["loss_scale"])

    def _check_losses(self, batch: Any) -> None:
        """Before the first step: whether losses are sums. All workers look, or none, as models may wait for each
        other."""
        if self._program.additive == "no":
            return
        few = torch.tensor([int(examples_to_check(batch, self._cut) < 2)])
        if int(self._workers.sums.largest(few)) == 0:
            cut_up = bool(self._program.skeletons) and is_copied(self._program)
            weights = self._strands.full_weights() if cut_up else None
            for index in range(len(self._program.losses)):
                check_additive(self._program, index, batch, self._cut, weights)


def _is_of(scheduler: Any, optimizers: Collection[int]) -> bool:
    """Whether a scheduler moves one of these optimizers (by id), or does not say whose it is."""
    return id(getattr(scheduler, "optimizer", None)) in optimizers or not hasattr(scheduler, "optimizer")
