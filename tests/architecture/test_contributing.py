"""CONTRIBUTING.md answers a newcomer's questions with files that exist, and every hard folder introduces itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = re.findall(r"^\| (.+\?) \| (\S+) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
WITH_README = (
    "checkpoint", "page", "machines", "clusters", "commands", "data", "launch", "parallel", "partition",
    "planner", "planner/calibration",
    "probing", "planner/heterogeneous", "planner/memory", "planner/resolve", "planner/search", "planner/step_time",
    "recipe", "report", "run_files", "trainer",
)  # fmt: skip


def test_no_question_is_asked_twice() -> None:
    assert ANSWERS
    assert len({question for question, _ in ANSWERS}) == len(ANSWERS)


@pytest.mark.parametrize(("question", "file"), ANSWERS)
def test_each_answer_exists(question: str, file: str) -> None:
    assert (ROOT / file).is_file(), f"{question} {file}"


@pytest.mark.parametrize("folder", WITH_README)
def test_a_folder_with_a_hard_idea_has_a_readme(folder: str) -> None:
    assert (ROOT / "plait" / folder / "README.md").read_text(encoding="utf-8").strip()


def test_the_log_is_wrapped_and_newest_first() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 120 and " " in line.strip("- ")[:119].strip()] == []
    days = re.findall(r"^## (\d{4}-\d{2}-\d{2})", text, re.MULTILINE)
    assert days == sorted(days, reverse=True)
