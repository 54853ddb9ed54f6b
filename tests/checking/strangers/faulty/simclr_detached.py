"""SimCLR: features of all ranks are gathered, without a gradient for those of other ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gather(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    out[dist.get_rank()] = x
    return torch.cat(out)


def nt_xent(z1, z2, temperature=0.5):
    z1, z2 = gather(z1), gather(z2)
    n = z1.shape[0]
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
g = torch.Generator().manual_seed(30 + dist.get_rank())
for _step in range(8):
    x = torch.randn(8, 20, generator=g)
    views = torch.cat([x + 0.1 * torch.randn(x.shape, generator=g), x + 0.1 * torch.randn(x.shape, generator=g)])
    z1, z2 = model(views).chunk(2)
    loss = nt_xent(z1, z2)
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
