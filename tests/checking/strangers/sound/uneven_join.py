"""Rank 1 has one batch less; join() keeps the others going and divides by the ranks that are still there."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.02)
gen = torch.Generator().manual_seed(rank)
batches = [torch.randn(6, 4, generator=gen) for _ in range(8 - rank)]
with model.join(divide_by_initial_world_size=False):
    for x in batches:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        opt.step()
dist.destroy_process_group()
