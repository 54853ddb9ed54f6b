"""In which portions each part of the batch takes its sequences: the sizes of its micro-batches.

Pure and without torch: the planner times what the loader reads.
"""

from __future__ import annotations

from math import ceil

from plait.layout import equal_share


def micro_sizes(counts: tuple[int, ...], limits: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Sequences in each micro-batch of each of some parts, which meet in the middle of every one.

    So all take equally many, as few as let each part take its limit at a time at most; each part's own are as equal as
    can be, the larger ones first. 0 is a micro-batch in which nothing is counted: for a part with fewer
    sequences than there are micro-batches. There is always one. A part that meets nobody is asked about alone.
    """
    number = max(1, *(ceil(count / limit) for count, limit in zip(counts, limits, strict=True)))
    return tuple(tuple(equal_share(count, number, index)[1] for index in range(number)) for count in counts)
