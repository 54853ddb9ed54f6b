"""Micro-batches as tensors: a rank's share of each training step, fetched ahead, and the held-out windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from plait.data.balance import attention_pairs, balance_samples, counted_targets, order_by_load
from plait.data.micro_sizes import micro_sizes
from plait.data.order import Order
from plait.data.packing import Lengths, restarting_positions, segment_lengths, zigzag_columns
from plait.data.rows import NOT_COUNTED, gather, padded_rows, targets, windows_end_to_end
from plait.data.shards import Corpus, Shard

DocumentMode = Literal["mask", "join"]


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
    """Which samples a rank takes, and in which micro-batches.

    Of each step's sequences data-parallel rank p takes parts[p], and this rank is number `part`. It takes them at most
    `micro_sequences` at a time (limits[p] where ranks differ in that), in as many micro-batches as the other ranks of
    `in_lockstep`: those with which it communicates in the middle of each. Of each sequence it sees part `context` of
    `contexts`.
    """

    sequence: int
    parts: tuple[int, ...]
    part: int
    in_lockstep: range
    micro_sequences: int
    documents: DocumentMode
    device: torch.device
    limits: tuple[int, ...] = ()
    context: int = 0
    contexts: int = 1

    @property
    def batch_sequences(self) -> int:
        """Of a step, over all parts."""
        return sum(self.parts)


class Loader:
    """Gives one rank its samples of each step and prepares the next step's in one background thread."""

    def __init__(self, corpus: Corpus, order: Order, samples: Samples) -> None:
        assert samples.sequence == order.sequence
        self.wait_s = 0.0
        """Seconds that the last call of `micros` had to wait."""
        self._corpus, self._order = corpus, order
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, Samples, Future[list[Micro]]] | None = None
        self.take(samples)

    @property
    def samples(self) -> Samples:
        """What the rank takes now."""
        return self._samples

    def take(self, samples: Samples) -> None:
        """From the next call of `micros` on take these; what was fetched ahead of it for others is dropped."""
        assert samples.micro_sequences > 0 and samples.part in samples.in_lockstep
        assert min(samples.parts) > 0 and samples.in_lockstep.stop <= len(samples.parts)
        assert not samples.limits or (min(samples.limits) > 0 and len(samples.limits) == len(samples.parts))
        self._samples = samples

    def micros(self, position: int) -> list[Micro]:
        """The micro-batches of the step that starts at global `position`; blocks until they are there."""
        began = time.perf_counter()
        if self._ahead is None or self._ahead[:2] != (position, self._samples):
            self._fetch_ahead(position)
        assert self._ahead is not None
        found = self._ahead[2].result()
        self.wait_s = time.perf_counter() - began
        self._fetch_ahead(position + self._samples.batch_sequences)
        return found

    def close(self) -> None:
        """End the background thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch_ahead(self, position: int) -> None:
        samples = self._samples
        self._ahead = (position, samples, self._thread.submit(self._fetch, position, samples))

    def _fetch(self, position: int, samples: Samples) -> list[Micro]:
        train = self._corpus.train
        shard, start = self._order.windows(position + np.arange(samples.batch_sequences))
        mine = _own_samples(train, shard, start, samples)
        shard, start = shard[mine], start[mine]
        found = []
        for rows in _portions(_sizes(samples.parts, samples)):
            if not len(start[rows]):
                found.append(_uncounted_micro(self._corpus, samples))
                continue
            tokens = gather(train, shard[rows], start[rows], samples.sequence + 1)
            lengths = None
            if samples.documents == "mask":
                lengths = segment_lengths(train, shard[rows], start[rows], samples.sequence)
            wanted = targets(train, shard[rows], start[rows], tokens)
            found.append(_micro(tokens[:, :-1], wanted, lengths, samples))
        return found


def heldout_micros(corpus: Corpus, samples: Samples) -> Iterator[Micro]:
    """This rank's part of the held-out windows: over all parts each held-out token is a target exactly once.

    Windows lie end to end over every shard, and the parts take them in turns, as many each as it has of a step.
    """
    shard, start = windows_end_to_end(corpus.heldout, samples.sequence)
    if not len(start):
        return
    takers = np.resize(interleaved_turns(samples.parts), len(start))
    mine = np.flatnonzero(takers == samples.part)
    shard, start = shard[mine], start[mine]
    counts = np.bincount(takers, minlength=len(samples.parts)).tolist()
    for rows in _portions(_sizes(counts, samples)):
        if not len(start[rows]):
            yield _uncounted_micro(corpus, samples)
            continue
        inputs, wanted = padded_rows(corpus.heldout, corpus.eot, shard[rows], start[rows], samples.sequence)
        lengths = None
        if samples.documents == "mask":
            lengths = segment_lengths(corpus.heldout, shard[rows], start[rows], samples.sequence)
        yield _micro(inputs, wanted, lengths, samples)


def _own_samples(train: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: Lengths, samples: Samples) -> Lengths:
    """Which of a step's samples this rank takes, in order.

    Masked documents load ranks and micro-batches by their lengths, so the lengths decide. Every rank computes the same
    assignment.
    """
    if samples.documents == "join":
        first = sum(samples.parts[: samples.part])
        return np.arange(first, first + samples.parts[samples.part])
    pairs = attention_pairs(train, shard, start, samples.sequence)
    counted = counted_targets(train, shard, start, samples.sequence)
    mine = balance_samples(pairs, samples.parts, counted)[samples.part]
    filled = tuple(size for size in _sizes(samples.parts, samples) if size)
    return order_by_load(pairs, mine, filled, counted)


def _portions(sizes: Sequence[int]) -> Iterator[slice]:
    """The rows of each micro-batch."""
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        yield slice(end - size, end)


def _sizes(counts: Sequence[int], samples: Samples) -> tuple[int, ...]:
    """Sizes of this rank's micro-batches when data-parallel ranks have these `counts` of sequences."""
    own = samples.in_lockstep.index(samples.part)
    limits = samples.limits or (samples.micro_sequences,) * len(counts)
    met = samples.in_lockstep
    return micro_sizes(tuple(counts[part] for part in met), tuple(limits[part] for part in met))[own]


def interleaved_turns(parts: tuple[int, ...]) -> Lengths:
    """Who takes what comes one after the other: part p parts[p] times, evenly spread; equal parts take turns."""
    places = [(np.arange(count) + 0.5) / count for count in parts]
    owners = np.repeat(np.arange(len(parts)), parts)
    return owners[np.argsort(np.concatenate(places), kind="stable")]


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
