"""The pytest fixture fails a test whose program is not proven, with the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_texts import LOOP

pytest_plugins = ["plait.pytest_plugin"]


@pytest.mark.slow
def test_the_fixture_runs_a_program_and_fails_for_a_fault(plait_check, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP, encoding="utf-8")
    assert plait_check("torchrun", str(program), steps=2).ok
    program.write_text(LOOP.replace("        p.grad /= world\n", ""), encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="2 times what they should be"):
        plait_check("torchrun", str(program), steps=2)
