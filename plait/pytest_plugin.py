"""A pytest fixture that proves a project's own training program: `pytest_plugins = ["plait.pytest_plugin"]` in the
project's conftest.py.

    def test_train_computes_what_one_process_computes(plait_check):
        plait_check("torchrun", "--nproc-per-node", "2", "train.py", "--config", "tiny.yaml")
"""

from __future__ import annotations

from typing import Protocol

import pytest

from plait.api import check
from plait.checking.findings import CheckReport


class ProgramCheck(Protocol):
    """Checks a program; fails the test with the output of `plait check` if the program is not proven."""

    def __call__(self, *command: str, workers: int | None = None, steps: int = 6) -> CheckReport: ...


@pytest.fixture
def plait_check() -> ProgramCheck:
    """A function that takes the words of a launch command, and fails the test unless the program is proven."""

    def run(*command: str, workers: int | None = None, steps: int = 6) -> CheckReport:
        report = check(list(command), workers=workers, steps=steps)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return run
