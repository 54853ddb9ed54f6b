"""What the guide to pools shows of the answers is what plait prints."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from plait.cli import app
from tests.docs.documents import ROOT

BLOCKS = [
    dedent(block).strip("\n")
    for block in re.findall(
        r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", (ROOT / "docs" / "guide-pools.md").read_text(encoding="utf-8"), re.MULTILINE
    )
]
RECIPES = {name: block for block in BLOCKS for name in re.findall(r"^# (\S+\.toml)$", block, re.MULTILINE)[:1]}
SHOWN = [
    (command, printed)
    for command, printed in pairwise(BLOCKS)
    if command.startswith("plait plan ") and "\n" not in command and re.match(r"(take|model) ", printed)
]


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=lambda text: text.split("\n")[0][:50])
def test_an_answer_in_the_guide_is_plait_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, printed: str
) -> None:
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert " ".join(printed.split()) in " ".join(result.output.split()), result.output


def test_the_guide_shows_answers() -> None:
    assert len(SHOWN) == 2 and len(RECIPES) == 2
