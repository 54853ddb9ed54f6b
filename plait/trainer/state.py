"""The state of training that a resume needs besides weights and moments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Progress of a run. The samples follow from seed and position alone, so the position is the whole data cursor."""

    step: int = 0
    """Optimizer updates done."""
    position: int = 0
    """Global index of the next training sequence, counted from the beginning of the run over all epochs."""
    tokens: int = 0
    """Tokens that entered the loss, over all ranks."""


def past_skipped(state: TrainState, skipped_steps: Collection[int], batch_sequences: int) -> TrainState:
    """The state before its next step, which takes the batch after its own where it is one of `skipped_steps`."""
    if state.step + 1 not in skipped_steps:
        return state
    return replace(state, position=state.position + batch_sequences)
