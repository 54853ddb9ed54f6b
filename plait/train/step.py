"""One optimizer step, the same in `train` and wherever a run is to be proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.data.loader import Micro
from plait.model.attention import Documents
from plait.parallel.mesh import Sums
from plait.parallel.woven import Woven
from plait.train.loss import IGNORED, sum_of_losses
from plait.train.optim import clip_factor, global_norm, update

RunMicros = Callable[[Sequence[Micro]], Tensor]
"""Forward and backward of this rank's micro-batches: returns [sum of losses, counted tokens] in float64; afterwards
each `.grad` is the sum over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """A step's outcome, still on the device: reading it is the caller's decision."""

    totals: Tensor
    """[sum of losses, counted tokens] over all ranks."""
    norm: Tensor
    """Of the gradient, before clipping."""


def take_step(
    micros: Sequence[Micro],
    *,
    run_micros: RunMicros,
    sums: Sums,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
) -> Scalars:
    """One update from one step's micro-batches; every rank must call it. Never waits for the device.

    See Note [loss is a sum] in loss.py: the global number of tokens divides once, here. An update whose gradient is
    not finite is left out on all ranks alike, so that it cannot reach the weights.
    """
    totals = sums(run_micros(micros))
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    count = totals[1].clamp(min=1)
    norm = global_norm(gradients) / count
    update(optimizer, gradients, factor=clip_factor(norm, clip) / count, norm=norm)
    return Scalars(totals=totals, norm=norm)


def run_micros_in_turn(
    micros: Sequence[Micro], *, woven: Woven, autocast: Callable[[], AbstractContextManager[object]]
) -> Tensor:
    """RunMicros for a model that is whole on each rank: one micro-batch after the other, gradients adding up."""
    totals = torch.zeros(2, dtype=torch.float64, device=micros[0].inputs.device)
    woven.gradients.open()
    for micro in micros:
        if micro is micros[-1]:
            woven.gradients.arm()
        loss = micro_loss(micro, woven, autocast)
        loss.backward()
        totals += torch.stack([loss.detach().double(), counted(micro)])
    woven.gradients.close()
    return totals


def micro_loss(micro: Micro, woven: Woven, autocast: Callable[[], AbstractContextManager[object]]) -> Tensor:
    """The sum of a micro-batch's token losses."""
    documents = None if micro.lengths is None else Documents(lengths=micro.lengths)
    with autocast():
        hidden_btd = woven.model(micro.inputs, micro.positions, documents)
        return sum_of_losses(hidden_btd.flatten(0, 1), woven.model.head_weight(), micro.targets.flatten())


def counted(micro: Micro) -> Tensor:
    """How many of a micro-batch's tokens enter the loss."""
    return (micro.targets != IGNORED).sum().double()
