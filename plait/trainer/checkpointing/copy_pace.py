"""After how many steps the state is copied into memory again: as few as the measured costs allow."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

from plait.units import Every, counted, format_duration

COPY_COST_SHARE = 0.01
"""Share of the time that copies may always take; of `Every.cost_share` they get what saving leaves, where that is
more."""
FIRST_AFTER_STEPS = 2
"""Steps before the first copy, whose cost nobody knows yet: the first of them is no measure of a step."""
_MEASURES = 9


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
