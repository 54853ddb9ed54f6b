"""How many sequences a processor takes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from plait.layout import Layout
from plait.planner.calibration.constants import constant
from plait.planner.problem.software_profile import CPU_CACHE_TOKENS
from plait.units import counted

LARGER_MICRO_BATCH_COST = constant("larger_micro_batch_cost")
"""Share of a step that a micro-batch beyond the caches costs."""
MICRO_BATCHES_PER_STAGE = 4
MICRO_BATCH_HEADROOM = 1.25
"""Factor by which a single micro-batch may exceed its share where the share may grow during the run: a second
micro-batch would cost as many messages again."""


def usual_micro_sequences(batch_sequences: int, layout: Layout, sequence: int) -> int:
    """Sequences of a micro-batch on a processor: as many as fit its caches, and in a pipeline at least
    MICRO_BATCHES_PER_STAGE micro-batches per stage."""
    part = ceil(batch_sequences / layout.data_parallel_degree)
    limit = max(1, CPU_CACHE_TOKENS * layout.context // sequence)
    if layout.pipeline > 1:
        # A pipeline idles (stages - 1) / (micro-batches + stages - 1) of its time (Huang et al. 2019).
        limit = min(limit, max(1, part // (MICRO_BATCHES_PER_STAGE * layout.pipeline)))
    return ceil(part / ceil(part / limit))


def micro_sequences_to_try(
    usual: int, layout: Layout, sequences_per_replica: Sequence[int], *, may_grow: bool
) -> Iterator[int]:
    """Micro-batch sizes to price, `usual` first.

    Sharded parameters are gathered, and their gradients summed, once per micro-batch: over slow links a few large
    micro-batches are worth their memory.
    """
    yield usual
    if layout.shard == 1 or layout.shard_what != "parameters" or layout.pipeline > 1:
        return
    most = max(sequences_per_replica)
    number = ceil(most / usual)
    while number > 1:
        number = ceil(number / 2)
        yield ceil(most * (MICRO_BATCH_HEADROOM if may_grow and number == 1 else 1) / number)


def fewer_gathers_reason(usual: int, chosen: int, largest_share: int) -> list[str]:
    """Why micro-batches are larger than usual, for the rank with the largest share."""
    often, seldom = ceil(largest_share / usual), ceil(largest_share / chosen)
    times = "once a step" if seldom == 1 else f"{seldom} times a step"
    return [
        f"up to {counted(chosen, 'sequence')} at a time, not {usual}: split parameters are gathered {times} "
        f"instead of {often}"
    ]
