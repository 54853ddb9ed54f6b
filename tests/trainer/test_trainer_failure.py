"""A rank that fails says so before it leaves the group, where it might wait for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import RunFailed
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, Message
from tests.entry_tables import entries_of
from tests.trainer.tiny import make_tiny


@pytest.mark.slow
def test_a_failure_is_told_before_the_process_group_goes(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    heard: list[Message] = []
    entries = entries_of("tests.trainer.rank_entries", preload=("torch._dynamo", "plait.trainer.worker"))
    job = Job(entry="fail_among_others", argument=str(tmp_path), world_size=2, threads=1)
    with ForkServer(entries, threads=1) as server, pytest.raises(RunFailed, match="rank 1 has lost its data"):
        server.run(job, on_message=heard.append)
    assert not [message.rank for message in heard if message.kind == "left"]
