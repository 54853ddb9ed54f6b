"""`plait data --balance`: how the documents of a recipe's steps are distributed over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.data.balance import IntArray, balance_samples
from plait.data.rows import IGNORED_TARGET
from plait.data.samples.opening import training_samples
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.layout import equal_share
from plait.recipe.schema import RunConfig
from plait.units import counted

MAX_STEPS_BALANCED = 20
_MAX_TOKENS_READ = 1 << 24
_JOINED_REMARK = "documents are joined, so all sequences cost the same and keep their order"
_AUTO_REMARK = (
    "this is with data.mask_documents = true; if documents are joined, all sequences cost the same and keep their order"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """What one data-parallel rank gets over some steps. Pairs are those of a token with itself or an earlier one of
    its document, per token."""

    sequences: int
    tokens: int
    counted_share: float
    """Fraction of the tokens that enter the loss."""
    pairs_unbalanced: float
    pairs_balanced: float
    median_piece_tokens: float
    """Median length of the pieces of documents in its sequences, in tokens."""
    p90_piece_tokens: float
    """90th percentile of the pieces' lengths, in tokens."""
    unigram_nats_per_token: float
    """Cross-entropy of the targets under a model that knows only how often each token occurs, in nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """How steps are distributed over data-parallel ranks; a ratio is, for each step, the pairs of the fullest rank
    over those of the emptiest."""

    steps: int
    sequence: int
    remark: str
    replicas: tuple[ReplicaStats, ...]
    ratios_unbalanced: tuple[float, ...]
    ratios_balanced: tuple[float, ...]

    def table(self) -> str:
        """The report as text for people."""
        batch = sum(part.sequences for part in self.replicas)
        usual = f"{np.median(self.ratios_unbalanced):.3f} before, {np.median(self.ratios_balanced):.3f} after"
        worst = f"{max(self.ratios_unbalanced):.3f} and {max(self.ratios_balanced):.3f}"
        lines = [
            f"balance  {counted(self.steps, 'step')} of {batch} sequences of {self.sequence} tokens on "
            f"{counted(len(self.replicas), 'rank')}",
            "rank sequences      tokens   with pairs per token piece tokens entropy",
            "        a step               loss  before   after median   90 %  (nats)",
            *(f"{number:4}{_row(part)}" for number, part in enumerate(self.replicas)),
            "pairs: of a token and one at or before it in its document (work of attention); before and after balancing",
            f"most pairs of a rank / fewest pairs of a rank: median {usual}; worst step {worst}",
            "piece tokens: lengths of the parts of documents; 90 % are no longer than the second figure",
            "entropy: of the targets, nats per token, from how often each token occurs",
            *([self.remark] if self.remark else []),
        ]
        return "\n         ".join(lines)


@dataclass(slots=True, kw_only=True)
class _ReplicaTotals:
    """Sums over the steps so far for one data-parallel rank."""

    counted_targets: int = 0
    pairs_unbalanced: int = 0
    pairs_balanced: int = 0
    unigram_nats: float = 0.0
    lengths: list[IntArray]


def balance_report(config: RunConfig, corpus: Corpus, replicas: int) -> BalanceReport:
    """Distribute a recipe's first steps over so many data-parallel ranks; raises PlaitError where the recipe leaves
    the size of a step open."""
    sequence, shares = _tokens_per_sequence(config), _sequences_per_replica(config, replicas)
    reader = training_samples(corpus, config.run.seed, sequence, overlong=config.data.overlong)
    batch = sum(shares)
    steps = max(1, min(MAX_STEPS_BALANCED, _MAX_TOKENS_READ // (batch * sequence)))
    seen = [_ReplicaTotals(lengths=[]) for _ in shares]
    rare = _unigram_nats(corpus)
    come, assigned = [], []
    for step in range(steps):
        places = reader.places(np.arange(step * batch, (step + 1) * batch))
        pairs = reader.attention_pairs(places)
        if config.data.mask_documents is False:  # each token looks back over all documents of its sequence
            pairs = np.full_like(pairs, sequence * (sequence + 1) // 2)
        before = np.split(np.arange(batch), np.cumsum(shares)[:-1])
        counted = reader.counted_targets(places)
        after = before if config.data.mask_documents is False else balance_samples(pairs, shares, counted)
        come.append(_max_to_min_pairs(pairs, before))
        assigned.append(_max_to_min_pairs(pairs, after))
        for one, there, here in zip(seen, before, after, strict=True):
            one.pairs_unbalanced += int(pairs[there].sum())
            one.pairs_balanced += int(pairs[here].sum())
            one.counted_targets += int(counted[here].sum())
            rows = reader.read(places[here])
            one.unigram_nats += float(rare[rows.targets[rows.targets != IGNORED_TARGET]].sum())
            one.lengths.append(rows.lengths)
    return BalanceReport(
        steps=steps,
        sequence=sequence,
        remark={True: "", False: _JOINED_REMARK, "auto": _AUTO_REMARK}[config.data.mask_documents],
        replicas=tuple(
            _replica_stats(one, count, steps * count * sequence) for one, count in zip(seen, shares, strict=True)
        ),
        ratios_unbalanced=tuple(come),
        ratios_balanced=tuple(assigned),
    )


def check_balance_request(config: RunConfig, replicas: int) -> None:
    """Raise PlaitError where a recipe's steps cannot be divided among so many ranks; needs no text."""
    _sequences_per_replica(config, replicas)


def _tokens_per_sequence(config: RunConfig) -> int:
    if config.train.sequence == "auto":
        raise PlaitError("--balance needs the size of a step; name it: train.sequence=512, for example")
    return config.train.sequence


def _sequences_per_replica(config: RunConfig, replicas: int) -> tuple[int, ...]:
    requested, named = config.train.batch_tokens, config.layout.shares
    if requested == "auto":
        raise PlaitError("--balance needs the size of a step; name it: train.batch_tokens=32768, for example")
    sequences = requested // _tokens_per_sequence(config)
    if sequences < 2:
        raise PlaitError("a step has 1 sequence, which cannot be divided; choose a larger train.batch_tokens")
    if sequences < replicas:
        raise PlaitError(
            f"a step has {sequences} sequences, too few for {replicas} ranks; choose --balance {sequences}"
        )
    if named == "auto":
        return tuple(equal_share(sequences, replicas, part)[1] for part in range(replicas))
    if len(named) != replicas or sum(named) != sequences:
        asked = f"{counted(sequences, 'sequence')} among {counted(replicas, 'rank')}"
        raise PlaitError(
            f"layout.shares divides {counted(sum(named), 'sequence')} among {counted(len(named), 'rank')}, but "
            f"--balance asks for {asked}; change one of the two"
        )
    return named


def _max_to_min_pairs(pairs: IntArray, assignment: Sequence[IntArray]) -> float:
    means = [float(pairs[rows].mean()) for rows in assignment]
    return max(means) / min(means)


def _unigram_nats(corpus: Corpus) -> np.ndarray[Any, Any]:
    """Nats of each token by its frequency; one is added to every count, so that none is infinite."""
    seen = np.ones(corpus.vocabulary)
    for shard in corpus.train:
        seen += np.bincount(shard.tokens[: _MAX_TOKENS_READ // len(corpus.train)], minlength=corpus.vocabulary)
    return np.log(seen.sum()) - np.log(seen)


def _replica_stats(totals: _ReplicaTotals, sequences: int, tokens: int) -> ReplicaStats:
    lengths = np.concatenate(totals.lengths)
    return ReplicaStats(
        sequences=sequences,
        tokens=tokens,
        counted_share=totals.counted_targets / tokens,
        pairs_unbalanced=totals.pairs_unbalanced / tokens,
        pairs_balanced=totals.pairs_balanced / tokens,
        median_piece_tokens=float(np.median(lengths)),
        p90_piece_tokens=float(np.percentile(lengths, 90)),
        unigram_nats_per_token=totals.unigram_nats / max(1, totals.counted_targets),
    )


def _row(part: ReplicaStats) -> str:
    return (
        f"{part.sequences:10}{part.tokens:12,}{part.counted_share:7.1%}{part.pairs_unbalanced:8.1f}{part.pairs_balanced:8.1f}"
        f"{part.median_piece_tokens:7.0f}{part.p90_piece_tokens:7.0f}{part.unigram_nats_per_token:8.2f}"
    )
