"""Planted faults are named by kind and parameter, and sound programs are proven: the whole matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_cases import FIRST_FAULTS, SECOND_FAULTS, FaultyCase
from forked_rank import start_forked
from sound_cases import FIRST_SOUND, SECOND_SOUND, SoundCase

from plait.checking.findings import CheckReport
from plait.commands.check import check
from plait.commands.python_call import screen_for

pytestmark = pytest.mark.slow


def checked(text: str, folder: Path, workers: int, *arguments: str) -> CheckReport:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    command = ["torchrun", "--nproc-per-node", str(workers), str(program), *arguments]
    return check(command, silent_s=240, screen=screen_for("off"), start=start_forked)


@pytest.mark.parametrize("case", [*FIRST_FAULTS, *SECOND_FAULTS], ids=lambda case: case.name)
def test_a_fault_is_named(case: FaultyCase, tmp_path: Path) -> None:
    pytest.importorskip(case.needs or "torch")
    report = checked(case.text, tmp_path, 2)
    named = [one for one in report.findings if one.kind == case.kind]
    assert named, report
    assert case.parameter in ("", named[0].parameter), report
    assert named[0].is_fault is not case.is_note
    assert report.outcome == ("proven" if case.is_note else "differs"), report
    assert [one.kind for one in report.faults] == [case.kind] * (not case.is_note), report


@pytest.mark.parametrize("case", [*FIRST_SOUND, *SECOND_SOUND], ids=lambda case: case.name)
def test_a_sound_program_is_proven(case: SoundCase, tmp_path: Path) -> None:
    pytest.importorskip(case.needs or "torch")
    report = checked(case.text, tmp_path, case.workers, *case.arguments)
    assert report.outcome == "proven", report
