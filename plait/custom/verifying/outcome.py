"""One forward and backward pass of every loss of a program: on one process, or spread over the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.custom.exact_norm.batch_norm import GlobalBatchNorm, StatisticsOf
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.stepping.gradients import StepPlace, sum_gradients
from plait.custom.strands.choose import make_strands
from plait.custom.strands.description import CustomLayout, StrandChoices
from plait.custom.verifying.observed import Observations, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program's losses left behind, and what was seen on the way."""

    sums: Tensor
    """Float64 [losses, 2]: the sum of each loss and its count, over the whole batch."""
    gradients: Mapping[str, Tensor]
    """Of those sums, by parameter; those that no loss reached are missing on one process and zero on several."""
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
    with observe(program) as seen:
        for index, loss in enumerate(program.losses):
            both = torch.zeros(2, dtype=torch.float64)
            for parameter in program.named_parameters().values():
                parameter.grad = None
            for share in shares:
                total, count = program.loss_sum(index, share)
                total.backward()
                if total.dtype != torch.float64:
                    narrow.append(getattr(loss, "__name__", "loss_sum"))
                both += torch.stack([total.detach().double(), count]).cpu()
            sums.append(both)
            held = program.trained_by(index)
            gradients |= {name: p.grad.detach().clone() for name, p in held.items() if p.grad is not None}
    return Outcome(
        sums=torch.stack(sums),
        gradients=gradients,
        buffers=_buffers(program),
        seen=seen,
        narrow_losses=tuple(dict.fromkeys(narrow)),
    )


def run_spread(
    program: Program, workers: Workers, layout: CustomLayout, micros: Sequence[Any], choices: StrandChoices
) -> Outcome:
    """Run this worker's micro-batches as a step of the run does. Every worker must call it; blocks."""
    set_statistics(program, "all workers")
    strands = make_strands(program, workers, layout, choices)
    gradients: dict[str, Tensor] = {}
    sums: list[Tensor] = []
    with observe(program) as seen:
        for index in range(len(program.losses)):
            summed = sum_gradients(program, strands, workers, index, micros, StepPlace(step=0, batch=0))
            sums.append(summed.total.detach().double().cpu())
            gradients |= {name: one.detach().clone() for name, one in strands.full_gradients(index).items()}
    return Outcome(sums=torch.stack(sums), gradients=gradients, buffers=_buffers(program), seen=seen)


def set_statistics(program: Program, of: StatisticsOf) -> None:
    """Say whose samples plait's own BatchNorm layers see."""
    for model in program.models:
        for module in model.modules():
            if isinstance(module, GlobalBatchNorm):
                module.statistics_of = of


def _buffers(program: Program) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in program.named_buffers().items()}
