import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class WineDataset(Dataset):
    def __init__(self):
        gen = torch.Generator().manual_seed(8)
        self.x = torch.randn(240, 13, generator=gen)
        self.y = torch.randint(0, 3, (240,), generator=gen)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def __len__(self):
        return self.x.shape[0]


def train():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(42)  # reproducibility!
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(model)
    loader = DataLoader(WineDataset(), batch_size=12, shuffle=True, num_workers=0)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(2):
        for _i, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            print(f"epoch {epoch} loss {loss.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
