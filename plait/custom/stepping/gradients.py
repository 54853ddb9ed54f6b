"""Forward and backward of this worker's share of a batch, and the global sums of losses, counts and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plait.accelerator import synchronize
from plait.custom.exact_norm.batch_norm import norm_waits_s
from plait.custom.group import Workers
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.program import LossTerms, Program
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.structure import cloned
from plait.errors import PlaitError
from plait.parallel.watched import WATCH

_UNLIKE_TERMS = (
    "the number of pairs (sum, count) that loss_sum returns is {} here and {} elsewhere; return as many in every step "
    "and for any part of a batch, with a count of 0 where there is nothing"
)

TimedOrNot = Literal["timed", "untimed"]
"""Whether the time of forward and backward is wanted, for which a GPU is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """The position of a step in a program: its number, and that of the batch that this worker last took."""

    step: int
    batch: int
    clock: TimedOrNot = "untimed"
    divided_by: Tensor | Literal["nothing", "own counts"] = "nothing"
    """By what gradients are divided where they begin, at the loss: by nothing, so that they are sums; by the last
    step's global count (0-dim, float64, the same on all workers), which this one's may be, and then none need be
    multiplied afterwards; or by each term's own count, which all workers find first."""
    terms: int | None = None
    """How many terms this loss has had so far; None before its first step."""
    loss_scale: float = 1.0
    """The initial factor of gradients: LossScale."""
    agree: Callable[[], None] = lambda: None
    """Called before the first sum; raises PlaitError where workers are not at the same place."""
    waited_s: Callable[[], float] = lambda: 0.0
    """Seconds that this worker's passes have waited for others so far, for what a loss gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSums:
    """Sums over all workers: losses and counts, each [terms] and float64, and which parameters any of them reached.
    `own_s` is how long this worker's own forward and backward took, without waiting for others."""

    losses: Tensor
    counts: Tensor
    reached: tuple[bool, ...]
    own_s: float
    rest: Tensor
    """The remaining factor that turns gradients into those of the mean: 0-dim, float64."""
    moments: tuple[float, float, float]
    """By time.perf_counter: the beginning, the end of the backward pass, and when the sums were there."""

    @property
    def mean(self) -> Tensor:
        """The loss of the whole batch, 0-dim: the sum of all terms, each divided by its count."""
        return (self.losses / divisor_of(self.counts)).sum()


def sum_gradients(
    program: Program, parallel: ParallelProgram, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> GlobalSums:
    """Run all parts of a batch through one loss; then the gradients are global sums, and times `GlobalSums.rest` those
    of the mean.

    Every worker must call it; blocks. Raises PlaitError where the loss depends on no weight that is trained.
    """
    parallel.open(index)
    began, waited_s = time.perf_counter(), _waits_s(program, place)
    passes = _LossPasses(program=program, parallel=parallel, workers=workers, index=index, place=place)
    own = passes.run_counted(micros) if place.divided_by == "own counts" else passes.run(micros)
    if place.clock == "timed":
        synchronize(own.sums.device)
    computed = time.perf_counter()
    own_s = parallel.own_seconds(computed - began - own.waited_s - (_waits_s(program, place) - waited_s))
    reached = parallel.reached(index)
    parameters = len(reached)
    workers.order.end()
    place.agree()
    on_processor = own.sums.device.type == "cpu"
    all_sums = workers.sums(torch.cat([reached, own.sums]) if on_processor else reached)
    reach_counts = all_sums[:parameters].tolist()
    parallel.check_reached(index, reach_counts)
    by_anybody = tuple(count > 0 for count in reach_counts)
    with WATCH.work("gradients"):
        parallel.close(index, by_anybody)
    # Behind the buckets, whose order on a GPU must be the same on all ranks.
    summed = all_sums[parameters:] if on_processor else workers.sums(own.sums)
    losses, counts, undivided = summed.split([(len(summed) - 1) // 2, (len(summed) - 1) // 2, 1])
    divisor = torch.where(undivided[0] > 0, torch.ones_like(own.divisor), own.divisor)  # of a worker without examples
    rest = divisor / divisor_of(counts[0])
    moments = (began, computed, time.perf_counter())
    return GlobalSums(
        losses=losses, counts=counts, reached=by_anybody, own_s=own_s, rest=rest / place.loss_scale, moments=moments
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnSums:
    """Of this worker's parts: sums of losses, counts, and 1 where gradients could not be divided [2 terms + 1], what
    gradients were divided by (0-dim; of several terms the first one's), both float64, and the seconds spent in waiting
    for others' counts."""

    sums: Tensor
    divisor: Tensor
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossPasses:
    """Forward and backward passes of one loss in one step on this worker, a pass for each part of its share."""

    program: Program
    parallel: ParallelProgram
    workers: Workers
    index: int
    place: StepPlace

    def run(self, micros: Sequence[Any]) -> _OwnSums:
        """Run all parts, of which there may be none; several terms are summed undivided."""
        one, divided_by = self._zeros() + 1, self.place.divided_by
        divisor = divided_by if isinstance(divided_by, Tensor) else one
        sums, undivided = self._zeros(2, 1), self._zeros()
        for number, micro in enumerate(micros):
            terms = self._forward(number, micro)
            if _are_narrow(terms):
                divisor, undivided = one, one
            elif isinstance(divided_by, Tensor) and self.workers.size == 1 == len(micros):
                divisor = divisor_of(terms.counts[0])
            sums = sums + _counted_sums(terms)
            scales = divisor.reciprocal().expand(len(terms.totals)) * self.place.loss_scale
            self._backward(terms, scales, number, is_last=number == len(micros) - 1)
        if divided_by == "nothing":
            sums = self._of_all_terms(sums, micros)
        return _OwnSums(sums=torch.cat([sums.reshape(-1), undivided.reshape(1)]), divisor=divisor)

    def run_counted(self, micros: Sequence[Any]) -> _OwnSums:
        """Run all parts once the workers know each term's global count, from this share's own forward pass where it is
        one part, else from forward passes without gradients before."""
        self.place.agree()
        runs_again, scaled = self.program.accumulate > 1, self.program.precision == "fp16"
        if runs_again and self.place.terms is None and not scaled and self._most_terms(micros) == 1:
            return self.run(micros)  # the mean of one term can be had from its sum
        found = self._without_gradients(micros) if runs_again else [self._forward(k, m) for k, m in enumerate(micros)]
        if len({len(terms.totals) for terms in found}) > 1:
            raise PlaitError(_UNLIKE_TERMS.format(len(found[0].totals), len(found[-1].totals)))
        own = torch.stack([_counted_sums(terms) for terms in found]).sum(0) if found else self._zeros(2, 1)

        began = time.perf_counter()
        sums = self._of_all_terms(own, micros)
        counts = divisor_of(self.workers.sums(sums[1].clone()))
        waited_s = time.perf_counter() - began

        scales, divisor, undivided = counts.reciprocal() * self.place.loss_scale, counts[0], self._zeros()
        if len(counts) == 1 and not scaled and any(map(_are_narrow, found)):
            scales, divisor, undivided = torch.ones_like(counts), self._zeros() + 1, self._zeros() + 1
        for number, micro in enumerate(micros):
            terms = self._forward(number, micro) if runs_again else found[number]
            self._backward(terms, scales, number, is_last=number == len(micros) - 1)
        sums = torch.cat([sums.reshape(-1), undivided.reshape(1)])
        return _OwnSums(sums=sums, divisor=divisor, waited_s=waited_s)

    def _forward(self, number: int, micro: Any) -> LossTerms:
        """The loss of a part, with what is random in it drawn by its place."""
        place = self.place
        seed_everything(seed_from("step", self.program.seed, place.step, self.index, number, self.workers.rank))
        self.parallel.next_pass(self.index)
        with WATCH.work("forward", micro=number):
            terms = _loss_sum(self.program, self.index, micro)
        if torch.is_grad_enabled() and not any(total.requires_grad for total in terms.totals):
            raise PlaitError(
                "the loss does not depend on a weight that is trained; compute it from the model's output, outside of "
                "torch.no_grad and without .item()"
            )
        if place.terms is not None and len(terms.totals) != place.terms:
            raise PlaitError(_UNLIKE_TERMS.format(len(terms.totals), place.terms))
        return terms

    def _without_gradients(self, micros: Sequence[Any]) -> list[LossTerms]:
        """The losses of parts that run again later."""
        with torch.no_grad(), self.program.buffers_kept():
            return [self._forward(number, cloned(micro)) for number, micro in enumerate(micros)]

    def _backward(self, terms: LossTerms, scales: Tensor, number: int, *, is_last: bool) -> None:
        """Backward of all terms of the part of this number, each times its scale."""
        if is_last:
            self.parallel.arm(self.index)
        # With several losses, each gives gradients only to its own optimizer's weights.
        several = len(self.program.losses) > 1
        inputs = list(self.program.trained_by(self.index).values()) if several else None
        learn = [(total, scale) for total, scale in zip(terms.totals, scales, strict=True) if total.requires_grad]
        try:
            with WATCH.work("backward", micro=number):
                torch.autograd.backward(
                    [total for total, _ in learn], [scale.to(total.dtype) for total, scale in learn], inputs=inputs
                )
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise PlaitError(
                'layout "shard parameters" gives weights up after their first backward pass, and this loss '
                'differentiates twice (create_graph=True); take "shard optimizer"'
            ) from error

    def _most_terms(self, micros: Sequence[Any]) -> int:
        """How many terms the loss of a first part has on any worker."""
        own = [len(terms.totals) for terms in self._without_gradients(micros[:1])]
        self.workers.order.end()
        return int(self.workers.sums.largest(torch.tensor([max(own, default=1)])))

    def _of_all_terms(self, sums: Tensor, micros: Sequence[Any]) -> Tensor:
        """Sums and counts [2, terms] of as many terms as others have: a worker without examples has seen none. Raises
        PlaitError where it has seen others."""
        self.workers.order.end()
        terms = int(self.workers.sums.largest(torch.tensor([sums.shape[1]])))
        if micros and sums.shape[1] != terms:
            raise PlaitError(_UNLIKE_TERMS.format(sums.shape[1], terms))
        return sums if micros else self._zeros(2, terms)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.workers.device)


def _are_narrow(terms: LossTerms) -> bool:
    """Whether gradients cannot be divided where they begin: the factor would be rounded, for all of them alike."""
    return any(total.dtype not in (torch.float32, torch.float64) for total in terms.totals)


def _counted_sums(terms: LossTerms) -> Tensor:
    """Sums and counts [2, terms]; a mean over no example, times their number, is 0."""
    summed = terms.sums
    nothing = (terms.counts == 0) & ~summed.isfinite()
    return torch.stack([torch.where(nothing, torch.zeros_like(summed), summed), terms.counts])


def divisor_of(count: Tensor) -> Tensor:
    """Global counts as divisors: 1 where nothing was counted; counts may be weights far below 1."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _waits_s(program: Program, place: StepPlace) -> float:
    """Seconds that norms over all workers, and what losses gather, have waited so far, where a step is timed."""
    return norm_waits_s(program.models) + place.waited_s() if place.clock == "timed" else 0.0


def _loss_sum(program: Program, index: int, micro: Any) -> LossTerms:
    try:
        return program.loss_sum(index, micro)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise PlaitError(
            'layout "shard parameters" gathers weights where a module is called, and the loss uses one without a '
            'call of the whole model; call model(…), or take "shard optimizer"'
        ) from error
