"""`plait --help` and all other output on any terminal: 80 columns, and characters that an encoding does not have."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
from typer.main import get_command

import plait
from plait.cli import app
from plait.command_line.help_text import COMMAND_EXAMPLES, COMMAND_GROUPS, GroupedCommands
from plait.machines.machine import software_versions
from plait.recipe.load import flat_values, parse_config
from tests.end_to_end.command import Ended, Place, ended
from tests.end_to_end.conftest import RunWarm
from tests.matrix import few_fast, slow

COMMANDS = tuple(name for names in COMMAND_GROUPS.values() for name in names)
POOR = {
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ISO-8859-1": {"PYTHONIOENCODING": "iso-8859-1"},
    "strict ASCII": {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("narrow"))


def run(place: Place, *arguments: str, **environment: str) -> Ended:
    return ended(place.start(*arguments, environment={"COLUMNS": "80", **environment}, errors="replace"))


@pytest.fixture
def typed(narrow: Place, run_warm: RunWarm) -> Callable[..., Ended]:
    """Run `plait` on a terminal of 80 columns."""
    return partial(run_warm, narrow, COLUMNS="80")


def test_the_help_of_all_commands_fits_80_columns_and_is_whole(typed: Callable[..., Ended]) -> None:
    told = typed("--help")
    assert told.code == 0 and not told.err
    lines = told.out.splitlines()
    assert max(map(len, lines)) <= 80
    commands = lines[lines.index(f"{next(iter(COMMAND_GROUPS))}:") : lines.index("Options:")]
    listed = {line.split()[0]: line for line in commands if line.startswith("  ")}
    assert tuple(listed) == COMMANDS and len(COMMANDS) == 26
    assert [line.rstrip(":") for line in commands if line and not line.startswith(" ")] == list(COMMAND_GROUPS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed.values()), told.out


def test_the_version_is_one_everywhere(narrow: Place) -> None:
    assert run(narrow, "--version").out == f"plait {plait.__version__}\n"
    assert dict(software_versions())["plait"] == plait.__version__


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("plait tr", ["train"]),
        slow(("plait train --re", ["--replan"])),
        ("plait sample sha", ["shakespeare", "shapes"]),
        slow(("plait train t", ["tiny.toml"])),
        slow(("plait plan rec", ["recipes/large.toml"])),
        ("plait probe recipes/", ["recipes/large.toml"]),
        ("plait train tiny.toml optimizer.l", ["optimizer.lr="]),
    ],
)
def test_the_shell_completes_commands_options_runs_and_recipes(narrow: Place, line: str, offered: list[str]) -> None:
    for name in ("shakespeare", "shapes", "other"):
        narrow.path(name).mkdir(parents=True, exist_ok=True)
        for file in ("plan.json", "recipe.toml"):
            (narrow.path(name) / file).touch()
    narrow.path("shapeless").mkdir(exist_ok=True)  # a folder that holds no run
    (narrow.folder / "recipes").mkdir(exist_ok=True)
    (narrow.folder / "recipes" / "large.toml").touch()
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_PLAIT_COMPLETE": "complete_bash"}
    assert run(narrow, **words).out.split() == offered


def test_the_keys_of_a_recipe_are_completed_without_torch_and_a_line_each(narrow: Place) -> None:
    program = "import sys, plait.command_line.arguments as a; print(len(a._settings()), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    known = len(flat_values(parse_config({"data": {"files": "x"}})))
    assert int(told.stdout.split()[0]) >= known and told.stdout.split()[1] == "False"
    line = {"_TYPER_COMPLETE_ARGS": "plait train tiny.toml ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    offered = run(narrow, **line, _PLAIT_COMPLETE="complete_fish").out.splitlines()
    assert len(offered) >= known and all(re.fullmatch(r"[a-z]+\.[a-z_]+=(\t.+)?", one) for one in offered), offered


def test_completion_can_be_installed(narrow: Place) -> None:
    home = {"HOME": str(narrow.folder), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    told = run(narrow, "--install-completion", "bash", **home)
    assert told.code == 0 and "bash completion installed" in told.out, told
    assert "_PLAIT_COMPLETE" in (narrow.folder / ".bash_completions" / "plait.sh").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_80_columns(typed: Callable[..., Ended], command: str) -> None:
    told = typed(command, "--help")
    assert told.code == 0 and not told.err and told.out.startswith(f"Usage: plait {command} ")
    assert max(map(len, told.out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["plan", "drill"])
def test_h_is_help_in_plain_words_with_two_examples(typed: Callable[..., Ended], command: str) -> None:
    told = typed(command, "-h").out
    assert told == typed(command, "--help").out
    assert told.count(f"\n  plait {command} ") == 2
    assert "--json FILE " in told and "NUMBER " in told


def test_no_help_names_types_of_python_and_each_command_has_a_place_and_examples() -> None:
    group = get_command(app)
    assert isinstance(group, GroupedCommands)
    shown = {name: command for name, command in group.commands.items() if not command.hidden}
    assert sorted(shown) == sorted(COMMANDS) == sorted(COMMAND_EXAMPLES)
    for name, command in shown.items():
        told = command.get_help(command.make_context(name, [], resilient_parsing=True))
        assert not re.search(r"<\w|x[<>]=|\bNone\b", told), told
        for example in COMMAND_EXAMPLES[name]:
            _, typed, *arguments = shlex.split(re.split(r" \| | && ", example)[0])
            assert typed == name
            command.make_context(name, arguments)  # raises for what the command does not take


@pytest.mark.parametrize("encoding", few_fast(POOR, "strict ASCII"))
def test_a_character_that_cannot_be_encoded_is_no_error(narrow: Place, encoding: str) -> None:
    (narrow.folder / "quoted.txt").write_text("a “quoted” text …\n" * 400, encoding="utf-8")
    for arguments in (
        ("--help",),
        ("plan", "--terms"),
        ("plan", "tiny.toml", "--cluster", "2xH100"),
        ("data", "tiny.toml", "data.files=quoted.txt"),
    ):
        told = run(narrow, *arguments, **POOR[encoding])
        assert told.code == 0 and "Traceback" not in told.err, (arguments, told)
    told = run(narrow, "train", "…✓.toml", **POOR[encoding])
    assert told.code == 2 and "there is no recipe" in told.sentence()


@pytest.mark.slow
def test_a_training_whose_text_the_terminal_cannot_show_ends_well(narrow: Place) -> None:
    trained = run(narrow, "train", "tiny.toml", "run.name=poor", "train.budget=2 steps", **POOR["strict ASCII"])
    assert trained.code == 0 and "Traceback" not in trained.err, trained
    told = run(narrow, "sample", "poor", "--prompt", "é…✓", "--tokens", "8", **POOR["strict ASCII"])
    assert told.code == 0 and told.out.startswith("???"), told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("trian",), "No such command 'trian'. Did you mean 'train'? (see plait --help)"),
        (("train",), "Missing argument 'RECIPE' (see plait train --help)"),
        (("train", "tiny.toml", "--hosst", "2"), "No such option: --hosst"),
        (("sample", "x", "--tokens", "many"), "--tokens"),
    ],
)
def test_a_wrong_command_says_where_its_help_is(
    typed: Callable[..., Ended], arguments: tuple[str, ...], sentence: str
) -> None:
    told = typed(*arguments)
    assert told.code == 2 and sentence in told.sentence()
    assert "unable to parse" not in told.err and told.err.rstrip().endswith("--help)")
