"""Messages about a save while training waits for it: its progress, and the time that it may still take."""

from __future__ import annotations

import time
from collections.abc import Callable

from plait.units import format_bytes, format_duration

FIRST_SAID_S = 5.0


class SaveProgress:
    """Follows one wait for a save of `total_bytes`, possibly of a run that `was_stopped`; `clock` gives seconds."""

    def __init__(
        self, step: int, total_bytes: int, clock: Callable[[], float] = time.monotonic, *, was_stopped: bool = False
    ) -> None:
        self._step, self._total, self._clock = step, total_bytes, clock
        self._began_s, self._said_after_s = clock(), FIRST_SAID_S
        self._first: tuple[float, int] | None = None
        """The first sight of bytes: after how many seconds, and how many."""
        self._stops = was_stopped

    def look(self, arrived_bytes: int, *, stop_requested: bool = False) -> str:
        """A line for the log if one is due, else an empty text: after five seconds and then less and less often, and at
        once when a stop is requested. `arrived_bytes` are on rank 0's disk by now, from all writers."""
        waited_s = self._clock() - self._began_s
        if self._first is None and arrived_bytes:
            self._first = waited_s, arrived_bytes
        if waited_s < self._said_after_s and not (stop_requested and not self._stops):
            return ""
        while self._said_after_s <= waited_s:
            self._said_after_s *= 2
        self._stops = stop_requested
        return self._text(arrived_bytes, waited_s)

    def _text(self, arrived: int, waited_s: float) -> str:
        if arrived >= self._total:
            return f"saving   step {self._step}: waiting for the disk for {format_duration(waited_s)} so far"
        text = f"saving   step {self._step}: {format_bytes(arrived)} of {format_bytes(self._total)} have arrived"
        first_s, first = self._first or (waited_s, arrived)
        if waited_s <= first_s or arrived <= first:
            return f"{text}, nothing more for {format_duration(waited_s)} so far"
        rate = (arrived - first) / (waited_s - first_s)
        left_s = (self._total - arrived) / rate
        return f"{text}, {format_bytes(rate)}/s: about {format_duration(max(1.0, round(left_s)))} more"
