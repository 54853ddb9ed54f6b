"""Carries out the runs of the balance's tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.launch.values.job import Job
from plait.layout import Layout
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny


def follow(folder: Path, layout: Layout, runs: Sequence[dict[str, Any]], *overrides: str) -> None:
    """Runs of one plan in one process group; each rank leaves a file of each (balance_entries.py)."""
    make_tiny(folder, *overrides, layout=layout)
    argument = json.dumps({"folder": str(folder), "runs": runs})
    job = Job(entry="follow", argument=argument, world_size=layout.world_size, threads=1)
    RanksOf("tests.trainer.balance_entries").run(job, on_message=lambda _: None)
