"""Accuracy over all ranks: counts are summed, the validation set is divided by DistributedSampler."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 2, generator=g)
        self.y = (self.x.norm(dim=1) > 1.2).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            correct[0] += (model(x).argmax(1) == y).sum()
            correct[1] += len(y)
    dist.all_reduce(correct)
    model.train()
    return (correct[0] / correct[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val = Points(128, 1), Points(37, 2)
    train_sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=8, sampler=train_sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=DistributedSampler(val, shuffle=False))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        acc = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
