"""One host of the benchmark of people's own programs: a ResNet-18 under plait.spread, under DDP, or by itself.

`benchmarks.lab.own_program_host KIND --examples N --steps S --out FILE` appends a JSON line a step. N are the examples
of a step of all hosts together; of `alone`, this host's own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait
from benchmarks.contender import leave
from benchmarks.spread_work import loss_sum, resnet18

Step = Callable[[], int]
"""Takes a step and tells this host's examples of it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("plait", "ddp", "alone"))
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = resnet18()
    take = {"plait": _plait, "ddp": _ddp, "alone": _alone}[flags.kind](model, flags.examples, flags.steps)
    with flags.out.open("w", buffering=1) as out:
        for number in range(flags.steps):
            began = time.perf_counter()
            own = take()
            print(json.dumps({"step": number, "step_s": time.perf_counter() - began, "examples": own}), file=out)
    leave()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _data(examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many images of 32 × 32, and their classes."""
    return torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))


def _plait(model: nn.Module, examples: int, steps: int) -> Step:
    run = plait.spread(model, _optimizer(model), loss_sum=loss_sum)
    batches = iter(run.batches(_data(examples), batch=examples, epochs=steps))

    def take() -> int:
        batch = next(batches)
        run.step(batch)
        return len(batch[0])

    return take


def _ddp(model: nn.Module, examples: int, steps: int) -> Step:
    """Equal parts, as a DistributedSampler cuts them; the hosts meet as torchrun's environment says."""
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    return _plain(wrapped, examples // int(os.environ["WORLD_SIZE"]))


def _alone(model: nn.Module, examples: int, steps: int) -> Step:
    return _plain(model, examples)


def _plain(model: nn.Module, own: int) -> Step:
    optimizer, (images, classes) = _optimizer(model), _data(own)

    def take() -> int:
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        return own

    return take


if __name__ == "__main__":
    main()
