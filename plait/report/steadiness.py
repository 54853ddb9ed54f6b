"""One quantity of a run, step by step: what is usual for it, how much it varies, and whether it has left that."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

WINDOW_STEPS = 11
"""Steps whose median counts as "now": five odd ones among them change nothing."""
LAG_STEPS = 14
"""Steps before a value may count as usual, so that an onset does not raise what it is compared with."""
LEAST_USUAL_VALUES = 12
"""Usual values that must be known before anything is said."""
OBSERVATIONS_KEPT_STEPS = 100
"""Usual values that are kept: a drift slower than that becomes usual itself."""
NOISES = 3.0
"""How many standard deviations of one step the median of a window must leave its level by."""
REFRESH_EVERY = 8
"""New usual values after which level and noise are worked out again; sorting them at each step would cost too much."""
SIGMA_PER_MAD = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

Learning = Literal["learn", "hold"]


class Series:
    """The values of one quantity; `add` them in the order of steps, then ask."""

    def __init__(self) -> None:
        self.level = self.noise = self.now = 0.0
        """The typical value, its variation, and the median of the last WINDOW values."""
        self._recent: deque[tuple[int, float]] = deque(maxlen=LAG_STEPS)
        self._window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._usual: deque[float] = deque(maxlen=OBSERVATIONS_KEPT_STEPS)
        self._unseen = 0
        self._settling: tuple[int, float] | None = None
        """(steps left, the rise to keep)"""

    @property
    def ready(self) -> bool:
        """Whether enough is known to say anything, and nothing that was expected is still settling."""
        return len(self._usual) >= LEAST_USUAL_VALUES and self._settling is None

    @property
    def rise(self) -> float:
        """How far the value now is above its level."""
        return self.now - self.level

    def bar(self, least: float) -> float:
        """The rise that means something: `least`, or more where the quantity varies much."""
        return max(least, NOISES * self.noise)

    def add(self, step: int, value: float, learning: Learning = "learn") -> None:
        """Take a step's value; with "hold" what is usual stays as it is."""
        if len(self._recent) == LAG_STEPS and learning == "learn" and self._settling is None:
            self._usual.append(self._recent[0][1])
            self._unseen += 1
        self._recent.append((step, value))
        self._window.append(value)
        self.now = sorted(self._window)[len(self._window) // 2]
        if self._unseen >= REFRESH_EVERY or (self._unseen and len(self._usual) <= LEAST_USUAL_VALUES):
            self._refresh()
        if self._settling is not None:
            self._settle(*self._settling)

    def change_expected(self, keep: Literal["rise", "nothing"]) -> None:
        """From the next value on the level may be another: it is taken from the next WINDOW values.

        "rise" keeps what was above the level above it, unless most of that has gone meanwhile; "nothing" makes usual
        what will be seen.
        """
        rise = 0.0 if keep == "nothing" else self.rise if self._settling is None else self._settling[1]
        if self._settling is not None or self._usual:
            self._settling = WINDOW_STEPS, rise

    def forget_recent(self) -> None:
        """Leave only the youngest values, about half a window: an episode has ended with them."""
        while len(self._window) > WINDOW_STEPS // 2 + 1:
            self._window.popleft()
        self._recent = deque(list(self._recent)[-len(self._window) :], maxlen=LAG_STEPS)

    def since(self) -> int:
        """The step at which the values left their level: from there on they are most clearly above half the rise."""
        rise, best, total = self.rise, 0.0, 0.0
        found = self._recent[-1][0]
        for step, value in reversed(self._recent):
            # Clipped, so that a single odd step says no more than any other.
            total += min(max(value - self.level - rise / 2, -rise / 2), rise / 2)
            if total >= best:
                best, found = total, step
        return found

    def _settle(self, left: int, rise: float) -> None:
        if left > 1:
            self._settling = left - 1, rise
            return
        shift = 0.0 if abs(self.rise) < abs(rise) / 2 else self.rise - rise
        self._usual = deque((value + shift for value in self._usual), maxlen=OBSERVATIONS_KEPT_STEPS)
        self._recent = deque(list(self._recent)[-WINDOW_STEPS:], maxlen=LAG_STEPS)
        self._settling = None
        self._refresh()

    def _refresh(self) -> None:
        self._unseen = 0
        self.level = median(self._usual)
        self.noise = SIGMA_PER_MAD * median(abs(value - self.level) for value in self._usual)
