"""Says when experts get no tokens any more, once, and again when they are more."""

from __future__ import annotations

SETTLED_STEPS = 20
"""Before this step a router has hardly begun to learn."""


class IdleWatch:
    """Follows how many experts no token of a step chose."""

    def __init__(self) -> None:
        self._told = 0

    def add(self, step: int, idle: int, experts: int) -> str:
        """The sentence for a person, empty where there is nothing new to say. `experts` are those of all layers."""
        if step < SETTLED_STEPS or idle <= self._told:
            return ""
        self._told = idle
        return (
            f"step {step}: {idle} of {experts} experts got no token in this step, and an expert without tokens learns "
            "nothing; a higher model.expert_balance_rate, or a loss in model.expert_balance, spreads them"
        )
