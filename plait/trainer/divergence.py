"""Whether a run still learns: ends one whose losses or gradients have stopped being finite numbers."""

from __future__ import annotations

from math import isfinite

from plait.errors import RunFailed
from plait.report.metrics import EvalReport, StepReport

BAD_STEPS_AT_MOST = 10
"""Steps in a row without a finite loss and gradient after which a run has diverged: single ones happen, and their
updates are skipped."""


class DivergenceWatch:
    """Follows the reports of one start, from `saved_step` on (0: no checkpoint).

    Reports hold sums over all ranks, so every rank comes to the same answers at the same step. A checkpoint holds the
    weights after its step, whose loss nobody has seen yet: it is proven by a later step or evaluation with a finite
    result, and until then the checkpoints before it stay.
    """

    def __init__(self, saved_step: int) -> None:
        self._saved_step = saved_step
        self._proven_step = 0
        """The last step whose weights gave finite results."""
        self._good_step = 0
        """The newest proven checkpoint before `saved_step`; 0: none was written in this start."""
        self._old_ones_stay = saved_step > 0
        self._bad: list[StepReport] = []
        self._last: StepReport | None = None

    def add(self, report: StepReport) -> None:
        """Take the report of the next step."""
        self._last = report
        if report.is_finite:
            self._bad.clear()
            self._proven_step = report.step - 1  # updates of the bad steps before it were skipped
        else:
            self._bad.append(report)

    def evaluated(self, report: EvalReport) -> None:
        """Take the held-out loss of the newest weights."""
        if isfinite(report.eval_loss):
            self._proven_step = report.step

    def saved(self, step: int) -> None:
        """A checkpoint was written after this step."""
        if self._is_newest_proven:
            self._good_step = self._saved_step
        self._saved_step, self._old_ones_stay = step, True

    def pruned(self) -> None:
        """Old checkpoints were deleted."""
        self._old_ones_stay = False

    @property
    def may_prune(self) -> bool:
        """Whether old checkpoints are there that the newest one, now proven, replaces."""
        return self._old_ones_stay and self._is_newest_proven

    @property
    def _is_newest_proven(self) -> bool:
        return 0 < self._saved_step <= self._proven_step

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
        newest = f"the newest checkpoint, step-{self._saved_step}, already leads to it"
        return f"{newest}: delete it to use step-{self._good_step}, the last good one" if self._good_step else newest
