"""First values of the weights: a pure function of the seed and each weight's name, whatever the layout.

The draws are uniform and scaled by one multiplication, so that every kind of processor rounds them alike.
"""

from __future__ import annotations

from hashlib import blake2b
from math import prod, sqrt

import torch
from torch import Tensor

from plait.model.gpt import GPT
from plait.model.names import pattern_of
from plait.model.shape import ModelShape, weight_sizes

_INTO_STREAM = ("attention.o.weight", "feedforward.down.weight")


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """Fill every parameter of a whole model, also one that was built on the meta device and emptied onto a real one."""
    for name, parameter in model.named_parameters():
        parameter.copy_(first_value(name, model.shape, seed))


def first_value(name: str, shape: ModelShape, seed: int) -> Tensor:
    """The whole first value of one weight in float32 on the CPU; a rank that holds a part cuts its part from it."""
    sizes = weight_sizes(shape)[name]
    if name.endswith(".bias"):
        return torch.zeros(sizes)
    if len(sizes) == 1:
        return torch.ones(sizes)
    key = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    uniform = torch.rand(prod(sizes), generator=generator).sub_(0.5)
    return uniform.mul_(first_std(name, shape) * sqrt(12)).view(sizes)


def first_std(name: str, shape: ModelShape) -> float:
    """Standard deviation of a matrix's first values: 0.02, less where a layer adds to the stream (GPT-2)."""
    scale = 0.02
    return scale / sqrt(2 * shape.layers) if pattern_of(name).endswith(_INTO_STREAM) else scale
