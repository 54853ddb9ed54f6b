"""Pieces of training's own code that a probe times: loss, optimizer update, and messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.cluster.measured import CommOperation
from plait.cluster.probe.arithmetic import TrainingOperations
from plait.cluster.probe.links import BlockingOperation
from plait.cluster.probe.request import ProbedModel, ProbeRequest
from plait.cluster.probe.timing import EventClock
from plait.model.gpt import GPT
from plait.model.shape import ModelPart
from plait.parallel.collectives import all_gather, reduce_scatter, spread_own, swap_parts
from plait.parallel.compile import compile_layer
from plait.parallel.mesh import GroupSums
from plait.parallel.sharded_model import unsharded
from plait.planner.plan import OptimizerPlan
from plait.trainer.assemble import make_autocast
from plait.trainer.loss import sum_of_losses
from plait.trainer.optimizer.optim import clip_factor, make_optimizer, owned_squares, update

COLLECTIVE_PROBE_TAG = 910_000
"""Tag of the probe's point-to-point messages; training's tags count from 0 and are never in flight at the same time."""
LAYERS_UPDATED = 2
PROBED_OPTIMIZER = OptimizerPlan(
    lr=1e-4, warmup_steps=0, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="constant"
)


class GroupBarrier:
    """Keeps the ranks of a process group in step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._sums = GroupSums(group)

    def barrier(self) -> None:
        self._sums(torch.zeros(1))

    def largest(self, value: float) -> float:
        return self._sums.largest(torch.tensor([value], dtype=torch.float64)).item()


def gpu_clock(timeout_s: float) -> EventClock:
    """The clock of this rank's GPU, which waits for so many seconds at most."""
    return EventClock(make_event=partial(torch.cuda.Event, enable_timing=True), timeout_s=timeout_s)


def training_operations_for(request: ProbeRequest) -> TrainingOperations:
    """Training's own pieces in the request's precision."""
    device = torch.device(request.device)
    return TrainingOperations(
        autocast=make_autocast(request.precision, device),
        loss=sum_of_losses,
        make_update=_optimizer_update,
        prepare_layer=compile_layer if request.compile == "blocks" else _leave_as_it_is,
    )


def _leave_as_it_is(layer: nn.Module) -> None:
    """Do nothing: the layer runs operation by operation."""


def _optimizer_update(probed_model: ProbedModel, device: torch.device) -> tuple[Callable[[], object], int, int]:
    """One optimizer step of some layers of the probed model on ready gradients, with the gradient norm."""
    part = ModelPart(embeds=False, layers=tuple(range(min(LAYERS_UPDATED, probed_model.shape.layers))), ends=False)
    units = unsharded(GPT(probed_model.shape, part).to(device)).units
    optimizer = make_optimizer(units, PROBED_OPTIMIZER)
    for unit in units:
        unit.parameter.grad = torch.full_like(unit.parameter, 1e-3)

    def run() -> None:
        norm = owned_squares(units, like=torch.zeros(1, dtype=torch.float64, device=device)).sum().sqrt()
        update(optimizer, units, factor=clip_factor(norm, PROBED_OPTIMIZER.clip), norm=norm)

    return run, sum(unit.parameter.numel() for unit in units), len(units)


def _all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a bucket of gradients as training does it where every rank keeps the whole bucket."""
    begin_all_reduce(buffer, group).wait()


def begin_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin the sum of a bucket of gradients."""
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def _all_gather(buffer: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(buffer, _own_part(buffer, group).clone(), group=group)


def _reduce_scatter(buffer: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(torch.empty_like(_own_part(buffer, group)), buffer, group=group)


def _all_to_all(buffer: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(buffer), buffer, group=group)


def _swap_parts(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """A split bucket's sum: the parts change places, and each rank adds up its own."""
    own = _own_part(buffer, group)
    received = buffer.new_empty(dist.get_world_size(group) - 1, len(own))
    for work in swap_parts(buffer, received, group, COLLECTIVE_PROBE_TAG):
        work.wait()
    for other in received:
        own += other


def _spread_own(buffer: Tensor, group: dist.ProcessGroup) -> None:
    for work in spread_own(buffer, group, COLLECTIVE_PROBE_TAG):
        work.wait()


def _own_part(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    return buffer.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


LIBRARY_COLLECTIVES: Mapping[CommOperation, BlockingOperation] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
CPU_COLLECTIVES: Mapping[CommOperation, BlockingOperation] = {"swap_parts": _swap_parts, "spread_own": _spread_own}


def collective_operations(device: torch.device) -> Mapping[CommOperation, BlockingOperation]:
    """The operations that training uses on a kind of device; GPUs take the library's for all."""
    return {**LIBRARY_COLLECTIVES, **CPU_COLLECTIVES} if device.type == "cpu" else LIBRARY_COLLECTIVES
