"""Goyal's rule for a batch that grows with the workers: the rate grows with it, after a warm-up.

Goyal and others, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

WARM_EPOCHS, WARM_STEPS = 5, 500
"""Length of the warm-up: the rule's five passes over the data, or this many steps if they are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """The factor on all learning rates: from 1 to `workers` over `warm_steps` steps, in a straight line."""

    workers: int = 1
    warm_steps: int = 1

    def factor(self, step: int) -> float:
        """The factor for the step of this number, from 0."""
        return 1.0 + (self.workers - 1) * min(1.0, (step + 1) / self.warm_steps)


def goyal_rule(workers: int, steps_per_epoch: int | None) -> RateRule:
    """The rule for a batch that is `workers` times that of one."""
    warm = WARM_STEPS if steps_per_epoch is None else min(WARM_STEPS, WARM_EPOCHS * steps_per_epoch)
    return RateRule(workers=workers, warm_steps=max(1, warm))
