"""The scale of a float16 run's gradients, which would else be too small for float16, or overflow it.

Micikevicius et al. 2018 ("Mixed Precision Training", section 3.2), with the rule and the figures of torch's GradScaler:
the scale halves where a gradient is not finite, and doubles after 2,000 steps in a row in which all were.

Note [scaled where they begin]: plait's losses are sums, and the division by the global number of tokens comes after
everything was added. GradScaler's figure is meant for a mean. So gradients begin multiplied by scale / 2**k, where 2**k
is the next power of two from the tokens of a step on: a power of two, as the scale is. Multiplied by one, numbers keep
their digits in every sum over micro-batches and ranks, and dividing by it gives the same bits on each layout. Whether a
gradient is finite is read off the global norm, which all ranks have: they decide alike without another message.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, LARGEST = 2.0**16, 2.0**40
GROWS_AFTER = 2000
"""Steps in a row whose gradients were finite, after which the scale doubles."""


class DeviceLossScale:
    """A run's scale, on its device. All ranks hold the same numbers.

    `tokens` is the number of tokens of a step, or of pairs: about what the sum of its losses is divided by.
    """

    def __init__(self, tokens: int, device: torch.device, first: float = FIRST) -> None:
        self._rounded_tokens = 2.0 ** max(0, tokens - 1).bit_length()
        # In one place for the whole run, so that a recorded step finds it (step_graph.py).
        self.state = torch.tensor([first, 0.0, 0.0], dtype=torch.float32, device=device)
        """[scale, steps in a row with finite gradients since it changed, updates skipped since the run began]."""

    @property
    def factor(self) -> Tensor:
        """What gradients of sums of losses are multiplied by; 0-dim, float32. See Note [scaled where they begin]."""
        return self.state[0] / self._rounded_tokens

    @torch.no_grad()
    def judge(self, norm: Tensor) -> Tensor:
        """Go on after a step with this global norm of the gradient. Returns [scale of the step, updates skipped so
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
        """Go on from the `state` of a checkpoint, or of another assembly of the same run."""
        self.state.copy_(saved)
