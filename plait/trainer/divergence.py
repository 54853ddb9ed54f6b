"""Whether a run still learns: finds steps whose numbers are bad, and ends a run in which they stay so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from plait.errors import RunFailed
from plait.report.metrics import EvalReport, StepReport

BAD_STEPS_AT_MOST = 10
"""Steps in a row without a finite loss and gradient after which a run has diverged: single ones happen, and their
updates are skipped."""


SPIKE_WINDOW_STEPS = 128
"""A spike is told by the steps before it, this many at most."""
_FEWEST_STEPS = 32
"""Before this many steps nothing is called a spike: losses and gradients of a beginning run change fast."""
_GRADIENT_FACTOR = 10.0
_LOSS_FACTOR, _LEAST_JUMP_NATS = 5.0, 1.0

# Note [a spike]: a gradient's norm that is more than ten times the largest, or a loss that is above the largest by more
# than 1 nat and by more than five times what that one is above the median, of the last 128 steps. The largest of so
# many grows with the noise of a run, also where its tail is long, and follows a loss that rises step by step. So a
# healthy run gives no alarm, at the price that small spikes are none.


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """A step whose numbers are not those of a run that learns; `what` says which, in words."""

    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberGuard:
    """Which steps are judged: those after `judged_after`; `losses` and `norms` are those of the last steps before this
    start, oldest first. The same on every rank."""

    judged_after: int
    losses: Sequence[float] = ()
    norms: Sequence[float] = ()


class NumberWatch:
    """Finds bad steps in a start's reports, in which every rank has the same sums, so that all find the same ones."""

    def __init__(self, guard: NumberGuard) -> None:
        self.first_bad: BadStep | None = None
        self._judged_after = guard.judged_after
        self._losses = deque(filter(isfinite, guard.losses), SPIKE_WINDOW_STEPS)
        self._norms = deque(filter(isfinite, guard.norms), SPIKE_WINDOW_STEPS)

    def add(self, report: StepReport) -> None:
        """Judge the next step, and keep it as `first_bad` if it is."""
        bad = self.judge(report)
        self.first_bad = self.first_bad or bad

    def judge(self, report: StepReport) -> BadStep | None:
        """The fault in the next step; None if there is none, or if it is to be ignored. See Note [a spike]."""
        if report.is_skipped:
            return None
        if report.is_finite:
            what = self._spike(report.loss, report.grad_norm)
            self._losses.append(report.loss)
            self._norms.append(report.grad_norm)
        else:
            what = not_finite_text(report)
        if not what or report.step <= self._judged_after:
            return None
        return BadStep(step=report.step, what=what)

    def _spike(self, loss: float, norm: float) -> str:
        if min(len(self._losses), len(self._norms)) < _FEWEST_STEPS:
            return ""
        top, top_norm = max(self._losses), max(self._norms)
        if loss > top + _LEAST_JUMP_NATS and loss > top + _LOSS_FACTOR * (top - median(self._losses)):
            return f"loss {loss:.4g} after at most {top:.4g} in the {len(self._losses)} steps before"
        if norm > _GRADIENT_FACTOR * top_norm > 0:
            return f"gradient norm {norm:.4g} after at most {top_norm:.4g} in the {len(self._norms)} steps before"
        return ""


def not_finite_text(report: StepReport) -> str:
    """The number of a step that is not finite."""
    return f"loss {report.loss}" if not isfinite(report.loss) else f"gradient norm {report.grad_norm}"


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
        if report.is_finite or report.is_skipped:
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
        return (
            f"the run diverged: no finite loss and gradient since step {first.step} ({not_finite_text(first)}), so it "
            f"was ended after step {last.step}; the likely cause is a learning rate that is too high ({first.lr:g} in "
            f"that step); {self._checkpoint_words(first.step)}; choose a lower optimizer.lr and another run.name"
        )

    def _checkpoint_words(self, first_bad_step: int) -> str:
        if not self._saved_step:
            return "there is no checkpoint yet"
        if self._saved_step + 1 < first_bad_step:
            return f"the last good checkpoint is step-{self._saved_step}"
        newest = f"the newest checkpoint, step-{self._saved_step}, already leads to it"
        return f"{newest}: delete it to use step-{self._good_step}, the last good one" if self._good_step else newest
