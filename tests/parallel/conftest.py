"""A fork server for the ranks of these tests, and a group of one for what can be seen in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from plait.launch.values.job import Job, Message
from tests.shared_ranks import RanksOf

ReduceOn = Callable[..., dict[int, dict[str, Any]]]


@pytest.fixture(scope="session")
def reduce_on() -> ReduceOn:
    """Run an entry of reduce_entries on so many ranks, and return what each told."""
    server = RanksOf("tests.parallel.reduce_entries")

    def run(entry: str, world_size: int, argument: str = "") -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}

        def hear(message: Message) -> None:
            told[message.rank] = dict(message.values)

        job = Job(entry=entry, argument=argument, world_size=world_size, threads=1)
        server.run(job, on_message=hear)
        return told

    return run


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
