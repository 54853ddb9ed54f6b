"""Micro-batches as tensors: a rank's share of each training step, fetched ahead, and the held-out windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from plait.data.order import Order
from plait.data.packing import restarting_positions, segment_lengths
from plait.data.shards import Corpus, Shard

DocumentMode = Literal["mask", "join"]

NOT_COUNTED = -100
"""The target that enters no loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Micro:
    """One micro-batch of B rows and T tokens.

    `inputs` and `targets` are int64 [B, T]; a target NOT_COUNTED is padding. Where documents are masked, `positions`
    [B, T] restart at each document and `lengths` are the segments of the flattened rows; else both are None.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    lengths: tuple[int, ...] | None


class Loader:
    """Gives one rank its samples of each step and prepares the next step's in one background thread.

    A step holds `batch_sequences` samples from a global position on; this rank's are `first` to `first + count`.
    """

    def __init__(
        self,
        corpus: Corpus,
        order: Order,
        *,
        batch_sequences: int,
        first: int,
        count: int,
        micro_sequences: int,
        documents: DocumentMode,
        device: torch.device,
    ) -> None:
        assert first >= 0 and count >= 0 and first + count <= batch_sequences and micro_sequences > 0
        self.wait_s = 0.0
        """Seconds that the last call of `micros` had to wait."""
        self._corpus, self._order = corpus, order
        self._batch_sequences, self._first, self._count = batch_sequences, first, count
        self._micro_sequences, self._documents, self._device = micro_sequences, documents, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[list[Micro]]] | None = None

    def micros(self, position: int) -> list[Micro]:
        """The micro-batches of the step that starts at global `position`; blocks until they are there."""
        began = time.perf_counter()
        if self._ahead is None or self._ahead[0] != position:
            self._fetch_ahead(position)
        assert self._ahead is not None
        found = self._ahead[1].result()
        self.wait_s = time.perf_counter() - began
        self._fetch_ahead(position + self._batch_sequences)
        return found

    def close(self) -> None:
        """End the background thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch_ahead(self, position: int) -> None:
        self._ahead = (position, self._thread.submit(self._fetch, position))

    def _fetch(self, position: int) -> list[Micro]:
        begin = position + self._first
        shard, start = self._order.windows(np.arange(begin, begin + self._count))
        found = []
        for row in range(0, self._count, self._micro_sequences):
            rows = slice(row, row + self._micro_sequences)
            tokens = gather(self._corpus.train, shard[rows], start[rows], self._order.sequence + 1)
            lengths = None
            if self._documents == "mask":
                lengths = segment_lengths(self._corpus.train, shard[rows], start[rows], self._order.sequence)
            found.append(_micro(tokens[:, :-1], tokens[:, 1:], lengths, self._device))
        return found


def heldout_micros(
    corpus: Corpus,
    *,
    sequence: int,
    micro_sequences: int,
    part: int,
    parts: int,
    documents: DocumentMode,
    device: torch.device,
) -> Iterator[Micro]:
    """Part `part` of `parts` of the held-out windows: over all parts each held-out token is a target exactly once.

    Windows lie end to end over every shard and number i goes to part i % parts, so a part may get none.
    """
    shard, start = _windows_end_to_end(corpus.heldout, sequence)
    shard, start = shard[part::parts], start[part::parts]
    for row in range(0, len(start), micro_sequences):
        rows = slice(row, row + micro_sequences)
        inputs, targets = _padded_rows(corpus, shard[rows], start[rows], sequence)
        lengths = None
        if documents == "mask":
            lengths = segment_lengths(corpus.heldout, shard[rows], start[rows], sequence)
        yield _micro(inputs, targets, lengths, device)


def gather(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], length: int
) -> np.ndarray[Any, Any]:
    """Rows of `length` tokens in the shards' own type: row i from start[i] of shards[shard[i]]."""
    numbers = np.unique(shard)
    if len(numbers) == 1:
        return shards[numbers[0]].rows(start, length)
    rows = np.empty((len(start), length), dtype=shards[0].tokens.dtype)
    for number in numbers:
        mine = np.flatnonzero(shard == number)
        rows[mine] = shards[number].rows(start[mine], length)
    return rows


def _windows_end_to_end(shards: Sequence[Shard], sequence: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    starts = [np.arange(0, len(shard.tokens) - 1, sequence) for shard in shards]
    numbers = np.repeat(np.arange(len(shards)), [len(each) for each in starts])
    return numbers, np.concatenate([np.empty(0, dtype=np.int64), *starts])


def _padded_rows(
    corpus: Corpus, shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], sequence: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets; past a shard's end the inputs are <eot> and the targets NOT_COUNTED."""
    inputs = np.full((len(start), sequence), corpus.eot, dtype=np.int64)
    targets = np.full((len(start), sequence), NOT_COUNTED, dtype=np.int64)
    for row, (number, first) in enumerate(zip(shard.tolist(), start.tolist(), strict=True)):
        tokens = corpus.heldout[number].tokens[first : first + sequence + 1]
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = tokens[1:]
    return inputs, targets


def _micro(
    inputs: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any] | None,
    device: torch.device,
) -> Micro:
    positions = None if lengths is None else restarting_positions(lengths).reshape(inputs.shape)
    return Micro(
        inputs=_tensor(inputs, device),
        targets=_tensor(targets, device),
        positions=None if positions is None else _tensor(positions, device),
        lengths=None if lengths is None else tuple(lengths.tolist()),
    )


def _tensor(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
