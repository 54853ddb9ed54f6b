"""Fine-tunes a head and the convolutions; BatchNorm stays in evaluation mode."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.head = nn.Linear(6, 4)

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
                m.weight.requires_grad = m.bias.requires_grad = False
        return self

    def forward(self, x):
        return self.head(self.features(x).mean((-2, -1)))


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
net.train()
model = DDP(net)
opt = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3, amsgrad=True)
ds = TensorDataset(torch.randn(160, 1, 9, 9), torch.randint(0, 4, (160,)))
sampler = DistributedSampler(ds)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in DataLoader(ds, batch_size=10, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
dist.destroy_process_group()
