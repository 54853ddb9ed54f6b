"""What a probe times of training's own code: its loss, its update, its messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster.measured import MessageKind
from plait.cluster.probe.arithmetic import Training
from plait.cluster.probe.links import Begin
from plait.cluster.probe.request import ProbedModel, ProbeRequest
from plait.model.gpt import GPT
from plait.model.shape import ModelPart
from plait.parallel.comm.collectives import all_gather, reduce_scatter, spread_own, swap_parts
from plait.parallel.sharded_model import unsharded
from plait.planner.plan import OptimizerPlan
from plait.trainer.assemble import make_autocast
from plait.trainer.loss import sum_of_losses
from plait.trainer.optim import clip_factor, make_optimizer, owned_squares, update

TAG = 910_000
"""Of the probe's messages from rank to rank; those of training, which count from 0, are never under way with them."""
LAYERS_UPDATED = 2
OPTIMIZER = OptimizerPlan(lr=1e-4, warmup_steps=0, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="constant")


def training_for(request: ProbeRequest) -> Training:
    """Training's own pieces in the request's precision."""
    device = torch.device(request.device)
    return Training(
        autocast=make_autocast(request.precision, device),
        loss=sum_of_losses,
        updates=_updates,
    )


def _updates(scene: ProbedModel, device: torch.device) -> tuple[Callable[[], object], int, int]:
    """One update of some layers of the scene's model by gradients that are there, the norm included."""
    part = ModelPart(embeds=False, layers=tuple(range(min(LAYERS_UPDATED, scene.shape.layers))), ends=False)
    units = unsharded(GPT(scene.shape, part).to(device)).units
    optimizer = make_optimizer(units, OPTIMIZER)
    for unit in units:
        unit.parameter.grad = torch.full_like(unit.parameter, 1e-3)

    def run() -> None:
        norm = owned_squares(units, like=torch.zeros(1, dtype=torch.float64, device=device)).sum().sqrt()
        update(optimizer, units, factor=clip_factor(norm, OPTIMIZER.clip), norm=norm)

    return run, sum(unit.parameter.numel() for unit in units), len(units)


def _sum(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """What a bucket of gradients goes through where every rank keeps all of it."""
    begin_sum(buffer, group).wait()


def begin_sum(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin the sum of a bucket of gradients."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def _gather(buffer: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(buffer, _own(buffer, group).clone(), group=group)


def _scatter(buffer: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(torch.empty_like(_own(buffer, group)), buffer, group=group)


def _exchange(buffer: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group)


def _swap(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """A split bucket's sum: the parts change places, and each rank adds up its own."""
    own = _own(buffer, group)
    received = buffer.new_empty(dist.get_world_size(group) - 1, len(own))
    for work in swap_parts(buffer, received, group, TAG):
        work.wait()
    for other in received:
        own += other


def _spread(buffer: Tensor, group: dist.ProcessGroup) -> None:
    for work in spread_own(buffer, group, TAG):
        work.wait()


def _own(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    return buffer.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


EVERYWHERE: Mapping[MessageKind, Begin] = {
    "all_reduce": _sum,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
}
ON_PROCESSORS: Mapping[MessageKind, Begin] = {"swap_parts": _swap, "spread_own": _spread}


def operations(device: torch.device) -> Mapping[MessageKind, Begin]:
    """The operations that training uses on a kind of device; GPUs take the library's for all."""
    return {**EVERYWHERE, **ON_PROCESSORS} if device.type == "cpu" else EVERYWHERE
