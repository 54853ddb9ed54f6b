"""Forward and backward of this worker's share of a batch, and the global sums of losses, counts and gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.custom.exact_norm.batch_norm import norm_waits_s
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.strands.description import Strands
from plait.errors import PlaitError

EXACT_DIVISORS = (torch.float32, torch.float64)
"""Losses whose gradients can be divided where they begin: in 16 bits the factor would be rounded, for all alike."""

TimedOrNot = Literal["timed", "untimed"]
"""Whether the time of forward and backward is wanted, for which a GPU is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Where in a program a step is: its number, and that of the batch that this worker last took."""

    step: int
    batch: int
    clock: TimedOrNot = "untimed"
    gradients_of: Literal["sum", "mean"] = "sum"
    """Whether gradients are divided by the global count, as far as it is known, where they begin, at the loss: then
    none need be multiplied afterwards."""
    divisor: Tensor | None = None
    """The last step's global count (0-dim, float64, the same on all workers), which this step's may be."""
    agree: Callable[[], None] = lambda: None
    """Called before the first sum; raises PlaitError where workers are not at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalSums:
    """Sums over all workers: losses and counts [2, float64], and which parameters any of them reached. `own_s` is how
    long this worker's own forward and backward took, without waiting for others."""

    total: Tensor
    reached: tuple[bool, ...]
    own_s: float
    divisor: Tensor
    """What the gradients have been divided by, 0-dim, float64."""
    moments: tuple[float, float, float]
    """By time.perf_counter: the beginning, the end of the backward pass, and when the sums were there."""


def sum_gradients(
    program: Program, strands: Strands, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> GlobalSums:
    """Run all parts of a batch through one loss; then the gradients are global sums, divided by `GlobalSums.divisor`.

    Every worker must call it; blocks. Raises PlaitError where the loss depends on no weight that is trained.
    """
    strands.open(index)
    began, waited_s = time.perf_counter(), _waits_s(program, place)
    own, divisor = run_backward(program, strands, workers, index, micros, place)
    if place.clock == "timed" and own.device.type == "cuda":
        torch.cuda.synchronize(own.device)
    computed = time.perf_counter()
    own_s = strands.own_seconds(computed - began - (_waits_s(program, place) - waited_s))
    reached = strands.reached(index)
    parameters = len(reached)
    place.agree()
    on_processor = own.device.type == "cpu"
    told = workers.sums(torch.cat([reached, own]) if on_processor else reached)
    by_anybody = tuple(count > 0 for count in told[:parameters].tolist())
    strands.close(index, by_anybody)
    # Behind the buckets, whose order on a GPU must be the same on all ranks.
    total, undivided = (told[parameters:] if on_processor else workers.sums(own)).split([2, 1])
    divisor = torch.where(undivided[0] > 0, torch.ones_like(divisor), divisor)  # of a worker without examples
    moments = (began, computed, time.perf_counter())
    return GlobalSums(total=total, reached=by_anybody, own_s=own_s, divisor=divisor, moments=moments)


def run_backward(
    program: Program, strands: Strands, workers: Workers, index: int, micros: Sequence[Any], place: StepPlace
) -> tuple[Tensor, Tensor]:
    """Forward and backward of this worker's parts, of which there may be none; returns its own [sum of losses, count,
    1 where gradients could not be divided] and what they were divided by, in float64."""
    own = torch.zeros(3, dtype=torch.float64, device=workers.device)
    whole = torch.ones((), dtype=torch.float64, device=workers.device)
    foreseen = place.divisor if place.gradients_of == "mean" and place.divisor is not None else whole
    divisor = foreseen
    # Of several losses each gives gradients to the weights of its own optimizer alone.
    inputs = list(program.trained_by(index).values()) if len(program.optimizers) > 1 else None
    for number, micro in enumerate(micros):
        seed_everything(seed_from("step", program.seed, place.step, index, number, workers.rank))
        strands.next_pass(index)
        total, count = _loss_sum(program, index, micro)
        if not total.requires_grad:
            raise PlaitError(
                "the loss does not depend on a weight that is trained; compute it from the model's output, outside of "
                "torch.no_grad and without .item()"
            )
        if number == len(micros) - 1:
            strands.arm(index)
        if total.dtype not in EXACT_DIVISORS:
            own[2], divisor = 1, whole
        elif place.gradients_of == "mean" and workers.size == 1 == len(micros):
            divisor = divisor_of(count)
        summed = total.detach().to(torch.float64)
        nothing = (count == 0) & ~summed.isfinite()  # a mean over no example, times their number
        own[:2] += torch.stack([torch.where(nothing, torch.zeros_like(summed), summed), count])
        _backward(total, divisor.reciprocal().to(total.dtype), inputs)
    return own, divisor


def _backward(total: Tensor, scale: Tensor, inputs: list[nn.Parameter] | None) -> None:
    try:
        torch.autograd.backward(total, scale, inputs=inputs)
    except RuntimeError as error:
        if "setStorage" not in str(error):
            raise
        raise PlaitError(
            'layout "shard parameters" gives weights up after their first backward pass, and this loss differentiates '
            'twice (create_graph=True); take "shard optimizer"'
        ) from error


def divisor_of(count: Tensor) -> Tensor:
    """A global count (0-dim) as a divisor: 1 where nothing was counted; counts may be weights far below 1."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _waits_s(program: Program, place: StepPlace) -> float:
    """Seconds that norms over all workers have waited for others so far, where a step is timed."""
    return norm_waits_s(program.models) if place.clock == "timed" else 0.0


def _loss_sum(program: Program, index: int, micro: Any) -> tuple[Tensor, Tensor]:
    try:
        return program.loss_sum(index, micro)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise PlaitError(
            'layout "shard parameters" gathers weights where a module is called, and the loss uses one without a '
            'call of the whole model; call model(…), or take "shard optimizer"'
        ) from error
