"""Dropout of what adapters read. Which numbers are zero is a pure function of seed, layer, token and place in it.

PEFT draws a mask from the process's generator, so that it depends on the batch's cut and on the number of processes.
Here each number is hashed: the same token loses the same numbers on every layout, in every micro-batch, when a layer is
computed again, and after a run was resumed. All are integers of 32 bits that wrap, so every device has the same bits.

Legend: n tokens, i numbers of a layer's input.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""Multipliers of Wellons' lowbias32 (2018), a hash of 32 bits with little bias."""
_AT_ONCE = 2**16
"""Numbers that a processor hashes at a time: they stay in a core's cache."""


def token_noise(numbers_n: Tensor, seed: int) -> Tensor:
    """A hash of each token's number in the run: int32 [n]."""
    low_n, high_n = ((part & 0xFFFFFFFF) for part in (numbers_n, numbers_n >> 32))
    return _mixed(_mixed(_wrapped(high_n) ^ _key(f"seed {seed}")) ^ _wrapped(low_n))


def layer_noise(noise_n: Tensor, layer: int) -> Tensor:
    """The tokens' hashes in a layer."""
    return _mixed(noise_n ^ _key(f"layer {layer}"))


def input_salt(name: str) -> int:
    """What tells the layers' products apart that read the same tokens: a hash of a product's name within its layer."""
    return _key(name)


def is_dropped(noise_n: Tensor, *, salt: int, first: int, width: int, rate: float) -> Tensor:
    """Which numbers are zero, bool [n, i]: `width` ones from number `first` on, each with the probability `rate`."""
    columns_i = torch.arange(first, first + width, dtype=torch.int32, device=noise_n.device)
    hash_ni = noise_n.unsqueeze(1) ^ _mixed(columns_i ^ salt)
    hash_ni.mul_(_FIRST)
    hash_ni.bitwise_xor_((hash_ni >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return hash_ni < round(rate * 2**32) - 2**31


def without_dropped(x_ni: Tensor, noise_n: Tensor, *, salt: int, first: int, rate: float) -> Tensor:
    """A copy of `x` with zeros where they are dropped; all others stay as they are, and are not scaled."""
    width = x_ni.shape[1]
    if len(noise_n) < len(x_ni):  # rows of padding behind the last token
        noise_n = F.pad(noise_n, (0, len(x_ni) - len(noise_n)))
    if x_ni.device.type != "cpu" or torch.compiler.is_compiling() or (x_ni.requires_grad and torch.is_grad_enabled()):
        return x_ni.masked_fill(is_dropped(noise_n, salt=salt, first=first, width=width, rate=rate), 0.0)
    kept_ni = torch.empty_like(x_ni)
    rows = max(1, _AT_ONCE // max(1, width))
    for x, kept, noise in zip(x_ni.split(rows), kept_ni.split(rows), noise_n.split(rows), strict=True):
        gone = is_dropped(noise, salt=salt, first=first, width=width, rate=rate)
        torch.where(gone, torch.zeros((), dtype=x.dtype), x, out=kept)
    return kept_ni


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(x: Tensor) -> Tensor:
    """Numbers from 0 to 2^32 - 1 as int32 with the same bits."""
    return ((x ^ 2**31) - 2**31).to(torch.int32)


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little", signed=True)
