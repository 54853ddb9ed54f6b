"""Windows cut from a stream of documents, for training and for evaluation."""

from __future__ import annotations

import numpy as np

from plait.data.balance import IntArray, attention_pairs, counted_targets
from plait.data.order import SampleOrder
from plait.data.packing import segment_lengths
from plait.data.rows import check_ids, gather_rows, make_targets, padded_rows, windows_end_to_end
from plait.data.samples.reader import TokenRows
from plait.data.shards import Shard


class WindowReader:
    """Training windows in the order of the seed; a place is a shard and the position of its first token."""

    def __init__(self, shards: tuple[Shard, ...], order: SampleOrder, vocabulary: int) -> None:
        self.sequence = order.sequence
        self._shards, self._order, self._vocabulary = shards, order, vocabulary

    @property
    def samples(self) -> int:
        """Windows of one pass."""
        return self._order.samples

    def places(self, positions: IntArray) -> IntArray:
        """Shard and first token of each position: [B, 2]."""
        shard, start = self._order.windows(positions)
        return np.stack([shard.astype(np.int64), start], axis=1)

    def attention_pairs(self, places: IntArray) -> IntArray:
        """Pairs of a token and one at or before it in its document, for each window."""
        return attention_pairs(self._shards, places[:, 0], places[:, 1], self.sequence)

    def counted_targets(self, places: IntArray) -> IntArray:
        """Targets of each window that enter the loss."""
        return counted_targets(self._shards, places[:, 0], places[:, 1], self.sequence)

    def read(self, places: IntArray) -> TokenRows:
        """The windows' tokens."""
        shard, start = places[:, 0], places[:, 1]
        tokens = gather_rows(self._shards, shard, start, self.sequence + 1)
        check_ids(tokens, self._vocabulary, self._shards, shard)
        return TokenRows(
            inputs=tokens[:, :-1],
            targets=make_targets(self._shards, shard, start, tokens),
            lengths=segment_lengths(self._shards, shard, start, self.sequence),
        )


class EndToEndReader:
    """Windows that lie end to end over a split, so that each of its tokens is a target exactly once; the last of a
    shard may reach past its end."""

    def __init__(self, shards: tuple[Shard, ...], *, sequence: int, eot: int, vocabulary: int) -> None:
        self.sequence = sequence
        self._shards, self._eot, self._vocabulary = shards, eot, vocabulary
        self._places = np.stack(windows_end_to_end(shards, sequence), axis=1).astype(np.int64)
        self.samples = len(self._places)

    def places(self, positions: IntArray) -> IntArray:
        """Shard and first token of each position: [B, 2]."""
        return self._places[positions]

    def read(self, places: IntArray) -> TokenRows:
        """The windows' tokens; past a shard's end they are <eot> and nothing is learned."""
        shard, start = places[:, 0], places[:, 1]
        inputs, wanted = padded_rows(self._shards, self._eot, shard, start, self.sequence)
        for tokens in (inputs, wanted):
            check_ids(tokens, self._vocabulary, self._shards, shard)
        return TokenRows(
            inputs=inputs, targets=wanted, lengths=segment_lengths(self._shards, shard, start, self.sequence)
        )
