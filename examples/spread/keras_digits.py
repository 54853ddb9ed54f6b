"""A Keras 3 model on its torch backend, with a loop of its own: python keras_digits.py [--steps 30].

Needs keras (pip install keras), which is no need of plait's."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

os.environ["KERAS_BACKEND"] = "torch"
import keras

DIGITS = Path(__file__).parents[1] / "data" / "digits.npz"


def digits() -> tuple[Tensor, Tensor]:
    """Images as float32 [n, 28, 28, 1] between 0 and 1, and their labels [n]."""
    with np.load(DIGITS) as files:
        return torch.from_numpy(files["images"]).unsqueeze(-1).float() / 255, torch.from_numpy(files["labels"]).long()


def loss_of(model: nn.Module, batch: list[Tensor]):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
steps = parser.parse_args().steps

keras.utils.set_random_seed(0)
data = torch.utils.data.TensorDataset(*digits())
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
run = plait.spread(model, optimizer, loss_sum=loss_of)

for step, batch in enumerate(run.batches(data, batch=64)):
    if step == steps:
        break
    loss = run.step(batch)
    print(f"step {step + 1}  loss {loss:.5f}")
