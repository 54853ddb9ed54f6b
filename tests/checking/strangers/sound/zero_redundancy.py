"""ZeroRedundancyOptimizer over Adam, frozen first layer, ExponentialLR."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer as ZeRO
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    for p in net[0].parameters():
        p.requires_grad = False
    ddp = DDP(net)
    opt = ZeRO([p for p in ddp.parameters() if p.requires_grad], optimizer_class=torch.optim.Adam, lr=3e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
    data = TensorDataset(torch.randn(192, 10), torch.randint(0, 4, (192,)))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(ddp(x), y).backward()
            opt.step()
        sched.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
