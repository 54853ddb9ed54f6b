"""Each worker's part of a batch: equal parts, given ones, or parts by measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from plait.custom.cutting import cut_sizes
from plait.errors import PlaitError

WorkerShares = Literal["auto", "equal", "measured"] | Sequence[float]
"""How a batch is shared: "auto" measures where workers have unlike devices; numbers are parts by worker."""
ShareChanges = list[tuple[int, tuple[float, ...]]]
"""Shares, and the batch from which on they hold; later ones count."""

AHEAD = 4
"""Batches after a decision until the new shares hold: more than a worker reads ahead."""


class ShareTable:
    """The share of every worker from each batch on; the same on all workers. It adds to the list that it is given."""

    def __init__(self, workers: int, changes: ShareChanges | None = None) -> None:
        self._equal = (1.0,) * workers
        self.changes: ShareChanges = [] if changes is None else changes

    def set(self, first_batch: int, shares: Sequence[float]) -> None:
        """These shares hold from this batch on; those of earlier batches stay."""
        self.changes.append((first_batch, tuple(shares)))

    def at(self, batch: int) -> tuple[float, ...]:
        """The shares of a batch."""
        held = [shares for first, shares in self.changes if first <= batch]
        return held[-1] if held else self._equal

    def own_range(self, batch: int, examples: int, rank: int) -> tuple[int, int]:
        """The examples of a batch that are this rank's: from the first up to the second number. Of fewer examples than
        workers, those with the largest shares get one each."""
        shares = self.at(batch)
        if examples < len(shares):
            served = sorted(range(len(shares)), key=lambda k: (-shares[k], k))[:examples]
            sizes = tuple(int(k in served) for k in range(len(shares)))
        else:
            sizes = cut_sizes(examples, shares)
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
