"""A rank that fails says so before it leaves the group, where it might wait for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import RunFailed
from plait.launch.values.job import Job, Message
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny


@pytest.mark.slow
def test_a_failure_is_told_before_the_process_group_goes(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    heard: list[Message] = []
    job = Job(entry="fail_among_others", argument=str(tmp_path), world_size=2, threads=1)
    with pytest.raises(RunFailed, match="rank 1 has lost its data"):
        RanksOf("tests.trainer.rank_entries").run(job, on_message=heard.append)
    assert not [message.rank for message in heard if message.kind == "left"]
