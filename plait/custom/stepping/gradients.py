"""Forward and backward of this worker's share of a batch, and the global sums of losses, counts and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plait.custom.data.moving import cloned
from plait.custom.exact_norm.batch_norm import norm_waits_s
from plait.custom.group import Workers
from plait.custom.program import LossTerms, Program
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.strands.program_strands import Strands
from plait.errors import PlaitError

EXACT_DIVISORS = (torch.float32, torch.float64)
"""Losses whose gradients can be divided where they begin: in 16 bits the factor would be rounded, for all alike."""

_UNLIKE_TERMS = (
    "the number of pairs (sum, count) that loss_sum returns is {} here and {} elsewhere; return as many in every step "
    "and for any part of a batch, with a count of 0 where there is nothing"
)

TimedOrNot = Literal["timed", "untimed"]
"""Whether the time of forward and backward is wanted, for which a GPU is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Where in a program a step is: its number, and that of the batch that this worker last took."""

    step: int
    batch: int
    clock: TimedOrNot = "untimed"
    gradients_of: Literal["sum", "mean", "counted mean"] = "sum"
    """Whether gradients are divided where they begin, at the loss: by the global count as far as it is known ("mean"),
    then none need be multiplied afterwards, or by each term's own count, which all workers find first."""
    divisor: Tensor | None = None
    """The last step's global count (0-dim, float64, the same on all workers), which this step's may be."""
    terms: int | None = None
    """How many terms this loss has had so far; None before its first step."""
    loss_scale: float = 1.0
    """What gradients are multiplied by where they begin: LossScale."""
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
    """What gradients are yet to be multiplied by, to be those of the mean: 0-dim, float64."""
    moments: tuple[float, float, float]
    """By time.perf_counter: the beginning, the end of the backward pass, and when the sums were there."""

    @property
    def mean(self) -> Tensor:
        """The loss of the whole batch, 0-dim: the sum of all terms, each divided by its count."""
        return (self.losses / divisor_of(self.counts)).sum()


def sum_gradients(
    program: Program, strands: Strands, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> GlobalSums:
    """Run all parts of a batch through one loss; then the gradients are global sums, and times `GlobalSums.rest` those
    of the mean.

    Every worker must call it; blocks. Raises PlaitError where the loss depends on no weight that is trained.
    """
    strands.open(index)
    began, waited_s = time.perf_counter(), _waits_s(program, place)
    counted = place.gradients_of == "counted mean"
    run = _run_counted if counted else _run_backward
    own = run(program, strands, workers, index, micros, place)
    if place.clock == "timed" and own.sums.device.type == "cuda":
        torch.cuda.synchronize(own.sums.device)
    computed = time.perf_counter()
    own_s = strands.own_seconds(computed - began - own.waited_s - (_waits_s(program, place) - waited_s))
    reached = strands.reached(index)
    parameters = len(reached)
    place.agree()
    on_processor = own.sums.device.type == "cpu"
    told = workers.sums(torch.cat([reached, own.sums]) if on_processor else reached)
    by_anybody = tuple(count > 0 for count in told[:parameters].tolist())
    strands.close(index, by_anybody)
    # Behind the buckets, whose order on a GPU must be the same on all ranks.
    summed = told[parameters:] if on_processor else workers.sums(own.sums)
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


def _run_backward(
    program: Program, strands: Strands, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> _OwnSums:
    """Forward and backward of this worker's parts, of which there may be none; several terms are summed undivided."""
    whole = torch.ones((), dtype=torch.float64, device=workers.device)
    divisor = place.divisor if place.gradients_of == "mean" and place.divisor is not None else whole
    sums, undivided = torch.zeros(2, 1, dtype=torch.float64, device=workers.device), torch.zeros_like(whole)
    for number, micro in enumerate(micros):
        terms = _terms(program, strands, workers, index, micro, number, place)
        if number == len(micros) - 1:
            strands.arm(index)
        if any(total.dtype not in EXACT_DIVISORS for total in terms.totals):
            undivided, divisor = whole, whole
        elif place.gradients_of == "mean" and workers.size == 1 == len(micros):
            divisor = divisor_of(terms.counts[0])
        sums = sums + _counted_sums(terms)
        _backward(program, index, terms, divisor.reciprocal().expand(len(terms.totals)) * place.loss_scale)
    if place.gradients_of == "sum":
        sums = _with_terms(sums, micros, workers)
    return _OwnSums(sums=torch.cat([sums.reshape(-1), undivided.reshape(1)]), divisor=divisor)


def _run_counted(
    program: Program, strands: Strands, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> _OwnSums:
    """The same where all workers find each term's global count first: of several parts by a forward pass without
    gradients, of one by its own."""
    one = torch.ones((), dtype=torch.float64, device=workers.device)
    own: list[LossTerms] = []

    def count(parts: Sequence[Any]) -> list[LossTerms]:
        with torch.no_grad(), program.buffers_kept():
            return [_terms(program, strands, workers, index, cloned(m), k, place) for k, m in enumerate(parts)]

    place.agree()
    if program.accumulate == 1:
        own = [_terms(program, strands, workers, index, m, k, place) for k, m in enumerate(micros)]
    elif place.terms is None and program.precision != "fp16" and _most_terms(count(micros[:1]), workers) == 1:
        return _run_backward(program, strands, workers, index, micros, place)  # one term needs no count before
    else:
        own = count(micros)
    sums = torch.zeros(2, 1, dtype=torch.float64, device=workers.device)
    if len({len(terms.totals) for terms in own}) > 1:
        raise PlaitError(_UNLIKE_TERMS.format(len(own[0].totals), len(own[-1].totals)))
    if own:
        sums = torch.stack([_counted_sums(terms) for terms in own]).sum(0)
    began = time.perf_counter()
    sums = _with_terms(sums, micros, workers)
    counts = divisor_of(workers.sums(sums[1].clone()))
    waited_s = time.perf_counter() - began
    scales, divisor, undivided = counts.reciprocal() * place.loss_scale, counts[0], one * 0
    if len(counts) == 1 and program.precision != "fp16" and any(t.totals[0].dtype not in EXACT_DIVISORS for t in own):
        scales, divisor, undivided = torch.ones_like(counts), one, one
    for number, micro in enumerate(micros):
        again = program.accumulate > 1
        terms = _terms(program, strands, workers, index, micro, number, place) if again else own[number]
        if number == len(micros) - 1:
            strands.arm(index)
        _backward(program, index, terms, scales)
    return _OwnSums(sums=torch.cat([sums.reshape(-1), undivided.reshape(1)]), divisor=divisor, waited_s=waited_s)


def _most_terms(own: Sequence[LossTerms], workers: Workers) -> int:
    """How many terms the loss has on any worker."""
    return int(workers.sums.largest(torch.tensor([max((len(terms.totals) for terms in own), default=1)])))


def _with_terms(sums: Tensor, micros: Sequence[Any], workers: Workers) -> Tensor:
    """Sums and counts [2, terms] of as many terms as others have: a worker without examples has seen none. Raises
    PlaitError where it has seen others."""
    terms = int(workers.sums.largest(torch.tensor([sums.shape[1]])))
    if micros and sums.shape[1] != terms:
        raise PlaitError(_UNLIKE_TERMS.format(sums.shape[1], terms))
    return sums if micros else torch.zeros(2, terms, dtype=sums.dtype, device=sums.device)


def _terms(
    program: Program, strands: Strands, workers: Workers, index: int, micro: Any, number: int, place: StepPlace
) -> LossTerms:
    """The loss of a part, with what is random in it drawn by its place."""
    seed_everything(seed_from("step", program.seed, place.step, index, number, workers.rank))
    strands.next_pass(index)
    terms = _loss_sum(program, index, micro)
    if torch.is_grad_enabled() and not any(total.requires_grad for total in terms.totals):
        raise PlaitError(
            "the loss does not depend on a weight that is trained; compute it from the model's output, outside of "
            "torch.no_grad and without .item()"
        )
    if place.terms is not None and len(terms.totals) != place.terms:
        raise PlaitError(_UNLIKE_TERMS.format(len(terms.totals), place.terms))
    return terms


def _counted_sums(terms: LossTerms) -> Tensor:
    """Sums and counts [2, terms]; a mean over no example, times their number, is 0."""
    summed = terms.sums
    nothing = (terms.counts == 0) & ~summed.isfinite()
    return torch.stack([torch.where(nothing, torch.zeros_like(summed), summed), terms.counts])


def _backward(program: Program, index: int, terms: LossTerms, scales: Tensor) -> None:
    """Backward of all terms, each times its scale."""
    # Of several losses each gives gradients to the weights of its own optimizer alone.
    inputs = list(program.trained_by(index).values()) if len(program.losses) > 1 else None
    learn = [(total, scale) for total, scale in zip(terms.totals, scales, strict=True) if total.requires_grad]
    try:
        torch.autograd.backward(
            [total for total, _ in learn], [scale.to(total.dtype) for total, scale in learn], inputs=inputs
        )
    except RuntimeError as error:
        if "setStorage" not in str(error):
            raise
        raise PlaitError(
            'layout "shard parameters" gives weights up after their first backward pass, and this loss differentiates '
            'twice (create_graph=True); take "shard optimizer"'
        ) from error


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
