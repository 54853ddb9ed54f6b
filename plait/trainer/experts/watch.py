"""Says when experts get no tokens any more, or have no room for all, once, and again when it is more."""

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


class DropWatch:
    """Follows how many choices of a step found their expert full, where a capacity was asked for."""

    def __init__(self) -> None:
        self._told = 0.0

    def add(self, step: int, dropped: int, choices: int) -> str:
        """The sentence for a person, empty where there is nothing new to say: nothing dropped, or less than twice the
        share that was told of. `choices` are those of all layers."""
        share = dropped / max(choices, 1)
        if not dropped or share < 2 * self._told:
            return ""
        self._told = share
        return (
            f"step {step}: {dropped} of {choices} choices of experts ({share:.1%}) found their expert full and were "
            "dropped, as model.expert_capacity says; a higher one drops fewer, and without it none is"
        )
