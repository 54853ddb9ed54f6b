"""Which part of each batch is whose: equal parts, given ones, or parts by measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from plait.custom.cutting import cut_sizes
from plait.errors import PlaitError

WorkerShares = Literal["auto", "equal", "measured"] | Sequence[float]
"""How a batch is shared: "auto" measures where workers have unlike devices; numbers are parts by worker."""

FIRST_MEASURED, LAST_MEASURED = 2, 8
"""Steps, counted from the start of the process, whose times decide: before them memory and kernels are found."""
AHEAD = 4
"""Batches after a decision until the new shares hold: more than a worker reads ahead."""
LEAST_GAIN = 1.08
"""Ratio of the slowest worker's time to the mean's below which equal parts stay."""


class ShareTable:
    """The share of every worker from each batch on; the same on all workers."""

    def __init__(self, workers: int) -> None:
        self._equal = (1.0,) * workers
        self.changes: list[tuple[int, tuple[float, ...]]] = []

    def set(self, first_batch: int, shares: Sequence[float]) -> None:
        """These shares hold from this batch on; those of earlier batches stay."""
        self.changes.append((first_batch, tuple(shares)))

    def at(self, batch: int) -> tuple[float, ...]:
        """The shares of a batch."""
        held = [shares for first, shares in self.changes if first <= batch]
        return held[-1] if held else self._equal

    def own_range(self, batch: int, examples: int, rank: int) -> tuple[int, int]:
        """The examples of a batch that are this rank's: from the first up to the second number."""
        sizes = cut_sizes(examples, self.at(batch))
        first = sum(sizes[:rank])
        return first, first + sizes[rank]


def check_worker_shares(shares: WorkerShares, workers: int) -> None:
    """Raise PlaitError where given shares are no positive numbers, one for each worker."""
    if isinstance(shares, str):
        if shares not in ("auto", "equal", "measured"):
            raise PlaitError(
                f'shares = "{shares}" is unknown; choose "auto", "equal", "measured" or one number a worker'
            )
        return
    if len(shares) != workers or not all(0 < share < float("inf") for share in shares):
        raise PlaitError(f"shares = {list(shares)} for {workers} workers; give one positive number for each of them")


def shares_from_seconds(seconds: Sequence[float], shares: Sequence[float]) -> tuple[float, ...] | None:
    """New shares of workers that needed these seconds for the old ones; None where there is too little to gain."""
    mean = sum(seconds) / len(seconds)
    if min(seconds) <= 0 or max(seconds) < LEAST_GAIN * mean:
        return None
    speeds = [share / second for share, second in zip(shares, seconds, strict=True)]
    return tuple(round(speed / sum(speeds), 4) for speed in speeds)
