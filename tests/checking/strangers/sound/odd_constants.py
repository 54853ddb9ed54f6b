"""A weighted sum of two terms with constants of the authors' liking."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(7, 30), nn.Softplus(), nn.Linear(30, 2)))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
gen = torch.Generator().manual_seed(dist.get_rank() + 5)
BATCH = 8
for _step in range(10):
    x = torch.randn(BATCH, 7, generator=gen)
    y = torch.randn(BATCH, 2, generator=gen)
    per_example = (model(x) - y).pow(2).sum(dim=1)
    loss = 0.3 * per_example.sum() / BATCH
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
