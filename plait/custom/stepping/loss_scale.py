"""The factor on losses that keeps small gradients of float16 from becoming 0: torch's GradScaler, for all workers.

Micikevicius and others, "Mixed Precision Training", 2018, section 3.2. Gradients are global sums, so every worker comes
to the same factor without a message of its own.
"""

from __future__ import annotations

from plait.trainer.loss_scale import FIRST, GROWS_AFTER, LARGEST


class LossScale:
    """A power of two, which halves where a gradient is not finite, and doubles after many steps where all were."""

    def __init__(self, first: float = FIRST) -> None:
        self.factor = first
        self._finite_steps = 0

    def note(self, step: str) -> None:
        """Go on after a step whose gradients were "finite" or "skipped"."""
        if step == "skipped":
            self.factor, self._finite_steps = self.factor / 2, 0
            return
        self._finite_steps += 1
        if self._finite_steps == GROWS_AFTER:
            self.factor, self._finite_steps = min(LARGEST, self.factor * 2), 0

    def saved(self) -> list[float]:
        """What a resume needs, as JSON."""
        return [self.factor, self._finite_steps]

    def resume(self, saved: list[float]) -> None:
        """Go on as a saved run would have."""
        if len(saved) == 2:
            self.factor, self._finite_steps = float(saved[0]), int(saved[1])
