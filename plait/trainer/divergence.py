"""Whether a run still learns: ends one whose losses or gradients have stopped being finite numbers."""

from __future__ import annotations

from math import isfinite

from plait.errors import RunFailed
from plait.report.metrics import StepReport

BAD_STEPS_AT_MOST = 10
"""Steps in a row without a finite loss and gradient after which a run has diverged: single ones happen, and their
updates are skipped."""


class DivergenceWatch:
    """Follows the reports of one start, from `saved_step` on (0: no checkpoint).

    Reports hold sums over all ranks, so every rank comes to the same answers at the same step.
    """

    def __init__(self, saved_step: int) -> None:
        self._saved_step = saved_step
        self._bad: list[StepReport] = []
        self._last: StepReport | None = None

    def add(self, report: StepReport) -> None:
        """Take the report of the next step."""
        self._last = report
        if isfinite(report.loss) and isfinite(report.grad_norm):
            self._bad.clear()
        else:
            self._bad.append(report)

    def saved(self, step: int) -> None:
        """A checkpoint was written after this step."""
        self._saved_step = step

    @property
    def loss_is_finite(self) -> bool:
        """Whether the last step had a finite loss, so that its weights may be saved."""
        return self._last is None or isfinite(self._last.loss)

    def end_if_diverged(self, *, run_ends: bool) -> None:
        """Raise RunFailed after too many bad steps in a row, or where the run ends without a finite loss: its weights
        are then worth nothing."""
        if len(self._bad) >= BAD_STEPS_AT_MOST or (run_ends and not self.loss_is_finite):
            raise RunFailed(self._sentence())

    def _sentence(self) -> str:
        first, last = self._bad[0], self._bad[-1]
        what = f"loss {first.loss}" if not isfinite(first.loss) else f"gradient norm {first.grad_norm}"
        return (
            f"the run diverged: no finite loss and gradient since step {first.step} ({what}), so it was ended after "
            f"step {last.step}; the likely cause is a learning rate that is too high ({first.lr:g} in that step); "
            f"{self._checkpoint_words(first.step)}; choose a lower optimizer.lr and another run.name"
        )

    def _checkpoint_words(self, first_bad_step: int) -> str:
        if not self._saved_step:
            return "there is no checkpoint yet"
        if self._saved_step + 1 < first_bad_step:
            return f"the last good checkpoint is step-{self._saved_step}"
        return f"the newest checkpoint, step-{self._saved_step}, already leads to it, an older one may not"
