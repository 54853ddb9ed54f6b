"""Files beside an answer are refused in one sentence, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.probe import probe
from plait.commands.prove import prove
from plait.errors import PlaitError
from plait.screen.terminal import TerminalScreen


def test_what_can_be_written_is_written(tmp_path: Path) -> None:
    check_output_file(None)
    check_output_file(tmp_path / "plan.json")
    write_output_file(tmp_path / "plan.json", "{}\n")
    check_output_file(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == "{}\n"


def test_no_folder_and_a_folder_are_refused_with_the_mend(tmp_path: Path) -> None:
    for file in (tmp_path / "nowhere" / "plan.json", tmp_path):
        with pytest.raises(PlaitError, match="name a file in a folder that exists") as caught:
            check_output_file(file)
        assert caught.value.exit_code == 2


def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(PlaitError, match="cannot write /dev/full: No space left on device"):
        write_output_file(Path("/dev/full"), "x")


def test_long_commands_refuse_before_they_begin(tmp_path: Path) -> None:
    """The recipe does not even exist: were it looked at first, that would be the sentence."""
    nowhere, recipe, screen = tmp_path / "nowhere" / "out.json", tmp_path / "missing.toml", TerminalScreen(Console())
    with pytest.raises(PlaitError, match="cannot write"):
        prove(recipe, [], count=2, json_file=nowhere, screen=screen)
    with pytest.raises(PlaitError, match="cannot write"):
        probe(None, workers=None, threads=None, fresh="again", out=nowhere, screen=screen)
