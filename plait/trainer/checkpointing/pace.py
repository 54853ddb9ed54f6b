"""When the next checkpoint is due: after the plan's interval, or later where saving would take too much of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from plait.units import Every, format_duration


class CheckpointPace:
    """Follows a rank's saves, which come every `every` or, where it has a `cost_share`, as seldom as that asks for;
    `clock` counts seconds."""

    def __init__(self, every: Every, *, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._step, self._at = step, clock()
        self._least_s = 0.0
        self._saved_step, self._saved_at, self._has_saved = step, clock(), False
        self._failures, self._said_failures = 0, 0
        self._cost_s, self._between_s = 0.0, 0.0
        self._said_s = every.value

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self._every.value == 0:
            return False
        passed_s = self._clock() - self._at
        if self._every.unit == "steps":
            return step - self._step >= self._every.value and passed_s >= self._least_s
        return passed_s >= max(self._every.value, self._least_s)

    @property
    def share(self) -> float:
        """The share of the time that the last save took, as far as known: of the time since the one before."""
        return min(1.0, self._cost_s / self._between_s) if self._between_s > 0 else 0.0

    def begun(self, step: int) -> None:
        """Take note that a save after this step begins, and with it the next interval."""
        now_s = self._clock()
        self._between_s = max(now_s - self._at, self._every.value if self._every.unit == "seconds" else 0.0)
        self._step, self._at = step, now_s

    def saved(self, step: int, cost_s: float) -> str | None:
        """Take note of a save after this step, which took so many seconds, and that the next interval begins now; the
        sentence is `cost_known`'s."""
        self.begun(step)
        return self.cost_known(step, cost_s)

    def failed(self, sentence: str) -> str | None:
        """Take note that a save failed, as this sentence says; returns a warning for the log with the age of the newest
        checkpoint, after the first, second, fourth, eighth, … failure in a row."""
        self._failures += 1
        if self._failures < 2 * self._said_failures:
            return None
        self._said_failures = self._failures
        why, age = sentence.partition(";")[0], format_duration(self._clock() - self._saved_at)
        newest = f"the newest checkpoint is that of step {self._saved_step}, {age} old"
        if not self._has_saved:
            newest = f"nothing was saved since this start began at step {self._saved_step}, {age} ago"
        return f"warning  {why}; {newest}; training goes on, and saving is tried again whenever it is due"

    def cost_known(self, step: int, cost_s: float) -> str | None:
        """Take note that the save after this step went well, and of how many seconds it took.

        Returns a sentence for the log where the interval is now another one than was last said, by a factor of two.
        """
        self._saved_step, self._saved_at, self._has_saved = step, self._clock(), True
        self._failures = self._said_failures = 0
        self._cost_s = cost_s
        share = self._every.cost_share
        if share is None:
            return None
        self._least_s = cost_s / share
        interval_s = max(self._every.value, self._least_s)
        if self._said_s / 2 < interval_s < 2 * self._said_s:
            return None
        self._said_s = interval_s
        return (
            f"saving took {format_duration(cost_s)}, so the next checkpoint comes after {format_duration(interval_s)}: "
            f"at most {share:.0%} of the time goes to saving (checkpoint.every sets another interval)"
        )
