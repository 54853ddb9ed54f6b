"""A fork server that has torch and the worker loaded, for tests of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.launch.values.job import Job, Message
from tests.shared_ranks import RanksOf

RunRanks = Callable[[str, str, int], dict[int, dict[str, Any]]]


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Run an entry of rank_entries on so many ranks, and return the last message of each."""
    server = RanksOf("tests.trainer.rank_entries")

    def run(entry: str, argument: str, world_size: int) -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}

        def hear(message: Message) -> None:
            told[message.rank] = dict(message.values)

        job = Job(entry=entry, argument=argument, world_size=world_size, threads=1)
        server.run(job, on_message=hear)
        return told

    return run
