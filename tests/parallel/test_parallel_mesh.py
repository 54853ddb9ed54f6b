"""One axis for each way of splitting, and no more process groups than there are different sets of ranks."""

from __future__ import annotations

import json

import pytest

from plait.launch.values.job import Job, Message
from tests.shared_ranks import RanksOf


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.parallel.mesh_entries")


def axes_of_rank(server: RanksOf, rank: int, degrees: str, ranks: int) -> dict[str, float]:
    told: dict[int, dict[str, float]] = {}
    job = Job(entry="tell_axes", argument=degrees, world_size=ranks, threads=1)
    server.run(job, on_message=lambda message: told.update({message.rank: dict(message.values)}))
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
def test_axes_of_the_same_ranks_share_a_group(
    server: RanksOf, degrees: str, ranks: int, axes: tuple[int, ...], groups: int
) -> None:
    """Of rank 2, or of the only one; ranks are told as digits that count from 1."""
    told = axes_of_rank(server, min(ranks - 1, 2), degrees, ranks)
    assert tuple(told[axis] for axis in ("pipeline", "replicate", "shard", "context", "tensor")) == axes
    assert told["groups"] == groups
    assert told["useless"] == (ranks > 1), "but for that of axes of size 1, which has no threads either, all work"


_PAIRS_OF_3 = ("13", "23", "13")


@pytest.mark.parametrize(
    ("degrees", "sets", "own"),
    [
        ({"shard": 2, "replicate": 2}, [[0, 1], [2, 3]], {0: ["0123", "01", "01"], 3: ["0123", "23", "23"]}),
        # A pair of stages, then a group that sums, then the groups of `sets`.
        (
            {"pipeline": 2, "tensor": 2},
            [[0, 2], [1, 3]],
            {0: ["0123", "02", "01", "02"], 3: ["0123", "13", "23", "13"]},
        ),
        ({"pipeline": 4}, [], {0: ["0123", "01", "30"], 1: ["0123", "01", "12"], 3: ["0123", "23", "30"]}),
        ({"context": 4}, [[0, 1], [1, 2], [2, 3]], {0: ["0123", "0123", "01"], 2: ["0123", "0123", "12", "23"]}),
    ],
)
def test_nccl_connects_each_group_with_sums_when_it_is_made(
    server: RanksOf, degrees: dict[str, int], sets: list[list[int]], own: dict[int, list[str]]
) -> None:
    """All ranks of one at the same point, so that none is left to connect in the middle of a backward pass."""
    told: dict[int, list[str]] = {}
    job = Job(entry="connect_groups", argument=json.dumps([degrees, sets]), world_size=4, threads=1)

    def hear(message: Message) -> None:
        told[message.rank] = ["".join(map(str, ranks)) for ranks in message.values["groups"]]

    server.run(job, on_message=hear)
    assert {rank: told[rank] for rank in own} == own
