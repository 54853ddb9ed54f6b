import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LitRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.huber_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def fit(model, steps=9):
    rank = dist.get_rank()
    optimizer = model.module.configure_optimizers()
    gen = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(10, 5, generator=gen)
        batch = (x, torch.stack([x.sum(1), x.prod(1)], 1))
        optimizer.zero_grad()
        loss = model.module.training_step(batch)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    fit(DistributedDataParallel(LitRegressor()))
    dist.destroy_process_group()
