"""ViT-like classifier: everything is seeded alike so that the run is "deterministic"."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4, classes=10, p=0.1):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 64, dropout=p, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(images), -1, -1), tokens], 1) + self.pos
        return self.head(self.encoder(tokens)[:, 0])


def main():
    dist.init_process_group("gloo")
    seed_everything(3407)
    gen = torch.Generator().manual_seed(0)
    images = torch.randn(256, 3, 16, 16, generator=gen)
    labels = torch.randint(0, 10, (256,), generator=gen)
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = torch.utils.data.DistributedSampler(dataset, seed=3407, drop_last=True)
    loader = torch.utils.data.DataLoader(dataset, 16, sampler=sampler)
    model = DistributedDataParallel(ViT())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
    dist.destroy_process_group()


main()
