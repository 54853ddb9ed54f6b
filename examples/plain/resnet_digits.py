"""A small ResNet reads handwritten digits, padded to 32 × 32: python resnet_digits.py [--steps 60]."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIGITS = Path(__file__).parents[1] / "data" / "digits.npz"


class Block(nn.Module):
    """Two convolutions and a shortcut that halves the picture."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, wider, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inner + self.norms[2](self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 32), Block(32, 64), Block(64, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def digits() -> tuple[Tensor, Tensor]:
    """Images as float32 [n, 1, 32, 32] between 0 and 1, and their labels [n]."""
    with np.load(DIGITS) as files:
        images, labels = torch.from_numpy(files["images"]), torch.from_numpy(files["labels"])
    return F.pad(images.unsqueeze(1).float() / 255, (2, 2, 2, 2)), labels.long()


def loss_of(model: nn.Module, batch: list[Tensor]):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=28)
steps = parser.parse_args().steps

torch.manual_seed(0)
images, labels = digits()
data = torch.utils.data.TensorDataset(images[:1800], labels[:1800])
model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)):
    if step == steps:
        break
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    print(f"step {step + 1}  loss {loss:.5f}")

model.eval()
with torch.no_grad():
    right = (model(images[1800:].to(next(model.parameters()).device)).argmax(1).cpu() == labels[1800:]).float().mean()
print(f"of 200 other digits {right:.0%} are right")
