"""Where a run goes on from after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from plait.commands.monitoring.starting import newest_state
from plait.run_folder import RunFolder
from tests.checkpoint.conftest import save_state
from tests.end_to_end.command import flip_bit


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
        ([], [], (0, "nowhere")),
        ([], [4, 2], (4, "memory")),
        ([10, 20], [24, 22], (24, "memory")),
        ([10, 20], [20], (20, "memory")),
        ([10, 30], [24, 22], (30, "checkpoint")),
        ([10, 30], [], (30, "checkpoint")),
    ],
)
def test_copies_count_where_they_are_no_older_than_the_newest_checkpoint(
    tmp_path: Path, saved: list[int], copied: list[int], wanted: tuple[int, str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in saved:
        save_state(checkpoints, step)
    workers = Copies(copied)
    state = newest_state(RunFolder(tmp_path), cast(Any, workers), 7)
    assert (state.step, state.where) == wanted
    assert workers.asked == 7


def test_copies_count_where_only_damaged_checkpoints_are_newer(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (10, 30):
        save_state(checkpoints, step)
    flip_bit(checkpoints / "step-30" / "rank-00000.safetensors")
    state = newest_state(RunFolder(tmp_path), cast(Any, Copies([24, 22])), 7)
    assert (state.step, state.where) == (24, "memory")
