"""Small image classifier with DDP: sampler with set_epoch, label smoothing, cosine schedule, GroupNorm."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FakeCIFAR(Dataset):
    def __init__(self, train=True, n=101):
        self.n, self.train = n, train

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx + 10_000 * self.train)
        return torch.randn(3, 8, 8, generator=g), idx % 10


def conv_block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True), nn.MaxPool2d(2))


def validate(model, rank, world):
    """Every rank takes each world-th image, so that none is counted twice."""
    model.eval()
    data = FakeCIFAR(train=False, n=33)
    hits = total = 0
    with torch.inference_mode():
        for i in range(rank, len(data), world):
            x, y = data[i]
            hits += int(model.module(x[None]).argmax(1).item() == y)
            total += 1
    t = torch.tensor([hits, total])
    dist.all_reduce(t)
    model.train()
    return t[0].item() / t[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("-j", "--workers", default=2, type=int)
    ap.add_argument("-b", "--batch-size", default=8, type=int)
    ap.add_argument("--epochs", default=2, type=int)
    args = ap.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    model = nn.Sequential(conv_block(3, 8), conv_block(8, 16), nn.Flatten(), nn.Linear(64, 10)).to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    train_set = FakeCIFAR()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, target in loader:
            images, target = images.to(device, non_blocking=True), target.to(device)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        acc = validate(model, rank, world)
        if rank == 0:
            print(f"Epoch {epoch} loss {loss.item():.3f} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
