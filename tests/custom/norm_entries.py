"""What the ranks of the tests of BatchNorm do; each leaves its tensors in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.custom.exact_norm.batch_norm import convert_batch_norm
from plait.launch.values.job import RankContext
from plait.parallel.mesh import open_store

CHANNELS = 4


def small_net() -> nn.Module:
    """Two BatchNorms, one of them without weights, the same numbers on every rank."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS), nn.GELU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(CHANNELS * 4, 2, bias=False), nn.BatchNorm1d(2, eps=1e-3),
    )  # fmt: skip
    return net.double()


def samples(total: int) -> tuple[Tensor, Tensor]:
    """Inputs [total, 3, 6, 6], far from 0, and the weight of each output in the loss [total, 2]."""
    dice = torch.Generator().manual_seed(4)
    inputs = 100 + torch.randn(total, 3, 6, 6, generator=dice, dtype=torch.float64)
    return inputs, torch.randn(total, 2, generator=dice, dtype=torch.float64)


def tensors_after_two_steps(net: nn.Module, inputs: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Gradients of weights and inputs, and the buffers, after two forward and backward passes."""
    inputs = inputs.clone().requires_grad_()
    for _ in range(2):
        net.zero_grad()
        inputs.grad = None
        (net(inputs) * wanted).pow(2).sum().backward()
    assert inputs.grad is not None
    grads = {f"weight/{name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {**grads, "input": inputs.grad, **{f"buffer/{name}": b for name, b in net.named_buffers()}}


def normalize_shares(context: RankContext, argument: str) -> None:
    """The argument is JSON: the folder, each rank's number of samples, and whether layers are converted."""
    asked = json.loads(argument)
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    net = convert_batch_norm(small_net()) if asked["converted"] else small_net()
    first, count = sum(asked["shares"][: context.rank]), asked["shares"][context.rank]
    inputs, wanted = (part[first : first + count] for part in samples(sum(asked["shares"])))
    found = tensors_after_two_steps(net, inputs, wanted)
    save_file(found, Path(asked["folder"]) / f"rank-{context.rank}.safetensors")
    dist.destroy_process_group()
