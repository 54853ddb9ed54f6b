"""How long the examples of a corpus are, as far as a plan must know it: values without the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.data.balance import IntArray
from plait.data.index import SampleLayout
from plait.data.samples.best_fit import best_fit
from plait.data.shards import Corpus, Shard
from plait.errors import PlaitError
from plait.units import counted

Overlong = Literal["refuse", "drop", "cut"]
LengthCounts = tuple[tuple[int, int, int], ...]
"""Length in input tokens, how many of them come before the first that predicts a learned one, and the number of
examples with both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShare:
    """The result of packing into windows of one length."""

    windows: int
    share: float
    """Share of the windows' tokens that examples fill."""
    overlong: int
    """Examples that are longer than a window."""
    examples: int
    """Examples, or pairs, that are learned from."""
    tokens: int
    """Tokens of these, as far as windows hold them."""
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSizes:
    """The tokens of each shard of a stream, or the lengths of whole examples by stream that is shuffled as one."""

    stream_tokens: tuple[int, ...] = ()
    examples: tuple[LengthCounts, ...] = ()
    heldout: LengthCounts = ()
    """Lengths of the held-out examples."""
    layout: SampleLayout = "whole"
    """If "pairs", each length is that of both examples together, which are packed as one and never cut."""

    @property
    def unit(self) -> str:
        """The unit of packing, in a word."""
        return "pair" if self.layout == "pairs" else "example"

    @property
    def longest_example(self) -> int:
        """In input tokens, of both parts; 0 for a stream."""
        return max((length for counts in (*self.examples, self.heldout) for length, _, _ in counts), default=0)

    def longest_within(self, sequence: int) -> int:
        """In input tokens, of the examples that a window of `sequence` tokens holds; 0 where it holds none."""
        every = (*self.examples, self.heldout)
        return max((length for counts in every for length, _, _ in counts if length <= sequence), default=0)

    def epoch_windows(self, sequence: int, overlong: Overlong) -> int:
        """Windows of `sequence` tokens in one pass over the training part."""
        if not self.examples:
            return sum((tokens - 1) // sequence for tokens in self.stream_tokens)
        return self.packed(sequence, overlong).windows

    def packed(self, sequence: int, overlong: Overlong) -> PackedShare:
        """The result of packing whole examples into windows of `sequence` tokens."""
        windows = used = beyond = examples = 0
        for counts in self.examples:
            length, before, number = np.array(counts, dtype=np.int64).T
            beyond += int(number[length > sequence].sum())
            kept = (length > 0) & (length <= sequence if overlong == "drop" else before < sequence)
            examples += int(number[kept].sum())
            lengths = np.repeat(np.minimum(length, sequence)[kept], number[kept])
            if len(lengths):
                windows += int(best_fit(lengths, sequence).max()) + 1
                used += int(lengths.sum())
        share = used / max(1, windows * sequence)
        tokens = used + examples * (2 if self.layout == "pairs" else 1)  # the last of each is only a target
        return PackedShare(
            windows=windows, share=share, overlong=beyond, examples=examples, tokens=tokens, unit=self.unit
        )

    def check_overlong(self, sequence: int, overlong: Overlong) -> None:
        """Raise PlaitError where examples are longer than a window and the recipe does not say what to do."""
        every = (*self.examples, self.heldout)
        beyond = sum(count for counts in every for length, _, count in counts if length > sequence)
        if beyond and overlong == "refuse":
            raise PlaitError(overlong_sentence(beyond, self.longest_example, sequence, self.layout))


def overlong_sentence(number: int, longest: int, sequence: int, layout: SampleLayout = "whole") -> str:
    """Advice on examples that do not fit."""
    verb = "is" if number == 1 else "are"
    if layout == "pairs":
        return (
            f"{counted(number, 'pair')} {verb} longer than a window of {sequence} tokens, which must hold the prompt "
            f"with both answers (the longest has {longest}); give longer windows (train.sequence, or --sequence), or "
            'write data.overlong = "drop"'
        )
    return (
        f"{counted(number, 'example')} {verb} longer than a window of {sequence} tokens (the longest has {longest}); "
        f'give longer windows (train.sequence, or --sequence), or write data.overlong = "drop" or "cut"'
    )


def corpus_sizes(corpus: Corpus) -> CorpusSizes:
    """The sizes of a corpus."""
    if corpus.layout == "stream":
        return CorpusSizes(stream_tokens=tuple(len(shard.tokens) for shard in corpus.train))
    groups = sorted({shard.source for shard in corpus.train})
    return CorpusSizes(
        examples=tuple(
            _length_counts([one for one in corpus.train if one.source == group], corpus.layout) for group in groups
        ),
        heldout=_length_counts(corpus.heldout, corpus.layout),
        layout=corpus.layout,
    )


def _length_counts(shards: Sequence[Shard], layout: SampleLayout) -> LengthCounts:
    if not shards:
        return ()
    own = np.concatenate([_lengths_and_prompts(shard, layout) for shard in shards])
    kinds, counts = np.unique(own, axis=0, return_counts=True)
    rows = zip(kinds.tolist(), counts.tolist(), strict=True)
    return tuple((length, before, count) for (length, before), count in rows)


def _lengths_and_prompts(shard: Shard, layout: SampleLayout) -> IntArray:
    """Length of each example, and its inputs before the first that predicts a learned token: [N, 2]; for a pair the
    length of both and 0, as pairs are never cut."""
    assert shard.mask is not None
    if layout == "pairs":
        both = example_lengths(shard).reshape(-1, 2).sum(axis=1)
        return np.stack([both, np.zeros_like(both)], axis=1)
    learned, second = np.flatnonzero(shard.mask == 0), np.asarray(shard.starts) + 1
    return np.stack([example_lengths(shard), learned[np.searchsorted(learned, second)] - second], axis=1)


def example_lengths(shard: Shard) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Input tokens of each example of a shard: all but its last token, which is only a target."""
    return np.diff(shard.starts, append=len(shard.tokens) - 1) - 1
