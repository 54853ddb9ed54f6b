"""Where a run goes on from after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from plait.commands.monitoring.newest_state import NewestState, newest_state
from plait.commands.planning.run_folder import RunFolder


@dataclass
class Copies:
    """Workers that left copies of these steps."""

    steps: Sequence[int]
    asked: int = 0

    def copied_steps(self, lineage: int) -> Sequence[int]:
        self.asked = lineage
        return self.steps


@pytest.mark.parametrize(
    ("saved", "copied", "wanted"),
    [
        ([], [], NewestState(step=0, where="nowhere")),
        ([], [4, 2], NewestState(step=4, where="memory")),
        ([10, 20], [24, 22], NewestState(step=24, where="memory")),
        ([10, 20], [20], NewestState(step=20, where="memory")),
        ([10, 30], [24, 22], NewestState(step=30, where="checkpoint")),
        ([10, 30], [], NewestState(step=30, where="checkpoint")),
    ],
)
def test_copies_count_where_they_are_no_older_than_the_newest_checkpoint(
    tmp_path: Path, saved: list[int], copied: list[int], wanted: NewestState
) -> None:
    for step in saved:
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    workers = Copies(copied)
    assert newest_state(RunFolder(tmp_path), cast(Any, workers), 7) == wanted
    assert workers.asked == 7
