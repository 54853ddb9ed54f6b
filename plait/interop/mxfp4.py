"""MXFP4, in which gpt-oss's experts are published: numbers of four bits, of which 32 share a power of two.

The OCP Microscaling formats, version 1.0: a number is a sign, two bits of exponent and one of fraction (E2M1), a scale
a byte of exponent (E8M0). A byte holds two numbers, the first in its lower half.

Legend: r rows, b bytes of a row, g groups of 32 numbers in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.interop.tensor_files import PACKED_GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT64_BIAS, _SCALE_BIAS, _FRACTION_BITS = 1023, 127, 52


def unpacked(codes_rb: Tensor, scales_rg: Tensor) -> Tensor:
    """The numbers [r, 2 × b] in float32, from two tensors of bytes; exact."""
    table = torch.tensor((*_MAGNITUDES, *(-one for one in _MAGNITUDES)))
    codes = codes_rb.int()
    numbers = torch.stack((table[codes & 15], table[codes >> 4]), dim=2).flatten(1)
    powers = ((scales_rg.long() + (_FLOAT64_BIAS - _SCALE_BIAS)) << _FRACTION_BITS).view(torch.float64).float()
    return (numbers.unflatten(1, (-1, PACKED_GROUP)) * powers.unsqueeze(2)).flatten(1)
