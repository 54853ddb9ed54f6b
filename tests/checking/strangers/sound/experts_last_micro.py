"""Experts chosen per micro-batch; the last one skips an expert (pytorch/pytorch#69031, which torch 2.13 handles)."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM = 2


class Switch(nn.Module):
    def __init__(self, d=12, experts=2):
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(experts)
        )
        self.out = nn.Linear(d, 4)

    def forward(self, x, task):
        h = self.inp(x)
        h = h + self.experts[task](h)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Switch(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(rank + 1)
    for _step in range(9):
        for micro in range(ACCUM):
            x = torch.randn(8, 12, generator=gen)
            y = torch.randint(0, 4, (8,), generator=gen)
            model.require_backward_grad_sync = micro == ACCUM - 1
            loss = nn.functional.cross_entropy(model(x, task=micro), y) / ACCUM
            loss.backward()
        opt.step()
        opt.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


main()
