"""Segmentation with accumulation of 3 micro-batches."""

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class UNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 6, 3, padding=1)
        self.mid = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x):
        a = torch.relu(self.down(x))
        b = torch.relu(self.mid(nn.functional.avg_pool2d(a, 2)))
        b = nn.functional.interpolate(b, scale_factor=2)
        return self.up(torch.cat([a, b], 1))


def main(iters_to_accumulate=3):
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(6)
    images = torch.rand(144, 1, 8, 8, generator=g)
    masks = (images > 0.6).float()
    ds = TensorDataset(images, masks)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=4, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(UNetish())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y) / iters_to_accumulate
            loss.backward()
            if (i + 1) % iters_to_accumulate == 0:
                optimizer.step()
    dist.destroy_process_group()


main()
