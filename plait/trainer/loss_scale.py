"""The scale of a float16 run's gradients, which would otherwise underflow or overflow float16.

Micikevicius et al. 2018 ("Mixed Precision Training", section 3.2), with the rule and the constants of torch's
GradScaler: the scale halves after a gradient that is not finite, and doubles after 2,000 finite steps in a row.

Note [scaled where they begin]: plait's losses are sums; the division by the global number of tokens comes after
everything has been added. GradScaler's initial scale is meant for a mean. So gradients start multiplied by scale /
2**k, where 2**k is the number of tokens per step rounded up to a power of two. Since the scale is a power of two as
well, scaled numbers keep their digits in every sum over micro-batches and ranks, and dividing by it gives the same bits
on each layout. Whether gradients are finite is read off the global norm, which all ranks have, so they agree without
further communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, LARGEST = 2.0**16, 2.0**40
GROWS_AFTER = 2000
"""Number of finite steps in a row after which the scale doubles."""


class DeviceLossScale:
    """A run's scale, on its device. All ranks have the same values.

    `tokens` is the number of tokens (or of pairs) per step: roughly the divisor of the sum of its losses.
    """

    def __init__(self, tokens: int, device: torch.device, first: float = FIRST) -> None:
        self._rounded_tokens = 2.0 ** max(0, tokens - 1).bit_length()
        # One tensor for the whole run, so that a recorded step finds it (step_graph.py).
        self.state = torch.tensor([first, 0.0, 0.0], dtype=torch.float32, device=device)
        """[scale, steps in a row with finite gradients since it changed, updates skipped since the run began]."""

    @property
    def factor(self) -> Tensor:
        """The factor of gradients of loss sums; 0-dim, float32. See Note [scaled where they begin]."""
        return self.state[0] / self._rounded_tokens

    @torch.no_grad()
    def judge(self, norm: Tensor) -> Tensor:
        """Update the scale after a step with this global gradient norm. Returns [scale of the step, updates skipped so
        far]. Does not wait for the device."""
        scale, finite_steps, skipped = self.state.unbind()
        finite = torch.isfinite(norm)
        of_step = scale.clone()
        grows = finite_steps + 1 >= GROWS_AFTER
        grown = torch.where(grows, (2 * scale).clamp(max=LARGEST), scale)
        following = [
            torch.where(finite, grown, scale / 2),
            torch.where(finite & ~grows, finite_steps + 1, 0.0),
            skipped + (~finite).to(skipped.dtype),
        ]
        self.state.copy_(torch.stack(following))
        return torch.stack([of_step, self.state[2]])

    @torch.no_grad()
    def resume(self, saved: Tensor) -> None:
        """Continue from the `state` in a checkpoint, or of another assembly of the same run."""
        self.state.copy_(saved)
