"""Shares by the workers' own speeds: measured from the first steps on, decided by all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import torch

from plait.custom.cutting import cut_sizes
from plait.custom.data.batches import OwnBatches
from plait.custom.data.share_words import measuring_text, shares_stay_text, worker_shares_text
from plait.custom.data.shares import AHEAD, WorkerShares, check_worker_shares
from plait.custom.group import Workers

# Note [two rules]: the first decision comes after a few steps, since one worker may be many times slower than another.
# From then on the planner's own rule decides, as for recipes: a change must shorten the steps of two windows by 3 % and
# by more than noise could. All workers gather the same times and compute the same shares, so nothing is sent.

FIRST_MEASURED, LAST_MEASURED = 2, 8
"""Steps whose times decide first: before them memory and kernels are found."""
LEAST_GAIN = 1.08
"""Ratio of the slowest worker's time to the mean's below which shares stay at the first decision."""
WATCH_EVERY, WATCHED = 50, 20
"""After that, the last WATCHED of each WATCH_EVERY steps are timed: a timed step waits for its GPU."""
ANY_BATCH = 1000
"""Examples of a batch whose size is not known before it is read, for which whole shares are computed."""

SharesFrom = Literal["asked", "first steps", "all steps"]


class ShareMeter:
    """What part of a batch each worker has, and whether that is still to be measured.

    `alike` workers get equal parts without a measurement where a person asks for "auto"; `names` are the workers', for
    what is said.
    """

    def __init__(self, workers: Workers, alike: Literal["alike", "unlike"], names: Sequence[str]) -> None:
        self._workers, self._alike, self._names = workers, alike, tuple(names)
        self.shares: tuple[float, ...] = (1.0,) * workers.size
        self._from: SharesFrom = "asked"
        self._step = 0
        self._times: list[tuple[float, float]] = []
        self._next: SharesFrom = "first steps"

    @property
    def decided(self) -> Literal["decided", "undecided"]:
        """Whether the first steps have been measured, or need not be."""
        return "undecided" if self._from == "first steps" else "decided"

    @property
    def fixed(self) -> bool:
        """Whether shares are as a person asked, and not measured."""
        return self._from == "asked"

    def choose(self, requested: WorkerShares) -> None:
        """Take what a person asks for; raises PlaitError for what is no share."""
        check_worker_shares(requested, self._workers.size)
        if not isinstance(requested, str):
            self._fix(requested)
        elif requested == "equal" or self._workers.size == 1 or (requested == "auto" and self._alike == "alike"):
            self._fix((1.0,) * self._workers.size)
        elif self._from == "asked":
            self._measure(self._next)
            if self._next == "first steps":
                self._workers.say(measuring_text(LAST_MEASURED))

    def resume(self, shares: Sequence[float], decided: Literal["decided", "undecided"]) -> None:
        """Go on with the shares of a saved run on as many workers."""
        self.shares = tuple(shares)
        self._next = "all steps" if decided == "decided" else "first steps"

    def clock(self) -> Literal["timed", "untimed"]:
        """Whether the step that begins now is to be timed; call it once a step."""
        step, self._step = self._step, self._step + 1
        if self._from == "first steps":
            return "timed" if step >= FIRST_MEASURED else "untimed"
        if self._from == "all steps":
            return "timed" if step % WATCH_EVERY >= WATCH_EVERY - WATCHED else "untimed"
        return "untimed"

    def note(self, own_s: float, step_s: float, active: Sequence[OwnBatches]) -> None:
        """Take a timed step: what this worker computed, and all of it; after the last one of a window all workers
        decide, and later batches are shared so. Every worker must call it."""
        self._times.append((own_s, step_s))
        first = self._from == "first steps"
        if len(self._times) < (LAST_MEASURED - FIRST_MEASURED if first else WATCHED):
            return
        gathered = self._workers.sums.gather(torch.tensor(self._times, dtype=torch.float64))
        times = [[(float(own), float(step)) for own, step in one.tolist()] for one in gathered]
        examples = max((one.examples for one in active), default=0) or ANY_BATCH
        found = self._first_shares(times, examples) if first else self._later_shares(times, examples)
        self._measure("all steps")
        if found is not None:
            self.shares = found
            for one in active:
                one.shares.set(one.place.given + AHEAD, found)

    def _first_shares(self, times: Sequence[Sequence[tuple[float, float]]], examples: int) -> tuple[float, ...] | None:
        seconds = [max(median(own for own, _ in one), 1e-9) for one in times]
        if max(seconds) < LEAST_GAIN * sum(seconds) / len(seconds):
            self._workers.say(shares_stay_text(self._names, seconds))
            return None
        from plait.planner.heterogeneous.batch_shares import shares_by_speed

        old = cut_sizes(examples, self.shares)
        speeds = [size / second for size, second in zip(old, seconds, strict=True)]
        found = tuple(map(float, shares_by_speed(examples, speeds)))
        if found == tuple(map(float, old)):
            self._workers.say(shares_stay_text(self._names, seconds))
            return None
        self._workers.say(worker_shares_text(self._names, old, found, speeds))
        return found

    def _later_shares(self, times: Sequence[Sequence[tuple[float, float]]], examples: int) -> tuple[float, ...] | None:
        from plait.planner.rebalancing.batch_rebalance import StepObservation, rebalance

        steps = [
            StepObservation(compute_s=tuple(own for own, _ in step), step_s=max(whole for _, whole in step))
            for step in zip(*times, strict=True)
        ]
        old = cut_sizes(examples, self.shares)
        change = rebalance(old, steps, self._names)
        if change is None:
            return None
        self._workers.say(worker_shares_text(self._names, old, change.shares, change.speeds))
        return tuple(map(float, change.shares))

    def _fix(self, shares: Sequence[float]) -> None:
        self.shares, self._from, self._times = tuple(shares), "asked", []

    def _measure(self, what: SharesFrom) -> None:
        self._from, self._step, self._times = what, 0, []
