"""A run's metrics.jsonl for a chart: a bounded number of buckets of steps with minimum, mean and maximum values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plait.report.growing_file import GrowingFile

VALUES = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s")
"""The keys of metrics.jsonl that are drawn."""
COLUMNS = (
    "first", "last", "tokens", *(f"{value}{kind}" for value in VALUES for kind in ("", "_min", "_max"))
)  # fmt: skip
"""The columns of `rows`: first and last step of a bucket, the tokens after it, and mean, minimum and maximum of each of
VALUES."""
MOST_HISTORY_BUCKETS = 1024
SINGLE_STEPS_KEPT = 2048
"""Number of steps kept one by one, for a page that follows a run."""
_MOST_EVALUATIONS = 2000


class _Line(msgspec.Struct, gc=False):
    """A step or an evaluation; other keys are skipped without being read."""

    step: int
    tokens: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    data_wait_s: float | None = None
    eval_loss: float | None = None
    eval_nats_per_byte: float | None = None
    choices_accuracy: float | None = None
    pair_accuracy: float | None = None


class MetricsHistory:
    """All steps of a run in at most 1024 buckets, and its evaluations; `update` reads new lines of the file.

    If there are too many buckets, each two are merged; the last one may still grow.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.damaged_lines = 0
        """Lines that are neither a step nor an evaluation."""
        self._forget()

    @property
    def version(self) -> int:
        """Increases when earlier steps become invalid: the run went back to a checkpoint, or its file is gone."""
        return self._file.version

    @property
    def last_step(self) -> int:
        return int(self._tail[-1, 0]) if len(self._tail) else 0

    @property
    def stepping_s(self) -> float:
        """Total seconds of all steps."""
        column, count = COLUMNS.index("step_s"), VALUES.index("step_s")
        closed = np.nansum(self._buckets[:, column] * self._counts[:, count])
        return float(closed + sum(np.nansum(steps[:, 2 + count]) for steps in self._open))

    def update(self) -> None:
        """Read all complete lines that were written since the last call; raises OSError if that is impossible."""
        before = self._file.version
        for block in self._file.blocks():
            if self._file.version != before:
                before = self._file.version
                self._forget()
            self._take(block)
        if self._file.version != before:
            self._forget()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def rows(self, after: int = 0) -> tuple[int, list[list[float | None]]]:
        """The step after which the rows begin, and rows of COLUMNS: those of the steps after `after`, or, if such old
        steps are not kept one by one, of all buckets after step 0. None is unknown, or was not finite."""
        if after and len(self._tail) and after >= self._tail[0, 0] - 1:
            newer = self._tail[self._tail[:, 0] > after]
            return after, [_plain(row) for row in _buckets(newer, 1)[0].tolist()]
        return 0, [_plain(row) for row in self._bucket_rows()]

    def mean(self, value: str, *, first: int, last: int) -> float | None:
        """The mean of one of VALUES over these steps, as far as they are among the last 2048; None if unknown."""
        steps = self._tail[(self._tail[:, 0] >= first) & (self._tail[:, 0] <= last)]
        found = steps[:, 2 + VALUES.index(value)]
        finite = found[np.isfinite(found)]
        return float(finite.mean()) if len(finite) else None

    def _forget(self) -> None:
        self.damaged_lines = 0
        self.evaluations: list[Mapping[str, Any]] = []
        self._width = 1
        self._buckets = np.empty((0, len(COLUMNS)))
        self._counts = np.empty((0, len(VALUES)))
        self._open: list[np.ndarray] = []
        self._open_steps = 0
        self._tail = np.empty((0, 2 + len(VALUES)))

    def _take(self, block: bytes) -> None:
        lines = self._lines(block)
        if b'"eval_loss"' in block:
            self.evaluations += [_evaluation(line) for line in lines if line.eval_loss is not None]
            self.evaluations = self.evaluations[-_MOST_EVALUATIONS:]
            # A step's loss is null if it was not finite, so steps are recognized by their tokens.
            lines = [line for line in lines if line.tokens]
        if lines:
            self._add(_table(lines))

    def _lines(self, block: bytes) -> Sequence[_Line]:
        try:
            return _DECODER.decode_lines(block)
        except msgspec.DecodeError:
            return list(self._readable(block))

    def _readable(self, block: bytes) -> Iterator[_Line]:
        for line in block.splitlines():
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError:
                self.damaged_lines += 1

    def _add(self, table: np.ndarray) -> None:
        """Add steps, one row each with step, tokens and VALUES."""
        self._tail = np.concatenate([self._tail, table[-SINGLE_STEPS_KEPT:]])[-SINGLE_STEPS_KEPT:]
        self._open.append(table)
        self._open_steps += len(table)
        while len(self._buckets) + self._open_steps // self._width > MOST_HISTORY_BUCKETS:
            self._halve()
        full = self._open_steps // self._width * self._width
        if full:
            steps = np.concatenate(self._open)
            rows, counts = _buckets(steps[:full], self._width)
            self._buckets = np.concatenate([self._buckets, rows])
            self._counts = np.concatenate([self._counts, counts])
            self._open, self._open_steps = [steps[full:]], len(steps) - full

    def _halve(self) -> None:
        """Merge each two buckets; if their number is odd, the last one stays."""
        pairs = len(self._buckets) // 2
        kept = 2 * pairs
        left, left_counts = self._buckets[kept:], self._counts[kept:]
        two = self._buckets[:kept].reshape(pairs, 2, len(COLUMNS))
        counts = self._counts[:kept].reshape(pairs, 2, len(VALUES))
        merged = np.empty((pairs, len(COLUMNS)))
        merged[:, 0], merged[:, 1:3] = two[:, 0, 0], two[:, 1, 1:3]
        total = counts.sum(1)
        sums = np.where(counts > 0, two[:, :, 3::3] * counts, 0.0).sum(1)
        merged[:, 3::3] = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
        merged[:, 4::3], merged[:, 5::3] = np.fmin.reduce(two[:, :, 4::3], 1), np.fmax.reduce(two[:, :, 5::3], 1)
        self._buckets, self._counts = np.concatenate([merged, left]), np.concatenate([total, left_counts])
        self._width *= 2

    def _bucket_rows(self) -> Iterator[Sequence[float]]:
        yield from self._buckets.tolist()
        if self._open_steps:
            steps = np.concatenate(self._open)
            yield from _buckets(steps, len(steps))[0].tolist()


_DECODER = msgspec.json.Decoder(_Line)
_FIELDS = ("step", "tokens", *VALUES)


def _table(lines: Sequence[_Line]) -> np.ndarray:
    table = np.empty((len(lines), len(_FIELDS)))
    for column, field in enumerate(_FIELDS):
        values = map(attrgetter(field), lines)
        try:
            table[:, column] = np.fromiter(values, float, len(lines))
        except TypeError:  # None, which is faster to catch than to look for
            table[:, column] = np.array(list(map(attrgetter(field), lines)), dtype=float)
    return table


def _buckets(table: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of COLUMNS for each `width` steps, and how many of the steps had each value."""
    groups = table.reshape(len(table) // width, width, table.shape[1])
    values = groups[:, :, 2:]
    values = np.where(np.isfinite(values), values, np.nan)
    counts = (~np.isnan(values)).sum(1)
    sums = np.nansum(values, 1)
    rows = np.empty((len(groups), len(COLUMNS)))
    rows[:, 0], rows[:, 1:3] = groups[:, 0, 0], groups[:, -1, :2]
    rows[:, 3::3] = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    rows[:, 4::3], rows[:, 5::3] = np.fmin.reduce(values, 1), np.fmax.reduce(values, 1)
    return rows, counts


def _plain(row: Sequence[float]) -> list[float | None]:
    whole: list[float | None] = [int(one) for one in row[:3]]
    return whole + [one if isfinite(one) else None for one in row[3:]]


def _evaluation(line: _Line) -> Mapping[str, Any]:
    values = {
        "step": line.step,
        "eval_loss": line.eval_loss,
        "eval_nats_per_byte": line.eval_nats_per_byte,
        "choices_accuracy": line.choices_accuracy,
        "pair_accuracy": line.pair_accuracy,
    }
    return {key: value for key, value in values.items() if value is not None}
