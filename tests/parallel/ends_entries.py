"""What the two ranks of the tests of a tied weight do: rank 0 looks rows up, rank 1 keeps it, for the head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from plait.launch.values.job import RankContext
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.mesh import open_store
from plait.parallel.pipeline_links import wait_for
from plait.parallel.tied_embedding import TIED_WEIGHT, TiedEmbeddingEnd
from plait.partition.boxes import Box

ENTRIES, FIRST, WIDTH, TOKENS, STEPS, RATE = 23, 40, 6, 5, 3, 0.1
"""Of a table whose entries before FIRST, and those from FIRST + ENTRIES on, are other ranks'."""


def meet(context: RankContext, argument: str) -> None:
    """Some steps with so many micro-batches each, whose weight rank 1 updates; and a look without learning."""
    asked = json.loads(argument)
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    group, embeds = dist.group.WORLD, context.rank == 0
    assert isinstance(group, dist.ProcessGroup)
    parameter = nn.Parameter(first_table())
    box = Box(shape=(2 * FIRST + ENTRIES, WIDTH), offset=(FIRST, 0), extent=(ENTRIES, WIDTH))
    weight = SharedWeight(name=TIED_WEIGHT, parameter=parameter, box=box, chunk=0, ranks=(0, 1), decays=False)
    ends = TiedEmbeddingEnd(weight, group, embeds=embeds)
    left: dict[str, Tensor] = {}
    for step in range(STEPS):
        micros = [tokens_of(step, micro) for micro in range(asked["micros"])]
        visit = ends.visit(micros, wait_for, learns=True)
        parameter.grad = None
        losses = []
        for micro, tokens in enumerate(micros):
            if embeds:
                visit.before_forward(micro)
            losses.append(embedded(parameter, tokens) if embeds else headed(parameter, step, micro))
        for micro, loss in enumerate(losses):
            loss.backward()
            if embeds:
                visit.after_backward(micro)
        visit.finish()
        if not embeds:
            assert parameter.grad is not None
            left[f"gradient-{step}"] = parameter.grad.clone()
            parameter.data -= RATE * parameter.grad
        left[f"loss-{step}"] = torch.stack([loss.detach() for loss in losses])
    with torch.no_grad():
        tokens = tokens_of(STEPS, 0)
        visit = ends.visit([tokens], wait_for, learns=False)
        if embeds:
            visit.before_forward(0)
            left["look"] = embedded(parameter, tokens)
        visit.finish()
    left["before"] = parameter.detach().clone()
    ends.settle()
    left["after"] = parameter.detach().clone()
    save_file(left, Path(asked["folder"]) / f"rank-{context.rank}.safetensors")
    dist.destroy_process_group()


def first_table() -> Tensor:
    """The weight before the first step."""
    return torch.randn(ENTRIES, WIDTH, generator=torch.Generator().manual_seed(7))


def tokens_of(step: int, micro: int) -> Tensor:
    """Some of this part's, some of others'."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(FIRST - 3, FIRST + ENTRIES + 3, (1, TOKENS), generator=generator)


def embedded(table: Tensor, tokens: Tensor) -> Tensor:
    """A loss of the rows of those tokens that are here."""
    places = tokens.flatten() - FIRST
    here = places[(places >= 0) & (places < ENTRIES)]
    return (F.embedding(here, table) * torch.arange(1.0, WIDTH + 1)).square().sum()


def headed(table: Tensor, step: int, micro: int) -> Tensor:
    """A loss of all rows."""
    hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + 100 * step + micro))
    return F.linear(hidden, table).logsumexp(1).sum()
