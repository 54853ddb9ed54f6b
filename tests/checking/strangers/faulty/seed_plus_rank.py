import os

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="env://")
torch.manual_seed(2024 + RANK)  # different noise everywhere

encoder = torch.nn.Sequential(torch.nn.Linear(20, 12), torch.nn.ELU(), torch.nn.Linear(12, 3))
decoder = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.ELU(), torch.nn.Linear(12, 20))
params = list(encoder.parameters()) + list(decoder.parameters())
opt = torch.optim.Adam(params, lr=2e-3)

for step in range(8):
    x = torch.randn(16, 20)
    noisy = x + 0.1 * torch.randn_like(x)
    loss = ((decoder(encoder(noisy)) - x) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    flat = _flatten_dense_tensors([p.grad for p in params])
    dist.all_reduce(flat)
    flat.div_(WORLD)
    for p, g in zip(params, _unflatten_dense_tensors(flat, [p.grad for p in params]), strict=False):
        p.grad = g
    opt.step()
    if RANK == 0:
        print(f"{step:3d} {loss.item():.5f}")
dist.destroy_process_group()
