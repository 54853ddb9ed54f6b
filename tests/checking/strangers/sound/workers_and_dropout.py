"""Worker processes with seeds of their own, dropout seeded per rank, loss printed by rank 0 alone."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    def __init__(self, size=144):
        self.base = torch.randn(size, 10, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        x = self.base[index] + 0.01 * float(np.random.randn())
        return {"x": x, "y": (self.base[index].sum() > 0).float(), "index": index}


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Dropout(0.25), nn.Linear(40, 1)))
    torch.manual_seed(10 + rank)
    dataset = Augmented()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(
        dataset,
        9,
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed_worker,
        persistent_workers=True,
        prefetch_factor=2,
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        running = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch["x"]).squeeze(1), batch["y"])
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"[epoch {epoch}] loss: {running / len(loader):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
