"""The norm of a gradient, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def squares_of(gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """The sum of squares of all elements: 0-dim, float64; on this device if there is no gradient. A value to be summed
    over ranks must be on the same kind of device on all of them: otherwise one rank would wait in gloo for others in
    NCCL."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).to(torch.float64).square().sum()


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """The factor that scales gradients down to a norm of at most `limit`, as a tensor on the device; does not wait for
    it."""
    if limit is None:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)
