"""One axis for each way of splitting, and no more process groups than there are different sets of ranks."""

from __future__ import annotations

import pytest

from plait.launch.local.run import run_job
from plait.launch.values.job import Job
from tests.entry_tables import entries_of


def axes_of_rank(rank: int, degrees: str, ranks: int) -> dict[str, float]:
    told: dict[int, dict[str, float]] = {}
    entries = entries_of("tests.parallel.mesh_entries", preload=("torch.distributed", "plait.parallel.mesh"))
    job = Job(entry="tell_axes", argument=degrees, world_size=ranks, threads=1)
    run_job(job, entries, on_message=lambda message: told.update({message.rank: dict(message.values)}))
    return told[rank]


@pytest.mark.parametrize(
    ("degrees", "ranks", "axes", "groups"),
    [
        ("replicate=1", 1, (1, 1, 1, 1, 1), 1),
        ("replicate=3", 3, (3, 123, 3, 3, 3), 2),
        ("replicate=2 tensor=2", 4, (3, 13, 3, 3, 34), 3),
        ("pipeline=2 shard=2", 4, (13, 3, 34, 3, 3), 3),
    ],
)
def test_axes_of_the_same_ranks_share_a_group(degrees: str, ranks: int, axes: tuple[int, ...], groups: int):
    """Of rank 2, or of the only one; ranks are told as digits that count from 1."""
    told = axes_of_rank(min(ranks - 1, 2), degrees, ranks)
    assert tuple(told[axis] for axis in ("pipeline", "replicate", "shard", "context", "tensor")) == axes
    assert told["groups"] == groups
    assert told["useless"] == (ranks > 1), "but for that of axes of size 1, which has no threads either, all work"
