"""One step of a program on this worker: what is looked at before it, all its losses, and their updates."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plait.checked_json import one_line
from plait.custom.arithmetic.library import ProductLibrary
from plait.custom.cutting import BatchCut
from plait.custom.gathering import Gathering
from plait.custom.group import Workers
from plait.custom.layouts.description import CustomLayout
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.program import Program
from plait.custom.stepping.additive import check_additive, examples_to_check, is_copied
from plait.custom.stepping.gradients import GlobalSums, StepPlace, TimedOrNot
from plait.custom.stepping.loss_scale import LossScale
from plait.custom.stepping.loss_steps import LossSteps
from plait.custom.stepping.parts import ShareParts
from plait.custom.stepping.timeline import SpanLog
from plait.custom.stepping.unchanged import ModelWatch
from plait.custom.stepping.update import UpdateEnd
from plait.errors import PlaitError
from plait.parallel.exchange import agree_on_any
from plait.parallel.watched import WATCH


class StepTaker:
    """Takes the steps of a program: all of its losses one after the other, each with its update."""

    def __init__(
        self,
        program: Program,
        parallel: ParallelProgram,
        workers: Workers,
        layout: CustomLayout,
        cut: BatchCut | None,
        library: ProductLibrary,
        gathering: Gathering,
    ) -> None:
        self._program, self._parallel, self._workers, self._cut = program, parallel, workers, cut
        self._library, self._gathering = library, gathering
        self._parts, self._watch = ShareParts(program, workers, layout, cut), ModelWatch(program, workers)
        self._taken = 0
        self.scale = LossScale()
        self._losses = LossSteps(program, parallel, workers, self.scale)
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
        """Take the step of number `step` with this worker's share of a batch, its `number`th, by the losses of these
        numbers; learning rates are multiplied by `rate_factor`.

        Returns the global mean of each loss (0-dim, float64), and the seconds that this worker computed for their
        gradients, without those in which it waited for others. Every worker must call it; blocks.
        """
        agree = self._workers.announce("run.step", number)
        place = StepPlace(step=step, batch=number, clock=clock, agree=agree, waited_s=lambda: self._gathering.waited_s)
        with self._library.step(step):
            return self._take(batch, place, rate_factor, losses)

    def _take(
        self, batch: Any, place: StepPlace, rate_factor: float, losses: Sequence[int]
    ) -> tuple[list[Tensor], float]:
        if self._taken == 0 or self._parts.waits_within:
            place.agree()  # else while the backward pass goes on
        if self._taken == 0:
            self._check_losses(batch)
        self._watch.look(self._parallel, self._taken)
        micros = self._parts.of_share(batch)
        means, own_s, ended = list[Tensor](), 0.0, dict[int, UpdateEnd]()
        for index in losses:
            sums = self._sum_gradients(index, micros, place, batch)
            with WATCH.work("update"):
                ended[index] = self._losses.update(index, sums, place, rate_factor)
            own_s += sums.own_s
            means.append(sums.mean)
            began, computed, summed = sums.moments
            self.spans.add("forward and backward", place.step, began, computed)
            self.spans.add("wait for sums", place.step, computed, summed)
            self.spans.add("update", place.step, summed, time.perf_counter())
        self._move_on(ended)
        return means, own_s

    def _move_on(self, ended: Mapping[int, UpdateEnd]) -> None:
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
            return self._losses.sum(index, micros, place)
        except RuntimeError as error:
            if not self._parts.is_empty(batch):
                raise
            raise PlaitError(
                f"the last batch of a pass has fewer examples than workers, and the model cannot run on none of them "
                f'({one_line(str(error))}); take last="drop", or fewer workers'
            ) from error

    def progress(self) -> dict[str, Any]:
        """The values that a resume needs, as JSON, so that the next step rounds in the same way."""
        return {"divisors": self._losses.saved(), "loss_scale": self.scale.saved()}

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on as a saved run would have."""
        self._losses.resume(progress["divisors"])
        self.scale.resume(progress["loss_scale"])

    def _check_losses(self, batch: Any) -> None:
        """Raise PlaitError where a loss is no sum over examples; before the first step. All workers look or none, as
        their models may wait for each other."""
        if self._program.additive == "no":
            return
        if agree_on_any(self._workers.sums, examples_to_check(batch, self._cut) < 2):
            return
        cut_up = bool(self._program.skeletons) and is_copied(self._program)
        weights = self._parallel.full_weights() if cut_up else None
        for index in range(len(self._program.losses)):
            check_additive(self._program, index, batch, self._cut, weights)


def _is_of(scheduler: Any, optimizers: Collection[int]) -> bool:
    """Whether a scheduler moves one of these optimizers (by id), or does not say whose it is."""
    return id(getattr(scheduler, "optimizer", None)) in optimizers or not hasattr(scheduler, "optimizer")
