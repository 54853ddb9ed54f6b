"""A generator and a discriminator, each with its own optimizer, on handwritten digits:
python gan_digits.py [--steps 40]."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

DIGITS = Path(__file__).parents[1] / "data" / "digits.npz"
NOISE = 32


def real_digits() -> Tensor:
    """Images as float32 [n, 784] between -1 and 1."""
    with np.load(DIGITS) as files:
        return torch.from_numpy(files["images"]).float().flatten(1) / 127.5 - 1


def discriminator_loss(models: tuple[nn.Module, nn.Module], batch: list[Tensor]):
    (discriminator, generator), (real, noise) = models, batch
    fake = generator(noise).detach()
    return F.softplus(-discriminator(real)).sum() + F.softplus(discriminator(fake)).sum(), len(real)


def generator_loss(models: tuple[nn.Module, nn.Module], batch: list[Tensor]):
    (discriminator, generator), (_, noise) = models, batch
    return F.softplus(-discriminator(generator(noise))).sum(), len(noise)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps

torch.manual_seed(0)
real = real_digits()
data = torch.utils.data.TensorDataset(real, torch.randn(len(real), NOISE))
generator = nn.Sequential(
    nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()
)
discriminator = nn.Sequential(
    nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
models = (discriminator, generator)
optimizers = tuple(torch.optim.Adam(model.parameters(), lr=4e-4, betas=(0.5, 0.999)) for model in models)
run = plait.spread(models, optimizers, loss_sum=(discriminator_loss, generator_loss))

for step, batch in enumerate(run.batches(data, batch=48)):
    if step == steps:
        break
    losses = run.step(batch)
    print(f"step {step + 1}  discriminator {losses[0]:.5f}  generator {losses[1]:.5f}")
