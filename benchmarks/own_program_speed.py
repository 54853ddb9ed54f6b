"""Steps of `plait.spread` against DDP and FSDP2 on the same workers, model and batch, in turn.

    plait run benchmarks/own_program_speed.py --workers 2 -- [resnet|lstm|encoder] [replicate|shard] [--pairs 12]

Prints the median of the pairs' ratios of time (above 1: plait is faster), both medians, and the ratio of processor
time, which a busy machine disturbs less. Each pair is a block of steps of one and then of the other, in an order that
changes from pair to pair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait

STEPS_OF_A_BLOCK = 4


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, width)])
        self.skip = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 or before != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.norms[1](self.two(F.relu(self.norms[0](self.one(x))))))


def resnet() -> tuple[nn.Module, Any]:
    """ResNet-18 for images of 32 × 32, and a batch of 32."""
    rows = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
            (512, 512, 1)]  # fmt: skip
    body = nn.Sequential(*(Residual(*row) for row in rows))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )
    return model, (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))


class Words(nn.Module):
    """A language model over words: an LSTM, or a Transformer's encoder."""

    def __init__(self, kind: str, width: int = 256) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8000, width), nn.Linear(width, 8000)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True) if kind == "lstm" else None
        self.layers = (
            nn.ModuleList() if kind == "lstm" else nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).layers
        )

    def forward(self, x: Tensor) -> Tensor:
        stream = self.words(x)
        if self.lstm is not None:
            stream = self.lstm(stream)[0]
        for layer in self.layers:
            stream = layer(stream)
        return self.head(stream).flatten(0, 1)


def words(kind: str) -> tuple[nn.Module, Any]:
    """A model of words and a batch of 16 texts."""
    return Words(kind), (torch.randint(0, 8000, (16, 64)), torch.randint(0, 8000, (16 * 64,)).view(16, 64))


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Cross-entropy, summed."""
    return F.cross_entropy(model(batch[0]), batch[1].flatten(), reduction="sum"), batch[1].numel()


def main() -> None:
    """Measure pairs and print them."""
    torch.manual_seed(0)
    kind, layout = (*sys.argv[1:3],) if len(sys.argv) > 2 else ("resnet", "replicate")
    pairs = int(sys.argv[sys.argv.index("--pairs") + 1]) if "--pairs" in sys.argv else 12
    model, batch = resnet() if kind == "resnet" else words(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    asked: Any = {"layout": "replicate" if layout == "replicate" else "shard parameters"}
    run = plait.spread(model, optimizer, loss_sum=loss_sum, **asked)
    half = slice(run.rank * len(batch[0]) // run.workers, (run.rank + 1) * len(batch[0]) // run.workers)
    share = (batch[0][half], batch[1][half])
    other = _other(kind, layout, share)
    times: dict[str, list[float]] = {"plait": [], "torch": []}
    work: dict[str, list[float]] = {"plait": [], "torch": []}
    for pair in range(pairs + 1):
        ways = [("plait", lambda: run.step(share)), ("torch", other)]
        for name, step in ways[:: 1 if pair % 2 else -1]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(STEPS_OF_A_BLOCK):
                step()
            dist.barrier()
            if pair:  # the first finds memory and buckets
                times[name].append((time.perf_counter() - began) / STEPS_OF_A_BLOCK)
                work[name].append((time.process_time() - worked) / STEPS_OF_A_BLOCK)
    ratios = [b / a for a, b in zip(times["plait"], times["torch"], strict=True)]
    worked_ratio = median(b / a for a, b in zip(work["plait"], work["torch"], strict=True))
    if run.rank == 0:
        rest = "DDP" if layout == "replicate" else "FSDP2"
        print(
            f"{kind}, {run.workers} workers, {layout}: {median(ratios):.3f} × {rest} (median of {pairs} pairs; "
            f"{median(times['plait']) * 1000:.1f} against {median(times['torch']) * 1000:.1f} ms a step); "
            f"{worked_ratio:.3f} × by processor time"
        )


def _other(kind: str, layout: str, share: Any) -> Callable[[], None]:
    """A step by torch's own means, of the same model and share."""
    torch.manual_seed(0)
    model = (resnet() if kind == "resnet" else words(kind))[0]
    if layout == "replicate":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        for layer in model.layers if isinstance(model, Words) else model[1]:  # type: ignore[index]
            fully_shard(layer)
        fully_shard(model)
        wrapped = model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(share[0]), share[1].flatten()).backward()
        optimizer.step()

    return step


main()
