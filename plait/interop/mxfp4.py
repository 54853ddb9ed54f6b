"""MXFP4, in which gpt-oss's experts are published: numbers of four bits, of which 32 share a power of two.

The OCP Microscaling formats, version 1.0: a number is a sign, two bits of exponent and one of fraction (E2M1), a scale
a byte of exponent (E8M0). A byte holds two numbers, the first in its lower half.

Legend: r rows, b bytes of a row, g groups of 32 numbers in it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from plait.interop.tensor_files import PACKED_GROUP

NUMBERS_BYTES = 8
"""Bytes of the two float32 numbers that a byte holds."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT64_BIAS, _SCALE_BIAS, _FRACTION_BITS = 1023, 127, 52


def unpacked(codes_rb: Tensor, scales_rg: Tensor) -> Tensor:
    """The numbers [r, 2 × b] in float32, from two tensors of bytes; exact. Takes half as much memory again as the
    result."""
    numbers = torch.index_select(_pairs(), 0, codes_rb.reshape(-1).int()).view(torch.float32)
    powers = ((scales_rg.long() + (_FLOAT64_BIAS - _SCALE_BIAS)) << _FRACTION_BITS).view(torch.float64).float()
    groups = numbers.view(*scales_rg.shape, PACKED_GROUP).mul_(powers.unsqueeze(2))
    return groups.flatten(1)


@cache
def _pairs() -> Tensor:
    """The two numbers of each byte, packed in 64 bits."""
    table, bytes_ = torch.tensor((*_MAGNITUDES, *(-one for one in _MAGNITUDES))), torch.arange(256)
    return torch.stack((table[bytes_ & 15], table[bytes_ >> 4]), dim=1).view(torch.int64).view(-1)
