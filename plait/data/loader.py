"""Micro-batches as tensors: a rank's share of each training step, prefetched, and the held-out windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from plait.accelerator import is_compiled, to_device
from plait.data.balance import balance_samples, order_by_load
from plait.data.integrity import BackgroundVerification
from plait.data.micro_sizes import micro_sizes
from plait.data.packing import Lengths, restarting_positions, rows_ahead, zigzag_columns
from plait.data.rows import IGNORED_TARGET
from plait.data.samples.micro import NO_PAIR, Ahead, Micro, MicroPairs, SampleSelection
from plait.data.samples.opening import all_training_samples, heldout_samples
from plait.data.samples.reader import PairRows, RowReader, SampleReader
from plait.data.samples.sizes import Overlong
from plait.data.shards import Corpus


class Loader:
    """Returns one rank's samples of each step, and prefetches the next step's in a background thread."""

    def __init__(self, corpus: Corpus, reader: SampleReader, samples: SampleSelection) -> None:
        assert samples.sequence == reader.sequence
        self.wait_s = 0.0
        """Seconds that the last call of `micros` had to wait."""
        self._corpus, self._reader = corpus, reader
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: tuple[int, SampleSelection, Future[list[Micro]]] | None = None
        self._verification: BackgroundVerification | None = None
        self.set_selection(samples)

    @property
    def selection(self) -> SampleSelection:
        """The selection that is in use now."""
        return self._samples

    def set_selection(self, samples: SampleSelection) -> None:
        """Read this selection from the next call of `micros` on; data prefetched for another one are dropped."""
        assert samples.micro_sequences > 0 and samples.data_parallel_rank in samples.lockstep_replicas
        replicas = len(samples.sequences_per_replica)
        assert min(samples.sequences_per_replica) > 0 and samples.lockstep_replicas.stop <= replicas
        assert not samples.micro_limits or (min(samples.micro_limits) > 0 and len(samples.micro_limits) == replicas)
        self._samples = samples

    def micros(self, position: int) -> list[Micro]:
        """The micro-batches of the step that starts at global `position`; blocks until they are ready.

        Raises RunFailed where the data are found to be damaged.
        """
        if self._verification:
            self._verification.raise_if_damaged()
        began = time.perf_counter()
        if self._ahead is None or self._ahead[:2] != (position, self._samples):
            self._fetch_ahead(position)
        assert self._ahead is not None
        found = self._ahead[2].result()
        self.wait_s = time.perf_counter() - began
        self._fetch_ahead(position + self._samples.batch_sequences)
        return found

    def verify_in_background(self) -> None:
        """From now on compare the corpus's files with their hashes, slowly, while `micros` is called."""
        self._verification = BackgroundVerification(self._corpus)

    def close(self) -> None:
        """End the background threads."""
        if self._verification:
            self._verification.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetch_ahead(self, position: int) -> None:
        samples = self._samples
        self._ahead = (position, samples, self._thread.submit(self._fetch, position, samples))

    def _fetch(self, position: int, samples: SampleSelection) -> list[Micro]:
        places = self._reader.places(position + np.arange(samples.batch_sequences))
        mine = _own_samples(self._reader, places, samples)
        sizes = _sizes(samples.sequences_per_replica, samples)
        return [
            _read_micro(self._corpus, self._reader, places[mine[rows]], position + mine[rows], samples)
            for rows in _row_slices(sizes)
        ]


def heldout_micros(corpus: Corpus, samples: SampleSelection, overlong: Overlong = "refuse") -> Iterator[Micro]:
    """This rank's micro-batches of held-out windows: over all data-parallel ranks, each held-out token that is learned
    is a target exactly once.

    The data-parallel ranks take turns, each with the same share of the windows as of a training step. Raises
    PlaitError for examples that are too long where that is refused.
    """
    yield from _each_once(corpus, heldout_samples(corpus, samples.sequence, overlong), samples)


def micros_of_pairs(corpus: Corpus, samples: SampleSelection, overlong: Overlong = "refuse") -> Iterator[Micro]:
    """This rank's micro-batches of all pairs of a corpus of pairs, the training part's first, as in `heldout_micros`:
    over all data-parallel ranks each pair is there exactly once."""
    yield from _each_once(corpus, all_training_samples(corpus, samples.sequence, overlong), samples)
    yield from heldout_micros(corpus, samples, overlong)


def _each_once(corpus: Corpus, reader: RowReader, samples: SampleSelection) -> Iterator[Micro]:
    samples = replace(samples, predict_ahead=0)
    if not reader.samples:
        return
    takers = np.resize(interleaved_replicas(samples.sequences_per_replica), reader.samples)
    mine = np.flatnonzero(takers == samples.data_parallel_rank)
    places = reader.places(mine)
    counts = np.bincount(takers, minlength=len(samples.sequences_per_replica)).tolist()
    for rows in _row_slices(_sizes(counts, samples)):
        yield _read_micro(corpus, reader, places[rows], mine[rows], samples)


def _read_micro(
    corpus: Corpus, reader: RowReader, places: Lengths, numbers: Lengths, samples: SampleSelection
) -> Micro:
    """The samples of these numbers, at these places; one without counted tokens where there are none."""
    if not len(places):
        return _uncounted_micro(corpus, samples)
    rows = reader.read(places)
    lengths = rows.lengths if samples.documents == "mask" else None
    micro = make_micro(rows.inputs, rows.targets, lengths, samples, numbers)
    return _with_pairs(micro, corpus, rows.pairs, samples)


def _with_pairs(micro: Micro, corpus: Corpus, pairs: PairRows | None, samples: SampleSelection) -> Micro:
    """The micro-batch with the pairs in it; of a corpus that has none as it is."""
    if corpus.layout != "pairs":
        return micro
    pairs = pairs or PairRows.none((len(micro.inputs), samples.sequence))
    columns = zigzag_columns(samples.sequence, samples.context_degree, samples.context_rank)
    held = MicroPairs(
        numbers=_tensor(_pair_numbers(pairs, len(micro.inputs), samples.device), samples.device),
        sequence=_tensor(pairs.sequence[:, columns], samples.device),
        reported=len(pairs.numbers) if samples.context_rank == 0 else 0,
    )
    return replace(micro, pairs=held)


def _pair_numbers(pairs: PairRows, rows: int, device: torch.device) -> Lengths:
    """The pairs' numbers; on devices that compile operations for each shape, as many as these rows can ever hold."""
    if not is_compiled(device):
        return pairs.numbers
    numbers = np.full(rows * pairs.most_in_row, NO_PAIR)
    numbers[: len(pairs.numbers)] = pairs.numbers
    return numbers


def _own_samples(reader: SampleReader, places: Lengths, samples: SampleSelection) -> Lengths:
    """Indices of a step's samples that this rank reads, in reading order.

    Where documents are masked, their lengths determine the load of ranks and micro-batches, so the assignment follows
    the lengths. Every rank computes the same assignment.
    """
    if samples.documents == "join":
        first = sum(samples.sequences_per_replica[: samples.data_parallel_rank])
        return np.arange(first, first + samples.sequences_per_replica[samples.data_parallel_rank])
    pairs, counted = reader.attention_pairs(places), reader.counted_targets(places)
    mine = balance_samples(pairs, samples.sequences_per_replica, counted)[samples.data_parallel_rank]
    filled = tuple(size for size in _sizes(samples.sequences_per_replica, samples) if size)
    return order_by_load(pairs, mine, filled, counted)


def _row_slices(sizes: Sequence[int]) -> Iterator[slice]:
    """The rows of each micro-batch."""
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        yield slice(end - size, end)


def _sizes(counts: Sequence[int], samples: SampleSelection) -> tuple[int, ...]:
    """Sizes of this rank's micro-batches when data-parallel ranks have these `counts` of sequences."""
    own = samples.lockstep_replicas.index(samples.data_parallel_rank)
    limits = samples.micro_limits or (samples.micro_sequences,) * len(counts)
    met = samples.lockstep_replicas
    return micro_sizes(tuple(counts[part] for part in met), tuple(limits[part] for part in met))[own]


def interleaved_replicas(sequences_per_replica: tuple[int, ...]) -> Lengths:
    """Data-parallel rank of each window in a cycle of sum(`sequences_per_replica`) windows: each rank appears as
    often as it has sequences, evenly spread; ranks with equal counts alternate."""
    places = [(np.arange(count) + 0.5) / count for count in sequences_per_replica]
    owners = np.repeat(np.arange(len(sequences_per_replica)), sequences_per_replica)
    return owners[np.argsort(np.concatenate(places), kind="stable")]


def _uncounted_micro(corpus: Corpus, samples: SampleSelection) -> Micro:
    inputs = np.full((1, samples.sequence), corpus.eot, dtype=np.int64)
    lengths = np.array([samples.sequence]) if samples.documents == "mask" else None
    micro = make_micro(inputs, np.full_like(inputs, IGNORED_TARGET), lengths, samples)
    return _with_pairs(micro, corpus, None, samples)


def make_micro(
    inputs: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any] | None,
    samples: SampleSelection,
    numbers: Lengths | None = None,
) -> Micro:
    """Whole rows [B, T] as what this rank holds of them; `lengths` are the segments of the rows where documents are
    masked, `numbers` those of the samples, if they are any."""
    positions = None if lengths is None else restarting_positions(lengths).reshape(inputs.shape)
    first = np.full(len(inputs), -samples.sequence) if numbers is None else numbers * samples.sequence
    of_tokens = first[:, None] + np.arange(samples.sequence)
    # Of whole rows: what is predicted may lie on another context rank.
    depths = range(1, samples.predict_ahead + 1)
    ahead = [rows_ahead(inputs, targets, lengths, depth, ignored=IGNORED_TARGET) for depth in depths]
    if samples.context_degree > 1:
        columns = zigzag_columns(samples.sequence, samples.context_degree, samples.context_rank)
        positions = columns[None] if positions is None else positions[:, columns]
        inputs, targets, of_tokens = inputs[:, columns], targets[:, columns], of_tokens[:, columns]
        ahead = [(tokens[:, columns], wanted[:, columns]) for tokens, wanted in ahead]
    return Micro(
        inputs=_tensor(inputs, samples.device),
        targets=_tensor(targets, samples.device),
        ahead=tuple(Ahead(*(_tensor(one, samples.device) for one in pair)) for pair in ahead),
        positions=None if positions is None else _tensor(positions, samples.device),
        lengths=None if lengths is None else tuple(lengths.tolist()),
        numbers=_tensor(of_tokens, samples.device),
    )


def _tensor(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)), device)
