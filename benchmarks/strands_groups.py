"""Who is compared with whom in the strands' benchmark, and how fast plait must be."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Who takes part: a kind that its module understands, and how many ranks it has."""

    kind: str
    module: str = "benchmarks.peers.strand_loops"
    ranks: int = 2


def plait(ranks: int = 2, **layout: object) -> Contender:
    """plait with a layout."""
    return Contender(kind=json.dumps(layout), module="benchmarks.strands_contender", ranks=ranks)


CONTENDERS = {
    "plait, replicate": plait(replicate=2),
    "plait, shard optimizer": plait(shard=2),
    "plait, shard parameters": plait(shard=2, shard_what="parameters"),
    "plait, tensor": plait(tensor=2),
    "plait, 1F1B": plait(pipeline=2, schedule="1f1b", micro_sequences=1),
    "plait, GPipe": plait(pipeline=2, schedule="gpipe", micro_sequences=1),
    "plait, context": plait(context=2),
    "plait, one process": plait(ranks=1),
    "DDP": Contender(kind="ddp"),
    "DDP + ZeroRedundancyOptimizer": Contender(kind="ddp-zero"),
    "FSDP2": Contender(kind="fsdp"),
    "FSDP2, gathered once": Contender(kind="fsdp-kept"),
    "parallelize_module": Contender(kind="tensor-copies"),
    "parallelize_module, SequenceParallel": Contender(kind="tensor-rows"),
    "torch, 1F1B": Contender(kind="pipeline-1f1b"),
    "torch, GPipe": Contender(kind="pipeline-gpipe"),
    "torch, one process": Contender(kind="alone", ranks=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A row of the table: plait's time over the fastest peer's, or over that `share` of it, and what it may be."""

    strand: str
    ours: str
    peers: tuple[str, ...]
    bar: float | None
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Comparisons whose contenders are alive at the same time: as many as memory holds."""

    comparisons: tuple[Comparison, ...]
    long: bool = False
    """One sequence of CONTEXT_TOKENS is the batch."""


def row(strand: str, ours: str, *peers: str, bar: float | None = 1.02, share: float = 1.0) -> Comparison:
    """A comparison, written short."""
    return Comparison(strand=strand, ours=ours, peers=peers, bar=bar, share=share)


GROUPS = (
    Group(comparisons=(row("model alone", "plait, one process", "torch, one process", bar=None),)),
    Group(
        comparisons=(
            row("replicate", "plait, replicate", "DDP"),
            row("shard, optimizer", "plait, shard optimizer", "FSDP2, gathered once", "DDP + ZeroRedundancyOptimizer"),
            row("shard, optimizer", "plait, shard optimizer", "plait, replicate", bar=1.05),
        )
    ),
    Group(comparisons=(row("shard, parameters", "plait, shard parameters", "FSDP2", bar=1.05),)),
    Group(comparisons=(row("tensor", "plait, tensor", "parallelize_module", "parallelize_module, SequenceParallel"),)),
    Group(
        comparisons=(
            row("pipeline, 1F1B", "plait, 1F1B", "torch, 1F1B"),
            row("pipeline, GPipe", "plait, GPipe", "torch, GPipe"),
        )
    ),
    Group(comparisons=(row("context", "plait, context", "plait, one process", bar=1.15, share=0.5),), long=True),
)
