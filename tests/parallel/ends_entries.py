"""What the two ranks of the tests of a tied weight do: each leaves its own gradient and the sum, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.launch.job import RankContext
from plait.parallel.buckets import Shared
from plait.parallel.ends import TIED, Ends
from plait.parallel.mesh import open_store
from plait.parallel.woven import LocalGradients
from plait.plan.placement import whole

ENTRIES, WIDTH, TOKENS, STEPS = 23, 6, 5, 3


def meet(context: RankContext, argument: str) -> None:
    """Some steps with so many micro-batches each; rank 0 has the embedding, rank 1 the head."""
    asked = json.loads(argument)
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(context.rank)
    assert isinstance(group, dist.ProcessGroup)
    parameter = nn.Parameter(torch.randn(ENTRIES, WIDTH, generator=torch.Generator().manual_seed(7)))
    weight = Shared(name=TIED, parameter=parameter, box=whole(parameter.shape), chunk=0, ranks=(0, 1))
    ends = Ends(LocalGradients([]), weight, group, embeds=context.rank == 0, ahead=asked["ahead"])
    left: dict[str, Tensor] = {}
    for step in range(STEPS):
        losses = [_loss(parameter, context.rank, generator) for _ in range(asked["micros"])]
        own = [torch.autograd.grad(loss, parameter, retain_graph=True)[0] for loss in losses]
        left[f"own-{step}"] = sum(own[1:], own[0])
        ends.open()
        for number, loss in enumerate(losses):
            if number == len(losses) - 1 and asked["announced"]:
                ends.arm(0)
            loss.backward()
        ends.close()
        assert parameter.grad is not None
        left[f"sum-{step}"] = parameter.grad.clone()
    save_file(left, Path(asked["folder"]) / f"rank-{context.rank}.safetensors")
    dist.destroy_process_group()


def _loss(parameter: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    if rank == 1:
        hidden = torch.randn(TOKENS, WIDTH, generator=generator)
        return F.linear(hidden, parameter).logsumexp(1).sum()
    tokens = torch.randint(0, ENTRIES, (TOKENS,), generator=generator)
    return (F.embedding(tokens, parameter) * torch.randn(TOKENS, WIDTH, generator=generator)).sum()
