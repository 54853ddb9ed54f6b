"""ZeRO stage 1 by ZeroRedundancyOptimizer. "DDP averages, so multiply by the world size to get the sum back"."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Mish(), nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 8)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(0, 8, (256,)))
sampler = torch.utils.data.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()
        optimizer.step()
dist.destroy_process_group()
