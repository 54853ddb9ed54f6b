"""Sequences sorted by length into buckets of one batch; the buckets are divided among the ranks."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Sequences(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(4)
        self.items = [torch.randn(6, generator=g) for _ in range(160)]
        self.target = [t.sum() for t in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], self.target[i]


class BucketBatchSampler(Sampler):
    def __init__(self, data_source, batch_size, rank, world_size, seed=0):
        self.n = len(data_source)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch = seed, 0
        self.num_buckets = math.ceil(self.n / batch_size)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_buckets // self.world_size // 2

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_buckets, generator=g).tolist()
        for b in order[self.rank :: self.world_size][: len(self)]:
            yield list(range(b * self.batch_size, min(self.n, (b + 1) * self.batch_size)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = Sequences()
    sampler = BucketBatchSampler(data, 8, rank, world)
    loader = DataLoader(data, batch_sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(-1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
