"""One forward and backward pass of every loss of a program: on one process, or spread over the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.custom.exact_norm.batch_norm import GlobalBatchNorm, StatisticsOf
from plait.custom.gathering import gathering_nothing
from plait.custom.group import Workers
from plait.custom.layouts.choose import parallelize_program
from plait.custom.layouts.description import CustomLayout, LayoutChoices
from plait.custom.program import Program
from plait.custom.stepping.fused import fuse_updates
from plait.custom.stepping.gradients import StepPlace, divisor_of, sum_gradients
from plait.custom.stepping.loss_scale import LossScale
from plait.custom.stepping.loss_steps import LossSteps
from plait.custom.structure import cloned
from plait.custom.verifying.observed import Observations, WithoutDropout, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a program's losses, and observations on the way."""

    sums: Tensor
    """Float64, flat: of each loss the sums of its terms, then their counts, over the whole batch."""
    gradients: Mapping[str, Tensor]
    """The gradients of those sums, by parameter; those that no loss reached are missing on one process and zero on
    several."""
    buffers: Mapping[str, Tensor]
    seen: Observations
    narrow_losses: tuple[str, ...] = ()
    """Names of the losses that were not float64."""


def run_alone(program: Program, shares: Sequence[Any]) -> Outcome:
    """Run all shares in this process, one after the other, without any other worker."""
    set_statistics(program, "this worker")
    gradients: dict[str, Tensor] = {}
    sums: list[Tensor] = []
    narrow: list[str] = []
    with observe(program) as seen, gathering_nothing():
        for index, loss in enumerate(program.losses):
            of_loss: list[Tensor] = []
            for parameter in program.named_parameters().values():
                parameter.grad = None
            for share in shares:
                terms = program.loss_sum(index, cloned(share))
                torch.autograd.backward([total for total in terms.totals if total.requires_grad])
                if any(total.dtype != torch.float64 for total in terms.totals):
                    narrow.append(getattr(loss, "__name__", "loss_sum"))
                of_loss.append(torch.cat([terms.sums, terms.counts]).cpu())
            sums.append(torch.stack(of_loss).sum(0))
            held = program.trained_by(index)
            gradients |= {name: p.grad.detach().clone() for name, p in held.items() if p.grad is not None}
    return Outcome(
        sums=torch.cat(sums),
        gradients=gradients,
        buffers=_buffers(program),
        seen=seen,
        narrow_losses=tuple(dict.fromkeys(narrow)),
    )


def run_spread(
    program: Program, workers: Workers, layout: CustomLayout, micros: Sequence[Any], choices: LayoutChoices
) -> Outcome:
    """Run this worker's micro-batches as a step of the run does. Every worker must call it; blocks."""
    set_statistics(program, "all workers")
    parallel = parallelize_program(program, workers, layout, choices)
    gradients: dict[str, Tensor] = {}
    sums: list[Tensor] = []
    with observe(program) as seen:
        for index in range(len(program.losses)):
            fresh = [cloned(micro) for micro in micros]
            summed = sum_gradients(program, parallel, workers, index, fresh, StepPlace(step=0, batch=0))
            sums.append(torch.cat([summed.losses, summed.counts]).cpu())
            gradients |= {name: one.detach().clone() for name, one in parallel.full_gradients(index).items()}
    return Outcome(sums=torch.cat(sums), gradients=gradients, buffers=_buffers(program), seen=seen)


def updated_alone(program: Program, shares: Sequence[Any]) -> dict[str, Tensor]:
    """The weights after one process has taken one step with its own optimizers, by its own gradients."""
    set_statistics(program, "this worker")
    with WithoutDropout(), gathering_nothing():
        for index in range(len(program.losses)):
            for parameter in program.named_parameters().values():
                parameter.grad = None
            trained = list(program.trained_by(index).values())
            means = [program.loss_sum(index, cloned(share)) for share in shares]
            counts = divisor_of(torch.stack([terms.counts for terms in means]).sum(0))
            total = torch.stack([(torch.stack(list(terms.totals)) / counts).sum() for terms in means]).sum()
            torch.autograd.backward(total, inputs=trained)
            for optimizer in program.optimizers_of(index):
                optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in program.named_parameters().items()}


def updated_spread(
    program: Program, workers: Workers, layout: CustomLayout, micros: Sequence[Any], choices: LayoutChoices
) -> dict[str, Tensor]:
    """The weights after a step of the run. Every worker must call it; blocks."""
    set_statistics(program, "all workers")
    parallel = parallelize_program(program, workers, layout, choices)
    fuse_updates(program)
    losses, place = LossSteps(program, parallel, workers, LossScale()), StepPlace(step=0, batch=0)
    with WithoutDropout():
        for index in range(len(program.losses)):
            losses.update(index, losses.sum(index, [cloned(micro) for micro in micros], place), place)
    return {name: weight.detach().clone() for name, weight in parallel.full_weights().items()}


def set_statistics(program: Program, of: StatisticsOf) -> None:
    """Say whose samples plait's own BatchNorm layers see."""
    for model in program.models:
        for module in model.modules():
            if isinstance(module, GlobalBatchNorm):
                module.statistics_of = of


def _buffers(program: Program) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in program.named_buffers().items()}
