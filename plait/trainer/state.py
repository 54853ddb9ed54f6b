"""All that a resume needs besides weights and moments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where a run stands. Samples follow from seed and position alone, so the position is the whole data cursor."""

    step: int = 0
    """Optimizer updates done."""
    position: int = 0
    """Global number of the next training sequence, counted from the run's beginning over all epochs."""
    tokens: int = 0
    """Tokens that entered the loss, over all ranks."""
