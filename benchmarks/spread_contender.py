"""A rank of a contender of the benchmark of `plait.spread`: benchmarks.spread_contender KIND --work PROGRAM."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait
from benchmarks.spread_work import PROGRAMS, Batch, BenchProgram, loss_sum
from benchmarks.strands_work import TakeStep, serve
from plait.model.matmul import select_matmul_library

BATCHES = 4


def main() -> None:
    flags = _flags()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Accelerate asks for these even where the group is there already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{flags.rendezvous}", rank=rank, world_size=ranks)
    if flags.products == "onednn":  # as somebody's own choice, which plait.spread leaves alone
        select_matmul_library("onednn")
    program = PROGRAMS[flags.work]
    torch.manual_seed(7)
    model = program.make_model()
    batches = [_own(program.make_batch(program.examples), rank, ranks) for _ in range(BATCHES)]
    take = {"plait": _plait, "ddp": _ddp, "fsdp2": _fsdp2, "accelerate": _accelerate}[flags.kind.split()[0]]
    serve(take(program, model, batches, flags.kind))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--work", required=True)
    parser.add_argument("--products", choices=("chosen", "onednn"), default="chosen")
    parser.add_argument("--rendezvous", required=True)
    return parser.parse_args()


def _own(batch: Batch, rank: int, ranks: int) -> Batch:
    size = len(batch[0]) // ranks
    return batch[0][rank * size :][:size].clone(), batch[1][rank * size :][:size].clone()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def _plait(program: BenchProgram, model: nn.Module, batches: list[Batch], kind: str) -> TakeStep:
    """ "plait LAYOUT", the layout's blank written as an underscore."""
    layout = kind.split()[1].replace("_", " ")
    with redirect_stdout(sys.stderr):  # answers alone are read there
        run = plait.spread(model, _optimizer(model), loss_sum=loss_sum, layout=layout)  # type: ignore[arg-type]

    def take(step: int) -> float:
        with redirect_stdout(sys.stderr):  # a library of products is chosen in a step
            return float(run.step(batches[step % BATCHES]))

    return take


def _ddp(program: BenchProgram, model: nn.Module, batches: list[Batch], kind: str) -> TakeStep:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_steps(wrapped, _optimizer(wrapped), batches, torch.Tensor.backward)


def _fsdp2(program: BenchProgram, model: nn.Module, batches: list[Batch], kind: str) -> TakeStep:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, program.units):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_steps(model, _optimizer(model), batches, torch.Tensor.backward)


def _accelerate(program: BenchProgram, model: nn.Module, batches: list[Batch], kind: str) -> TakeStep:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, _optimizer(model))
    return _plain_steps(wrapped, optimizer, batches, accelerator.backward)


def _plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], backward: Callable[[torch.Tensor], object]
) -> TakeStep:
    """Steps with the mean of each rank's own share, which is exact as all have as many losses."""

    def take(step: int) -> float:
        inputs, labels = batches[step % BATCHES]
        loss = F.cross_entropy(model(inputs), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return take


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
