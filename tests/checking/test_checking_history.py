"""Mistakes that released packages had, found in these very releases. They are downloaded, so `make test-history` runs
this file alone; PLAIT_HISTORY names a folder to keep the packages in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_rank import start_forked
from history_programs import CASES, RESUMING_CASES, HistoricalCase

from plait.commands.check import check
from plait.commands.check_resume import check_resume
from plait.commands.python_call import screen_for

pytestmark = [
    pytest.mark.history,
    pytest.mark.skipif("PLAIT_HISTORY" not in os.environ, reason="downloads releases; run `make test-history`"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_mistake_is_found(case: HistoricalCase, tmp_path: Path) -> None:
    program = _program(case, tmp_path)
    command = ["torchrun", "--nproc-per-node", "2", str(program)]
    report = check(command, silent_s=240, limit_s=3000, screen=screen_for("off"), start=start_forked)
    print(report)
    assert report.outcome == "differs", report
    assert [one.kind for one in report.faults] == [case.kind], report


@pytest.mark.parametrize("case", RESUMING_CASES, ids=lambda case: case.name)
def test_a_published_mistake_in_resuming_is_found(
    case: HistoricalCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program(case, tmp_path)
    monkeypatch.chdir(program.parent)  # which is copied
    command = ["torchrun", "--nproc-per-node", "2", program.name]
    report = check_resume(command, steps=10, silent_s=240, limit_s=3000, screen=screen_for("off"), start=start_forked)
    print(report)
    assert report.outcome == "differs", report
    assert [one.kind for one in report.faults] == [case.kind], report
    assert report.faults[0].where.startswith(program.name), report


@pytest.mark.parametrize("case", RESUMING_CASES, ids=lambda case: case.name.partition(" ")[0])
def test_a_release_after_the_mistake_resumes(
    case: HistoricalCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(case.text, encoding="utf-8")  # with this environment's packages
    command = ["torchrun", "--nproc-per-node", "2", "train.py"]
    report = check_resume(command, steps=10, silent_s=240, limit_s=3000, screen=screen_for("off"), start=start_forked)
    assert report.outcome == "proven", report


def _program(case: HistoricalCase, folder: Path) -> Path:
    program = folder / "program" / "train.py"
    program.parent.mkdir()
    first = f"import sys\nsys.path.insert(0, {str(_installed(case))!r})\n"  # ranks are forks of this process
    program.write_text(first + case.text, encoding="utf-8")
    return program


def _installed(case: HistoricalCase) -> Path:
    """The folder of a case's packages, which pip fills where they are not there yet."""
    name = case.packages[0].replace("==", "-")
    target = Path(os.environ["PLAIT_HISTORY"]) / name
    if not target.exists():
        begun = target.with_name(f"{name}.incomplete")
        options = ["--no-deps", "--quiet", "--upgrade", "--target", str(begun)]
        pip = [sys.executable, "-m", "pip", "install", *options, *case.packages]
        subprocess.run(pip, check=True)
        begun.rename(target)
    return target
