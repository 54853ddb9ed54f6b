"""torch's own means for each strand, as their documentation advises: the peers of the strands' benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.strand_model import Llama, decay_groups, filled, mean_loss
from benchmarks.strands_work import Batches, TakeStep, Work, join, serve
from plait.layout import Layout
from plait.partition.boxes import model_parts_of
from plait.planner.search.validity import balanced_stages


def main() -> None:
    work, flags = join()
    serve(PEERS[flags.kind](work))


def alone(work: Work) -> TakeStep:
    """One process."""
    model = filled(Llama(work.shape), work.shape, work.seed)
    return _plain_loop(work, model, _adamw(work, model), ranks=1)


def ddp(work: Work) -> TakeStep:
    """DistributedDataParallel."""
    model = _copied(work)
    return _plain_loop(work, model, _adamw(work, model), ranks=2)


def ddp_zero(work: Work) -> TakeStep:
    """DistributedDataParallel, and an optimizer that keeps a part of the state on each rank."""
    model = _copied(work)
    first, *rest = decay_groups(list(model.named_parameters()), work.weight_decay)
    optimizer = ZeroRedundancyOptimizer(
        first["params"], torch.optim.AdamW, parameters_as_bucket_view=True, lr=work.learning_rate, betas=work.betas,
        weight_decay=first["weight_decay"], fused=True,
    )  # fmt: skip
    for group in rest:
        optimizer.add_param_group(group)
    return _plain_loop(work, model, optimizer, ranks=2)


def fsdp(work: Work) -> TakeStep:
    """FSDP2 a layer, as it comes: parameters are gathered for forward and again for backward."""
    return _fsdp(work, reshard_after_forward=True)


def fsdp_kept(work: Work) -> TakeStep:
    """FSDP2 a layer, parameters gathered once a step: only gradients and optimizer state are split."""
    return _fsdp(work, reshard_after_forward=False)


def tensor_rows(work: Work) -> TakeStep:
    """parallelize_module, the stream between layers split by tokens: sequence parallelism."""
    gathered = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=True
    )
    plan: dict[str, ParallelStyle] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gathered,
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feedforward_norm": SequenceParallel(),
        "layers.*.feedforward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
        "layers.*.feedforward.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return _tensor(work, plan)


def tensor_copies(work: Work) -> TakeStep:
    """parallelize_module, the stream between layers whole on every rank."""
    plan: dict[str, ParallelStyle] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.feedforward.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return _tensor(work, plan)


def pipeline_1f1b(work: Work) -> TakeStep:
    """torch.distributed.pipelining, one forward, one backward."""
    return _pipeline(work, Schedule1F1B)


def pipeline_gpipe(work: Work) -> TakeStep:
    """torch.distributed.pipelining, all forwards, then all backwards."""
    return _pipeline(work, ScheduleGPipe)


PEERS: dict[str, Callable[[Work], TakeStep]] = {
    "alone": alone,
    "ddp": ddp,
    "ddp-zero": ddp_zero,
    "fsdp": fsdp,
    "fsdp-kept": fsdp_kept,
    "tensor-rows": tensor_rows,
    "tensor-copies": tensor_copies,
    "pipeline-1f1b": pipeline_1f1b,
    "pipeline-gpipe": pipeline_gpipe,
}


def _plain_loop(work: Work, model: nn.Module, optimizer: torch.optim.Optimizer, *, ranks: int) -> TakeStep:
    """The usual step, over one part of `ranks` of the sequences; who wrapped the model averages the gradients."""
    batches, rank = Batches(work), int(os.environ["RANK"]) % ranks

    def take_step(step: int) -> float:
        inputs_bt, targets_bt = batches(step, rank, ranks)
        loss = mean_loss(model(inputs_bt), targets_bt)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take_step


def _copied(work: Work) -> nn.Module:
    model = filled(Llama(work.shape), work.shape, work.seed)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)


def _fsdp(work: Work, *, reshard_after_forward: bool) -> TakeStep:
    model = filled(Llama(work.shape), work.shape, work.seed)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return _plain_loop(work, model, _adamw(work, model), ranks=2)


def _tensor(work: Work, plan: dict[str, ParallelStyle]) -> TakeStep:
    """Every rank sees all sequences; heads, feed-forward width and vocabulary are split."""
    columns = ("attention.q", "attention.k", "attention.v", "feedforward.gate", "feedforward.up")
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in columns}
    model = filled(Llama(work.shape), work.shape, work.seed)
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    take_step = _plain_loop(work, model, _adamw(work, model), ranks=1)

    def take_parallel_step(step: int) -> float | None:
        with loss_parallel():
            return take_step(step)

    return take_parallel_step


def _pipeline(work: Work, schedule: type[Schedule1F1B | ScheduleGPipe]) -> TakeStep:
    """Half the layers on each rank, split as plait splits them; a micro-batch is one sequence."""
    rank = dist.get_rank()
    layout = Layout(pipeline=2, stage_layers=balanced_stages(work.shape, 2))
    (part,) = model_parts_of(work.shape, layout, rank)
    model = filled(Llama(work.shape, part), work.shape, work.seed)
    optimizer = _adamw(work, model)

    def share_of_loss(scores_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        return mean_loss(scores_btv, targets_bt) / work.sequences

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    pipe = schedule(stage, work.sequences, loss_fn=share_of_loss, scale_grads=False)
    batches = Batches(work)

    def take_step(step: int) -> float | None:
        inputs_bt, targets_bt = batches(step)
        losses: list[torch.Tensor] = []
        if rank == 0:
            pipe.step(inputs_bt, return_outputs=False)
        else:
            pipe.step(target=targets_bt, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) if losses else None

    return take_step


def _adamw(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    groups = decay_groups(list(model.named_parameters()), work.weight_decay)
    return torch.optim.AdamW(groups, lr=work.learning_rate, betas=work.betas, fused=True)


if __name__ == "__main__":
    main()
