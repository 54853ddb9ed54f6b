"""Arguments and options that several commands take, and the commands that use a model."""

from __future__ import annotations

import re
import sys
from math import inf
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.version import __version__


def _run_names() -> list[str]:
    """For the shell's completion, which itself leaves out what does not fit the word that was begun."""
    from plait.run_folder import run_names
    from plait.working_folder import CURRENT_FOLDER

    return run_names(CURRENT_FOLDER)


def _every_run_name() -> list[str]:
    """Also of runs that are half written or damaged."""
    from plait.run_files.summary import run_paths
    from plait.working_folder import CURRENT_FOLDER

    return [path.name for path in run_paths(CURRENT_FOLDER)]


def _recipe_files(incomplete: str) -> list[str]:
    """Recipes in the folder that was typed so far, and in the folders in it. The shell itself offers all files where
    this finds none."""
    typed, slash, name = incomplete.rpartition("/")
    where = Path(f"{typed}/" if slash else ".").expanduser()
    try:
        found = sorted((*where.glob("*.toml"), *where.glob("*/*.toml")))
    except OSError:
        return []
    names = [path.relative_to(where) for path in found if path.is_file()]
    shown = [path for path in names if name.startswith(".") or not str(path).startswith(".")]
    return [f"{typed}{slash}{path}" for path in shown]


def _recipes_and_runs(incomplete: str) -> list[str]:
    return [*_recipe_files(incomplete), *_run_names()]


def _settings() -> list[tuple[str, str]]:
    """The keys of a recipe, each with "=" behind it and a few words on what it is, which some shells show.

    Typer breaks longer lines, and a shell would take the rest for another key.
    """
    from plait.recipe.refusal import described_settings

    found = [(f"{key}=", re.split("[:;.]", what)[0]) for key, what in described_settings()]
    return [(key, shorten(what, max(1, 55 - len(key)), placeholder="…")) for key, what in found]


def _print_version(wanted: bool) -> None:
    if wanted:
        OptionalOutput(sys.stdout).write(f"plait {__version__}\n")
        raise typer.Exit


def _probability(value: float) -> float:
    if not 0 < value <= 1:
        raise PlaitError(f"--top-p {value:g} is no share of a probability; choose a number above 0 and at most 1")
    return value


def _finite_temperature(value: float) -> float:
    if not 0 <= value < inf:
        raise PlaitError(f"--temperature {value:g} is not usable; choose 0 or a positive number such as 0.8")
    return value


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (.toml).", autocompletion=_recipe_files)]
RecipeIfAny = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="A recipe file (.toml).", autocompletion=_recipe_files)
]
RecipeOrRun = Annotated[
    Path,
    typer.Argument(metavar="RECIPE|RUN", help="A recipe file (.toml), or a run.", autocompletion=_recipes_and_runs),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help='Settings to change: train.budget="60 steps" and so on.',
        autocompletion=_settings,
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run, by name or folder; or a model's folder or .gguf file.", autocompletion=_run_names
    ),
]
RunIfAny = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A run, by name or folder; all if left out.", autocompletion=_run_names),
]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="A run, by name or folder.", autocompletion=_every_run_name)]
FirstRun = Annotated[str, typer.Argument(metavar="RUN", help="A run, by name or folder.", autocompletion=_run_names)]
SecondRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Another run to compare it with.", autocompletion=_run_names)
]
ManyRuns = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs, by name or folder.", autocompletion=_run_names)
]
RunNames = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs, by name or folder.", autocompletion=_run_names)
]
HostCount = Annotated[
    int, typer.Option("--hosts", metavar="NUMBER", help="Number of machines, this one included.", min=1)
]
Address = Annotated[
    str | None, typer.Option("--address", metavar="ADDRESS", help="Address at which other hosts reach this machine.")
]
Port = Annotated[
    int, typer.Option("--port", metavar="NUMBER", help="Port where they join; 0 takes a free one.", min=0, max=65535)
]
SecretFile = Annotated[
    Path | None, typer.Option("--secret-file", metavar="FILE", help="File with the hosts' secret, private to you.")
]
ProgramOfHost = Annotated[
    Path | None,
    typer.Option("--program", metavar="FILE", help="Your copy of the program, where plait run waits for hosts."),
]
ModuleOfHost = Annotated[
    str | None,
    typer.Option(
        "--module", "-m", metavar="MODULE", help="Your copy of the program, where plait run -m waits for hosts."
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE...", help="The texts; all of this folder's, if left out."),
]
MoreTexts = Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)]
OtherTexts = Annotated[
    list[str] | None,
    typer.Option("--files", metavar="FILE...", help="Text files to measure instead of the held-out text."),
]
HeldOutRun = Annotated[
    str | None,
    typer.Option(
        "--heldout-of", metavar="RUN", help="Take the text that this run held out.", autocompletion=_run_names
    ),
]
MeasuredStep = Annotated[
    str | None,
    typer.Option("--measured", metavar="TIME", help="Measured step time (412ms): say what explains the difference."),
]
LayoutsToProve = Annotated[
    int | None,
    typer.Option(
        "--prove", metavar="NUMBER", help="Run this many of the best layouts here for a few steps each.", min=1
    ),
]
ShownSamples = Annotated[
    int | None,
    typer.Option(
        "--show", metavar="NUMBER", help="Also show this many samples, and what of them is learned.", min=1, max=1000
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="NUMBER",
        callback=_probability,
        help="Choose among the most likely tokens of this total probability.",
    ),
]
Temperature = Annotated[
    float, typer.Option(metavar="NUMBER", callback=_finite_temperature, help="0 always takes the most likely token.")
]
Questions = Annotated[
    Path | None,
    typer.Option("--choices", metavar="FILE", help="Multiple-choice questions to ask instead (JSON lines)."),
]
AdapterName = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="ADAPTER",
        help='Another adapter: a run, a folder of PEFT\'s, or "none" for the base alone.',
    ),
]
AdapterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="ADAPTER",
        help='An adapter: a run, a folder of PEFT\'s, "none". Several: one after the other.',
    ),
]
TextField = Annotated[
    str | None, typer.Option("--field", metavar="COLUMN", help="Column that holds the text, or the messages.")
]
WindowTokens = Annotated[int | None, typer.Option("--sequence", metavar="NUMBER", help="Tokens of a window.", min=2)]
Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]
