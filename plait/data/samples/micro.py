"""A micro-batch as tensors, and which samples a rank reads: values that the loader fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from plait.data.rows import IGNORED_TARGET

DocumentMode = Literal["mask", "join"]


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What tokens predict at one depth beyond the next, int64 [B, T] each: `tokens` are those this many further on
    (any, where there is none), `targets` the ones after them, IGNORED_TARGET also if of another row or document."""

    tokens: torch.Tensor
    targets: torch.Tensor


NO_PAIR = -1
"""In the place of a pair's number, for devices that compile operations for each number of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroPairs:
    """The pairs of answers in a micro-batch: `numbers` [P] among all of the corpus, NO_PAIR where there is none, and
    `sequence` [B, T]: for a token 2i in the chosen example of pair i here, 2i + 1 in the rejected one, -1 in none.

    Of `numbers` all ranks of a context have the same ones, and `sequence` says it of each rank's own tokens. `reported`
    is how many of the pairs this rank counts: all of them on the first of those ranks, and none on the others.
    """

    numbers: torch.Tensor
    sequence: torch.Tensor
    reported: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Micro:
    """One micro-batch of B rows and T tokens.

    `inputs` and `targets` are int64 [B, T]; a target of IGNORED_TARGET does not enter the loss. Where documents are
    masked, `positions` [B, T] restart at each document and `lengths` are the segments of the flattened rows. Where this
    rank holds only a part of each sequence (context parallelism), `positions` are those in the whole sequence ([1, T]
    if equal in all rows), and `lengths`, if documents are masked, are those of the whole rows. Else they are None.
    `numbers` [B, T] are those of the tokens in the run (T0 × sample + place in it, of T0 tokens; negative in a row that
    is no sample), if known. `ends` may give the documents as GPUs' attention takes them (`Documents.ends`), with empty
    ones behind the last. `ahead` is for each depth of prediction beyond the next token, from 1 on. `pairs` is None
    where samples are no pairs of answers.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    lengths: tuple[int, ...] | None
    numbers: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    ahead: tuple[Ahead, ...] = ()
    pairs: MicroPairs | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """Number of the tokens here that enter the loss, a float64 scalar on the device."""
        return (self.targets != IGNORED_TARGET).sum().double()

    @property
    def counted(self) -> torch.Tensor:
        """What the sum of losses is divided by, of this micro-batch: its tokens, or the pairs that this rank reports; a
        float64 scalar on the device."""
        if self.pairs is None:
            return self.tokens
        if not self.pairs.reported:
            return torch.zeros((), dtype=torch.float64, device=self.targets.device)
        return (self.pairs.numbers != NO_PAIR).sum().double()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSelection:
    """The samples of each step that a rank reads, and how they are divided into micro-batches."""

    sequence: int
    sequences_per_replica: tuple[int, ...]
    """Sequences of a step for each data-parallel rank; sums to the global batch."""
    data_parallel_rank: int
    """This rank's data-parallel rank."""
    lockstep_replicas: range
    """The data-parallel ranks that communicate in the middle of each micro-batch, this one included: all run equally
    many."""
    micro_sequences: int
    """Largest number of sequences in a micro-batch."""
    documents: DocumentMode
    device: torch.device
    micro_limits: tuple[int, ...] = ()
    """`micro_sequences` of each data-parallel rank where they differ; else empty."""
    context_rank: int = 0
    """This rank's context-parallel rank: the part of each sequence that it holds."""
    context_degree: int = 1
    """Context-parallel degree: the number of parts of each sequence."""
    predict_ahead: int = 0
    """Depths of prediction beyond the next token."""

    @property
    def batch_sequences(self) -> int:
        """Sequences of a step over all data-parallel ranks."""
        return sum(self.sequences_per_replica)
