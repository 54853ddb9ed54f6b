"""`plait data --balance`: how the documents of a recipe's steps fall to the parts of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.data.balance import IntArray, attention_pairs, balance_samples, counted_targets, window_lengths
from plait.data.order import make_order
from plait.data.rows import NOT_COUNTED, gather, targets
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.layout import equal_share
from plait.recipe.schema import RunConfig

MOST_STEPS = 20
_MOST_TOKENS = 1 << 24
_JOINED = "documents are joined, so all sequences weigh the same and stay as they come"
_EITHER = (
    "this is with data.mask_documents = true; joined documents weigh the same in all sequences and stay as they come"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """What falls to one part of the batch over some steps; pairs are of a token and one at or before it, per token."""

    sequences: int
    tokens: int
    counted: float
    """The part of the tokens that has a loss."""
    pairs_as_they_come: float
    pairs: float
    median_length: float
    """Of the pieces of documents in its sequences, in tokens."""
    long_length: float
    """Nine of ten pieces are shorter."""
    surprise: float
    """Of the targets to somebody who only knows how often each token occurs, in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """How steps are dealt; a ratio is, of each step, the pairs of the fullest part to those of the emptiest."""

    steps: int
    sequence: int
    remark: str
    parts: tuple[ReplicaStats, ...]
    ratios_as_they_come: tuple[float, ...]
    ratios: tuple[float, ...]

    def table(self) -> str:
        """For people."""
        batch = sum(part.sequences for part in self.parts)
        usual = f"{np.median(self.ratios_as_they_come):.3f} as they come, {np.median(self.ratios):.3f} dealt"
        worst = f"{max(self.ratios_as_they_come):.3f} and {max(self.ratios):.3f}"
        lines = [
            f"deal     {self.steps} steps of {batch} sequences of {self.sequence} tokens to {len(self.parts)} parts",
            "part  sequences     tokens  with loss         pairs a token    pieces of documents    surprise",
            "         a step                        as they come   dealt    median   90 % below  of targets",
            *(f"{number:4}{_row(part)}" for number, part in enumerate(self.parts)),
            f"pairs a token, the most by the least of a step: {usual} (in the worst step {worst})",
            "surprise: in nats a token, to somebody who only knows how often each token occurs",
            *([self.remark] if self.remark else []),
        ]
        return "\n         ".join(lines)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What a part has had so far."""

    counted: int = 0
    pairs_as_they_come: int = 0
    pairs: int = 0
    surprise: float = 0.0
    lengths: list[IntArray]


def balance_report(config: RunConfig, corpus: Corpus, parts: int) -> BalanceReport:
    """Deal a recipe's first steps to so many parts; raises PlaitError where the recipe leaves a step's size open."""
    sequence, shares = _sequence(config), _shares(config, parts)
    order = make_order(corpus, config.run.seed, sequence)
    batch = sum(shares)
    steps = max(1, min(MOST_STEPS, _MOST_TOKENS // (batch * sequence)))
    seen = [_Seen(lengths=[]) for _ in shares]
    rare = _surprises(corpus)
    come, dealt = [], []
    for step in range(steps):
        shard, start = order.windows(np.arange(step * batch, (step + 1) * batch))
        pairs = attention_pairs(corpus.train, shard, start, sequence)
        if config.data.mask_documents is False:  # each token looks back over all documents of its sequence
            pairs = np.full_like(pairs, sequence * (sequence + 1) // 2)
        before = np.split(np.arange(batch), np.cumsum(shares)[:-1])
        counted = counted_targets(corpus.train, shard, start, sequence)
        after = before if config.data.mask_documents is False else balance_samples(pairs, shares, counted)
        come.append(_ratio(pairs, before))
        dealt.append(_ratio(pairs, after))
        for one, there, here in zip(seen, before, after, strict=True):
            one.pairs_as_they_come += int(pairs[there].sum())
            one.pairs += int(pairs[here].sum())
            one.counted += int(counted[here].sum())
            one.surprise += _surprise(corpus, rare, shard[here], start[here], sequence)
            one.lengths += list(_lengths(corpus, shard[here], start[here], sequence))
    return BalanceReport(
        steps=steps,
        sequence=sequence,
        remark={True: "", False: _JOINED, "auto": _EITHER}[config.data.mask_documents],
        parts=tuple(_told(one, count, steps * count * sequence) for one, count in zip(seen, shares, strict=True)),
        ratios_as_they_come=tuple(come),
        ratios=tuple(dealt),
    )


def _sequence(config: RunConfig) -> int:
    if config.train.sequence == "auto":
        raise PlaitError("a step can be dealt only where its size is known; name it: train.sequence=512, for example")
    return config.train.sequence


def _shares(config: RunConfig, parts: int) -> tuple[int, ...]:
    asked, named = config.train.batch_tokens, config.layout.shares
    if asked == "auto":
        raise PlaitError("a step can be dealt only where its size is known; name it: train.batch_tokens=32768, say")
    sequences = asked // _sequence(config)
    if sequences < 2:
        raise PlaitError("a step has 1 sequence, which cannot be dealt; choose a larger train.batch_tokens")
    if sequences < parts:
        raise PlaitError(f"a step has {sequences} sequences, too few for {parts} parts; choose --balance {sequences}")
    if named == "auto":
        return tuple(equal_share(sequences, parts, part)[1] for part in range(parts))
    if len(named) != parts or sum(named) != sequences:
        raise PlaitError(
            f"layout.shares has {len(named)} parts of {sum(named)} sequences in all, and {parts} parts of {sequences} "
            "were asked for; mend one of the two"
        )
    return named


def _ratio(pairs: IntArray, deal: Sequence[IntArray]) -> float:
    means = [float(pairs[rows].mean()) for rows in deal]
    return max(means) / min(means)


def _surprises(corpus: Corpus) -> np.ndarray[Any, Any]:
    """Nats of each token by how often it occurs; each counts once more than seen, so that none is endless."""
    seen = np.ones(corpus.vocabulary)
    for shard in corpus.train:
        seen += np.bincount(shard.tokens[: _MOST_TOKENS // len(corpus.train)], minlength=corpus.vocabulary)
    return np.log(seen.sum()) - np.log(seen)


def _surprise(
    corpus: Corpus, rare: np.ndarray[Any, Any], shard: np.ndarray[Any, Any], start: IntArray, sequence: int
) -> float:
    wanted = targets(corpus.train, shard, start, gather(corpus.train, shard, start, sequence + 1))
    return float(rare[wanted[wanted != NOT_COUNTED]].sum())


def _lengths(corpus: Corpus, shard: np.ndarray[Any, Any], start: IntArray, sequence: int) -> Iterator[IntArray]:
    for number in np.unique(shard):
        yield window_lengths(corpus.train[number], start[shard == number], sequence)[0]


def _told(seen: _Seen, sequences: int, tokens: int) -> ReplicaStats:
    lengths = np.concatenate(seen.lengths)
    return ReplicaStats(
        sequences=sequences,
        tokens=tokens,
        counted=seen.counted / tokens,
        pairs_as_they_come=seen.pairs_as_they_come / tokens,
        pairs=seen.pairs / tokens,
        median_length=float(np.median(lengths)),
        long_length=float(np.percentile(lengths, 90)),
        surprise=seen.surprise / max(1, seen.counted),
    )


def _row(part: ReplicaStats) -> str:
    return (
        f"{part.sequences:11}{part.tokens:11,}{part.counted:11.1%}{part.pairs_as_they_come:15.1f}{part.pairs:8.1f}"
        f"{part.median_length:10.0f}{part.long_length:13.0f}{part.surprise:12.2f}"
    )
