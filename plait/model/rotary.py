"""Rotary positions (Su et al. 2021): each pair of a head's numbers is turned by an angle that grows with the position.

A pair is number i and number i + head_width / 2, as in the published Llama, Mistral and Qwen weights on Hugging Face.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.model.rope_scaling import RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [B or 1, T, 1, head_width / 2]."""


class Rotary(nn.Module):
    """Computes the rotation of each position; caches one table per device and dtype, and has no parameters."""

    def __init__(self, *, sequence: int, head_width: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.sequence = sequence
        self.head_width = head_width
        self.theta = theta
        self.scaling = scaling
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def forward(self, positions_bt: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for a stream of the given dtype, itself in float32 at least."""
        key = (positions_bt.device, torch.promote_types(dtype, torch.float32))
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        cos, sin = self._tables[key]
        return cos[positions_bt].unsqueeze(2), sin[positions_bt].unsqueeze(2)

    def _table(self, device: torch.device, dtype: torch.dtype) -> Rotation:
        # Angles in float64: at position 100,000 a float32 product is off by a hundredth of a turn. Outside of inference
        # mode, so that a table made while sampling may serve training.
        with torch.inference_mode(False):
            pairs = torch.arange(0, self.head_width, 2, dtype=torch.float64, device=device)
            turns = self.theta ** (-pairs / self.head_width)
            scale = 1.0
            if self.scaling is not None:
                plain = [self.theta ** (-pair / self.head_width) for pair in range(0, self.head_width, 2)]
                turns = torch.tensor(self.scaling.stretch(plain, self.theta, self.sequence), dtype=torch.float64).to(
                    device
                )
                scale = self.scaling.table_scale
            angles = torch.outer(torch.arange(self.sequence, dtype=torch.float64, device=device), turns)
            return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x_bthd: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys by their positions' angles."""
    # On CPUs each of the plain formula's nine operations is a pass through memory, forward and again backward.
    if x_bthd.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Rotate.apply(x_bthd, *rotation)
    cos, sin = rotation
    first, second = x_bthd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bthd.dtype)


def rotate_first(x_bthd: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first numbers of each head, as many as the rotation has, and leave the others as they are."""
    width = 2 * rotation[0].shape[-1]
    if width == x_bthd.shape[-1]:
        return rotate(x_bthd, rotation)
    return torch.cat((rotate(x_bthd[..., :width], rotation), x_bthd[..., width:]), dim=-1)


def rotate_first_pairs(x_bthd: Tensor, rotation: Rotation) -> Tensor:
    """The same where a pair is two numbers side by side (GLM-4); see `rotate_pairs`."""
    width = 2 * rotation[0].shape[-1]
    turned = rotate_pairs(x_bthd[..., :width], rotation)
    return torch.cat((turned, x_bthd[..., width:]), dim=-1) if width < x_bthd.shape[-1] else turned


def rotate_pairs(x_bthd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pairs of two numbers side by side, as in DeepSeek's weights. The first numbers of all pairs come
    out in front, in queries and keys alike: a score does not ask for the order."""
    return rotate(x_bthd.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rotation)


class _Rotate(torch.autograd.Function):
    """The rotation; its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, sin, -1), None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (turned_first, turned_second) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=direction)
    return turned
