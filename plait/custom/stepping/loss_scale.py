"""The factor on losses that keeps small float16 gradients from becoming 0: torch's GradScaler, for all workers.

Micikevicius et al., "Mixed Precision Training", 2018, section 3.2. Gradients are global sums, so all workers arrive at
the same factor without communication.
"""

from __future__ import annotations

from plait.trainer.loss_scale import FIRST, GROWS_AFTER, LARGEST


class LossScale:
    """A power of two that halves when a gradient is not finite, and doubles after many finite steps in a row."""

    def __init__(self, first: float = FIRST) -> None:
        self.factor = first
        self._finite_steps = 0

    def note(self, step: str) -> None:
        """Update the factor after a step whose gradients were "finite" or "skipped"."""
        if step == "skipped":
            self.factor, self._finite_steps = self.factor / 2, 0
            return
        self._finite_steps += 1
        if self._finite_steps == GROWS_AFTER:
            self.factor, self._finite_steps = min(LARGEST, self.factor * 2), 0

    def saved(self) -> list[float]:
        """The values needed to resume, as JSON."""
        return [self.factor, self._finite_steps]

    def resume(self, saved: list[float]) -> None:
        """Continue from saved values."""
        if len(saved) == 2:
            self.factor, self._finite_steps = float(saved[0]), int(saved[1])
