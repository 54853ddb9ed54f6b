"""The losses of pairs of answers, from the log-probabilities of both.

Of a pair, c and r are the log-probabilities of the chosen and the rejected answer: sums over their tokens. c₀ and r₀
are those that the reference gives, and c̄ and r̄ the means over an answer's own tokens.

DPO (Rafailov et al. 2023, 2305.18290, equation 7): the margin is m = beta · ((c − c₀) − (r − r₀)), the loss
−log σ(m). Without a reference c₀ = r₀ = 0. With label smoothing s (conservative DPO, Mitchell 2023) it is
−(1 − s) · log σ(m) − s · log σ(−m).

SimPO (Meng et al. 2024, 2405.14734, equation 6): m = beta · (c̄ − r̄), and the same loss of m − gamma.

ORPO (Hong et al. 2024, 2403.07691, equations 6 and 7): −c̄ − beta · log σ(log odds(c̄) − log odds(r̄)), where the odds of
x are eˣ / (1 − eˣ).

Legend: p pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

PairObjective = Literal["dpo", "orpo", "simpo"]
CHOSEN, REJECTED = 0, 1
"""Columns of a table of pairs."""
_LEAST_DOUBT = 2.0**-50
"""A mean log-probability of 0 would have infinite odds; float32 rounds those of sure answers to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """Which of the losses, and its numbers."""

    kind: PairObjective
    beta: float
    label_smoothing: float = 0.0
    margin: float = 0.0
    """SimPO's gamma."""
    compared_with: Literal["base", "none"]
    """Whether c₀ and r₀ are what the run's first weights give, or 0."""

    def of(self, scores_p2: Tensor, tokens_p2: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and margins of rewards, [p] each, of the sums c and r (of DPO less c₀ and r₀) over this many tokens.
        Finite also where an answer has no tokens."""
        means_p2 = scores_p2 / tokens_p2.clamp(min=1)
        rewards_p2 = self.beta * (scores_p2 if self.kind == "dpo" else means_p2)
        margins_p = rewards_p2[:, CHOSEN] - rewards_p2[:, REJECTED]
        if self.kind == "orpo":
            odds_p2 = _log_odds(means_p2)
            ratio_p = F.logsigmoid(odds_p2[:, CHOSEN] - odds_p2[:, REJECTED])
            return -means_p2[:, CHOSEN] - self.beta * ratio_p, margins_p
        return self._smoothed(margins_p - self.margin if self.kind == "simpo" else margins_p), margins_p

    def _smoothed(self, margins_p: Tensor) -> Tensor:
        losses_p = -F.logsigmoid(margins_p)
        if not self.label_smoothing:
            return losses_p
        return (1 - self.label_smoothing) * losses_p - self.label_smoothing * F.logsigmoid(-margins_p)


def _log_odds(means_p2: Tensor) -> Tensor:
    means_p2 = means_p2.clamp(max=-_LEAST_DOUBT)
    return means_p2 - torch.log(-torch.expm1(means_p2))
