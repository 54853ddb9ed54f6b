"""runs/NAME/rank-times.jsonl: how each rank of a run spent its steps, in a line every few seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checked_json import parse_json, typed_value
from plait.regular_file import append_to_file, read_regular_file

LEAST_SECONDS_BETWEEN_LINES = 5.0
MOST_FILE_BYTES = 1 << 28
"""Ten days of the fastest growth."""
_RANKS_PER_SECOND = 10
"""A line of many ranks is longer, and written less often: the file grows by some 300 bytes a second at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimesLine:
    """Mean seconds of a step of each rank over the `steps` steps up to `step`; every list has one entry per rank."""

    step: int
    steps: int
    compute_s: tuple[float, ...]
    """Forward and backward, without the waits below."""
    wait_s: tuple[float, ...]
    """Waiting for other data-parallel ranks, and for their messages."""
    inside_s: tuple[float, ...]
    """Waiting for other ranks of the same replica, such as pipeline stages."""
    data_s: tuple[float, ...]
    """Waiting for samples."""

    @property
    def ranks(self) -> int:
        return len(self.compute_s)


class RankTimesFile:
    """Appends to rank-times.jsonl; for rank 0 alone, which gathers the times of all.

    The first step of a process is left out, as it also fills caches. A first line is written early, so that there is
    something to show, and the last one by `close`. A line that the disk refuses is dropped: the run does not need it.
    """

    def __init__(self, path: Path, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._every_s = max(LEAST_SECONDS_BETWEEN_LINES, ranks / _RANKS_PER_SECOND)
        self._due_at_s = clock()
        self._is_warm = False
        self._sums = [[0.0] * 4 for _ in range(ranks)]
        self._steps = self._last_step = 0

    def add(self, last_step: int, rows_of_ranks: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take the steps up to `last_step`: for each rank its rows, one per step, that begin with the seconds of
        computing, of waiting for others, of waiting for data, and of waiting inside the replica."""
        first = 0 if self._is_warm else 1
        counted = len(rows_of_ranks[0]) - first
        if counted < 0:
            return
        self._is_warm = True
        for sums, rows in zip(self._sums, rows_of_ranks, strict=True):
            for row in rows[first:]:
                for item, seconds in enumerate(row[:4]):
                    sums[item] += seconds
        self._steps, self._last_step = self._steps + counted, last_step
        if self._clock() >= self._due_at_s:
            self._append()

    def close(self) -> None:
        """Write the steps since the last line: of a run of seconds nearly all."""
        self._append()

    def _append(self) -> None:
        if not self._steps:
            return
        compute, wait, data, inside = (
            tuple(float(f"{sums[item] / self._steps:.4g}") for sums in self._sums) for item in range(4)
        )
        line = RankTimesLine(
            step=self._last_step, steps=self._steps, compute_s=compute, wait_s=wait, inside_s=inside, data_s=data
        )
        with suppress(OSError), append_to_file(self._path) as file:
            file.write(json.dumps(asdict(line)) + "\n")
        self._sums, self._steps = [[0.0] * 4 for _ in self._sums], 0
        self._due_at_s = self._clock() + self._every_s


def read_rank_times(path: Path) -> list[RankTimesLine]:
    """All lines of a rank-times.jsonl that count, the oldest first; empty where there is none. What a run did after the
    checkpoint that it went back to is left out."""
    try:
        lines = read_regular_file(path, MOST_FILE_BYTES).splitlines()
    except (OSError, ValueError):  # people look at it, and a run does not need it
        return []
    kept: list[RankTimesLine] = []
    for found in filter(None, map(parse_rank_times, lines)):
        while kept and kept[-1].step >= found.step:
            kept.pop()
        kept.append(found)
    return kept


def parse_rank_times(line: bytes) -> RankTimesLine | None:
    """The value of a line of rank-times.jsonl; None where it is none, as one that a full disk cut short."""
    try:
        found = typed_value(RankTimesLine, parse_json(line))
    except ValueError:
        return None
    lists = (found.compute_s, found.wait_s, found.inside_s, found.data_s)
    return found if {len(one) for one in lists} == {found.ranks} and found.ranks and found.steps > 0 else None
