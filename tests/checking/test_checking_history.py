"""Mistakes that released packages had, found in these very releases. They are downloaded, so `make test-history` runs
this file alone; PLAIT_HISTORY names a folder to keep the packages in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_rank import start_forked
from history_programs import CASES, HistoricalCase

from plait.commands.check import check
from plait.commands.python_call import screen_for

pytestmark = pytest.mark.history


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_mistake_is_found(case: HistoricalCase, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    first = f"import sys\nsys.path.insert(0, {str(_installed(case, tmp_path))!r})\n"  # ranks are forks of this process
    program.write_text(first + case.text, encoding="utf-8")
    command = ["torchrun", "--nproc-per-node", "2", str(program)]
    report = check(command, silent_s=240, screen=screen_for("off"), start=start_forked)
    print(report)
    assert report.outcome == "differs", report
    assert [one.kind for one in report.faults] == [case.kind], report


def _installed(case: HistoricalCase, folder: Path) -> Path:
    """The folder of a case's packages, which pip fills where they are not there yet."""
    name = case.packages[0].replace("==", "-")
    target = Path(os.environ.get("PLAIT_HISTORY") or folder) / name
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(target), *case.packages]
        subprocess.run(pip, check=True)
    return target
