"""Rotary positions (Su et al. 2021): each pair of a head's numbers is turned by an angle that grows with the position.

A pair is number i and number i + head_width / 2, as in the published Llama, Mistral and Qwen weights on Hugging Face.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [B or 1, T, 1, head_width / 2]."""


class Rotary(nn.Module):
    """Answers each position's rotation; keeps one table a device and dtype, and no parameter."""

    def __init__(self, *, sequence: int, head_width: int, theta: float) -> None:
        super().__init__()
        self.sequence = sequence
        self.head_width = head_width
        self.theta = theta
        self._tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def forward(self, positions_bt: Tensor, dtype: torch.dtype) -> Rotation:
        key = (positions_bt.device, dtype)
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
            angles = torch.outer(torch.arange(self.sequence, dtype=torch.float64, device=device), turns)
            return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_bthd: Tensor, rotation: Rotation) -> Tensor:
    """Turn queries or keys by their positions' angles; computed in the rotation's dtype, answered in x's."""
    cos, sin = rotation
    first, second = x_bthd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bthd.dtype)
