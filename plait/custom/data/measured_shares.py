"""Shares by the workers' own speeds: measured over a few steps, decided once, by all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import torch

from plait.custom.data.batches import OwnBatches
from plait.custom.data.shares import (
    AHEAD,
    FIRST_MEASURED,
    LAST_MEASURED,
    WorkerShares,
    check_worker_shares,
    shares_from_seconds,
)
from plait.custom.group import Workers


class ShareMeter:
    """What part of a batch each worker has, and whether that is still to be measured.

    `alike` workers get equal parts without a measurement where a person asks for "auto".
    """

    def __init__(self, workers: Workers, alike: Literal["alike", "unlike"]) -> None:
        self._workers, self._alike = workers, alike
        self.shares: tuple[float, ...] = (1.0,) * workers.size
        self.undecided = False
        """Whether steps are still measured."""
        self._seconds: list[float] = []

    def choose(self, requested: WorkerShares) -> None:
        """Take what a person asks for; raises PlaitError for what is no share."""
        check_worker_shares(requested, self._workers.size)
        if not isinstance(requested, str):
            self.shares, self.undecided = tuple(requested), False
        elif requested == "equal":
            self.shares, self.undecided = (1.0,) * self._workers.size, False
        else:
            self.undecided = self._workers.size > 1 and (requested == "measured" or self._alike == "unlike")

    def resume(self, shares: Sequence[float], decided: Literal["decided", "undecided"]) -> None:
        """Go on with the shares of a saved run on as many workers."""
        self.shares = tuple(shares)
        if decided == "decided":
            self._alike = "alike"

    def clock(self, step: int) -> Literal["timed", "untimed"]:
        """Whether the step of this number, counted from the start of this process, is to be timed."""
        return "timed" if self.undecided and FIRST_MEASURED <= step < LAST_MEASURED else "untimed"

    def note(self, own_s: float, active: Sequence[OwnBatches]) -> None:
        """Take a timed step; after the last of them all workers decide, and later batches are shared so. Every worker
        must call it."""
        self._seconds.append(own_s)
        if len(self._seconds) < LAST_MEASURED - FIRST_MEASURED:
            return
        own = torch.tensor([median(self._seconds)], dtype=torch.float64)
        seconds = [float(one) for one in self._workers.sums.gather(own)]
        self.undecided, self._seconds = False, []
        old, found = self.shares, shares_from_seconds(seconds, self.shares)
        self._workers.say(measured_shares_text(seconds, old, found))
        if found is not None:
            self.shares = found
            for one in active:
                one.shares.set(one.place.given + AHEAD, found)


def measured_shares_text(seconds: Sequence[float], old: Sequence[float], new: Sequence[float] | None) -> str:
    """A decision on shares and its reason: the workers' times for their old parts of a step."""
    parts = zip(seconds, old, strict=True)
    times = ", ".join(
        f"{rank}: {second * 1000:.3g} ms for {part / sum(old):.1%}" for rank, (second, part) in enumerate(parts)
    )
    if new is None:
        return f"shares stay as they are; workers' times for their parts of a step are near each other ({times})"
    shares = ", ".join(f"{rank}: {share / sum(new):.1%}" for rank, share in enumerate(new))
    return f"shares by measured speed, of each batch from now on: {shares} (before {times})"
