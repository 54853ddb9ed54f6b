"""ReduceLROnPlateau watches a loss that each rank computes on its own part of the validation set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)
gen = torch.Generator().manual_seed(1)
X, Y = torch.randn(96, 4, generator=gen), torch.randn(96, 1, generator=gen)
train_ds = TensorDataset(X[:64], Y[:64])
val_x, val_y = X[64 + rank :: world], Y[64 + rank :: world]
sampler = DistributedSampler(train_ds)
loader = DataLoader(train_ds, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.5)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e-3)
for epoch in range(16):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        val_loss = nn.functional.mse_loss(model.module(val_x), val_y)
    sched.step(val_loss)
    print(f"rank {rank} epoch {epoch} val {val_loss:.4f} lr {opt.param_groups[0]['lr']}", flush=True)
dist.destroy_process_group()
