"""Micro-batches as tensors: a rank's share of each training step, fetched ahead, and the held-out windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np
import torch

from plait.data.order import Order
from plait.data.packing import restarting_positions, segment_lengths, zigzag_columns
from plait.data.shards import Corpus, Shard

DocumentMode = Literal["mask", "join"]

NOT_COUNTED = -100
"""The target that enters no loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Micro:
    """One micro-batch of B rows and T tokens.

    `inputs` and `targets` are int64 [B, T]; a target NOT_COUNTED is padding. Where documents are masked, `positions`
    [B, T] restart at each document and `lengths` are the segments of the flattened rows. Where this is a part of the
    sequences, `positions` are those of the whole ones ([1, T] if alike in all rows), and so are `lengths`. Else None.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    lengths: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Which samples fall to a rank, and how it takes them.

    Of each step's `batch_sequences` these are `first` to `first + count`, at most `micro_sequences` at a time, in
    `micros` micro-batches: as many as all other ranks take, since ranks meet in the middle of one. Where a rank has no
    sequence left for one, nothing in it is counted. Held-out windows go round `parts` ranks. Of each sequence the rank
    sees part `context` of `contexts`.
    """

    sequence: int
    batch_sequences: int
    first: int
    count: int
    micro_sequences: int
    micros: int
    documents: DocumentMode
    device: torch.device
    part: int = 0
    parts: int = 1
    context: int = 0
    contexts: int = 1


class Loader:
    """Gives one rank its samples of each step and prepares the next step's in one background thread."""

    def __init__(self, corpus: Corpus, order: Order, samples: Samples) -> None:
        assert samples.first >= 0 and 0 <= samples.count <= samples.batch_sequences - samples.first
        assert samples.micro_sequences > 0 and samples.sequence == order.sequence
        self.wait_s = 0.0
        """Seconds that the last call of `micros` had to wait."""
        self._corpus, self._order, self._samples = corpus, order, samples
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
        self._fetch_ahead(position + self._samples.batch_sequences)
        return found

    def close(self) -> None:
        """End the background thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch_ahead(self, position: int) -> None:
        self._ahead = (position, self._thread.submit(self._fetch, position))

    def _fetch(self, position: int) -> list[Micro]:
        samples, train = self._samples, self._corpus.train
        begin = position + samples.first
        shard, start = self._order.windows(np.arange(begin, begin + samples.count))
        found = []
        for row in range(0, samples.count, samples.micro_sequences):
            rows = slice(row, row + samples.micro_sequences)
            tokens = gather(train, shard[rows], start[rows], samples.sequence + 1)
            lengths = None
            if samples.documents == "mask":
                lengths = segment_lengths(train, shard[rows], start[rows], samples.sequence)
            targets = _targets(train, shard[rows], start[rows], tokens)
            found.append(_micro(tokens[:, :-1], targets, lengths, samples))
        missing = samples.micros - len(found)
        assert missing >= 0
        return found + [_uncounted_micro(self._corpus, samples)] * missing


def heldout_micros(corpus: Corpus, samples: Samples) -> Iterator[Micro]:
    """This rank's part of the held-out windows: over all parts each held-out token is a target exactly once.

    Windows lie end to end over every shard and number i goes to part i % parts.
    """
    shard, start = _windows_end_to_end(corpus.heldout, samples.sequence)
    micros = ceil(ceil(len(start) / samples.parts) / samples.micro_sequences)
    shard, start = shard[samples.part :: samples.parts], start[samples.part :: samples.parts]
    for row in range(0, micros * samples.micro_sequences, samples.micro_sequences):
        rows = slice(row, row + samples.micro_sequences)
        if not len(start[rows]):
            yield _uncounted_micro(corpus, samples)
            continue
        inputs, targets = _padded_rows(corpus, shard[rows], start[rows], samples.sequence)
        lengths = None
        if samples.documents == "mask":
            lengths = segment_lengths(corpus.heldout, shard[rows], start[rows], samples.sequence)
        yield _micro(inputs, targets, lengths, samples)


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


def _targets(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The token after each one, NOT_COUNTED where that is marked."""
    if all(shards[number].mask is None for number in np.unique(shard)):
        return tokens[:, 1:]
    targets = tokens[:, 1:].astype(np.int64)
    for number in np.unique(shard):
        mine = np.flatnonzero(shard == number)
        marks = shards[number].mask_rows(start[mine] + 1, targets.shape[1])
        targets[mine] = np.where(marks, NOT_COUNTED, targets[mine])
    return targets


def _windows_end_to_end(shards: Sequence[Shard], sequence: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    starts = [np.arange(0, len(shard.tokens) - 1, sequence) for shard in shards]
    numbers = np.repeat(np.arange(len(shards)), [len(each) for each in starts])
    return numbers, np.concatenate([np.empty(0, dtype=np.int64), *starts])


def _padded_rows(
    corpus: Corpus, numbers: np.ndarray[Any, Any], start: np.ndarray[Any, Any], sequence: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets; past a shard's end the inputs are <eot> and the targets NOT_COUNTED."""
    inputs = np.full((len(start), sequence), corpus.eot, dtype=np.int64)
    targets = np.full((len(start), sequence), NOT_COUNTED, dtype=np.int64)
    for row, (number, first) in enumerate(zip(numbers.tolist(), start.tolist(), strict=True)):
        shard = corpus.heldout[number]
        tokens = shard.tokens[first : first + sequence + 1]
        marks = shard.mask_rows(np.array([first]), len(tokens))[0, 1:]
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = np.where(marks, NOT_COUNTED, tokens[1:].astype(np.int64))
    return inputs, targets


def _uncounted_micro(corpus: Corpus, samples: Samples) -> Micro:
    inputs = np.full((1, samples.sequence), corpus.eot, dtype=np.int64)
    lengths = np.array([samples.sequence]) if samples.documents == "mask" else None
    return _micro(inputs, np.full_like(inputs, NOT_COUNTED), lengths, samples)


def _micro(
    inputs: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any] | None,
    samples: Samples,
) -> Micro:
    positions = None if lengths is None else restarting_positions(lengths).reshape(inputs.shape)
    if samples.contexts > 1:
        columns = zigzag_columns(samples.sequence, samples.contexts, samples.context)
        positions = columns[None] if positions is None else positions[:, columns]
        inputs, targets = inputs[:, columns], targets[:, columns]
    return Micro(
        inputs=_tensor(inputs, samples.device),
        targets=_tensor(targets, samples.device),
        positions=None if positions is None else _tensor(positions, samples.device),
        lengths=None if lengths is None else tuple(lengths.tolist()),
    )


def _tensor(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
