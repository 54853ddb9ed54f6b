"""When the next checkpoint, and the next copy of the state in memory, is due: after the plan's interval, or as often as
the measured costs allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import ceil
from statistics import median

from plait.units import Every, counted, format_duration

COPY_COST_SHARE = 0.01
"""Share of the time that copies may always take; of `Every.cost_share` they get what saving leaves, where that is
more."""
FIRST_AFTER_STEPS = 2
"""Steps before the first copy, whose cost is still unknown: the first of them is no measure of a step."""
_MEASURES = 9


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


class CopyPace:
    """Follows a rank's copies, which come every `every` steps or, where it has a `cost_share`, as seldom as that asks
    for; 0 steps: never."""

    def __init__(self, every: Every, *, step: int) -> None:
        assert every.unit == "steps"
        self._every, self._last = every, step
        self._steps_s, self._costs_s = deque[float](maxlen=_MEASURES), deque[float](maxlen=_MEASURES)
        self._every_steps = FIRST_AFTER_STEPS if every.cost_share is not None else round(every.value)
        self._said_steps = 0
        self._stepped_before = False

    @property
    def every_steps(self) -> int:
        """How many steps lie between two copies now, 0 where there are none."""
        return self._every_steps if self._every.value else 0

    def is_due(self, step: int) -> bool:
        """Whether to copy the state after this step."""
        return self._every.value > 0 and step - self._last >= self._every_steps

    def begun(self, step: int) -> None:
        """Take note that the state after this step is copied, and with it the next interval begins."""
        self._last = step

    def stepped(self, step_s: float) -> None:
        """Take note of how many seconds a step took; the first of a start, which compiles, is no measure."""
        if self._stepped_before:
            self._steps_s.append(step_s)
        self._stepped_before = True

    def copied(self, cost_s: float, saving_share: float) -> str | None:
        """Take note of the seconds for which a copy held up the slowest rank, and of the share of the time that saving
        takes.

        Returns a sentence for the log where the interval is now another one than was last said, by a factor of two.
        """
        self._costs_s.append(cost_s)
        total = self._every.cost_share
        if total is None or not self._steps_s:
            return None
        share = max(COPY_COST_SHARE, total - saving_share)
        cost_s, step_s = median(self._costs_s), median(self._steps_s)
        self._every_steps = max(1, ceil(cost_s / (share * step_s)))
        if self._said_steps / 2 < self._every_steps < 2 * self._said_steps:
            return None
        self._said_steps = self._every_steps
        taken = cost_s / (cost_s + self._every_steps * step_s)
        return (
            f"a copy of the state in memory took {format_duration(cost_s)}, so one comes every "
            f"{counted(self._every_steps, 'step', ',')}: {taken:.1%} of the time, and at most that many steps are lost "
            "when a worker dies (recover.state_every)"
        )
