"""The sizes of each data-parallel rank's micro-batches.

Pure and without torch: the planner prices the same sizes that the loader reads.
"""

from __future__ import annotations

from math import ceil

from plait.layout import equal_share


def micro_sizes(counts: tuple[int, ...], limits: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Sequences in each micro-batch of each data-parallel rank, for ranks that communicate in every micro-batch.

    Such ranks all have the same number of micro-batches: the fewest, and at least one, that keep each rank within its
    limit. A rank's own are as equal as possible, the larger ones first. A size of 0 is a micro-batch without counted
    tokens, for a rank with fewer sequences than there are micro-batches. For a rank that communicates with no other,
    pass its values alone.
    """
    number = max(1, *(ceil(count / limit) for count, limit in zip(counts, limits, strict=True)))
    return tuple(tuple(equal_share(count, number, index)[1] for index in range(number)) for count in counts)
