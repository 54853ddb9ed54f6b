"""Arguments and options that several commands take, and the commands that use a model."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.screen.terminal import TerminalScreen
from plait.version import __version__


def _run_names() -> list[str]:
    """For the shell's completion, which itself leaves out what does not fit the word that was begun."""
    from plait.commands.planning.run_folder import run_names
    from plait.working_folder import CURRENT_FOLDER

    return run_names(CURRENT_FOLDER)


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


Recipe = Annotated[Path, typer.Argument(help="A recipe file (.toml).", autocompletion=_recipe_files)]
RecipeIfAny = Annotated[Path | None, typer.Argument(help="A recipe file (.toml).", autocompletion=_recipe_files)]
Overrides = Annotated[list[str] | None, typer.Argument(help='Settings to change: train.budget="60 steps" and so on.')]
RunName = Annotated[
    str, typer.Argument(help="A run, by name or folder, or the folder of a model.", autocompletion=_run_names)
]
HostCount = Annotated[int, typer.Option("--hosts", help="Number of machines, this one included.", min=1)]
Address = Annotated[str | None, typer.Option("--address", help="Address at which other hosts reach this machine.")]
Port = Annotated[int, typer.Option("--port", help="Port where they join; 0 takes a free one.", min=0, max=65535)]
SecretFile = Annotated[Path | None, typer.Option("--secret-file", help="File with the hosts' secret, private to you.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE...", help="The texts; all of this folder's, if left out."),
]
MoreTexts = Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", callback=_probability, help="Choose among the most likely tokens of this total probability."
    ),
]
Temperature = Annotated[float, typer.Option(callback=_finite_temperature, help="0 always takes the most likely token.")]
Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


def screen_on(stream: TextIO) -> TerminalScreen:
    """A command's screen on one of its streams."""
    output: Any = OptionalOutput(stream)
    return TerminalScreen(Console(file=output))


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Number of tokens to add.", min=1)] = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1,
) -> None:
    """Let a trained model continue a text."""
    from plait.commands.sample import sample

    output = OptionalOutput(sys.stdout)
    for piece in sample(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed):
        output.write(piece)
        output.flush()
    output.write("\n")


def evaluate(
    run: RunName,
    files: Annotated[
        list[str] | None, typer.Option("--files", help="Text files to measure instead of the held-out text.")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a window; as in training if left out.", min=2)] = None,
    choices: Annotated[
        Path | None, typer.Option("--choices", help="Multiple-choice questions to ask instead (JSON lines).")
    ] = None,
) -> None:
    """Measure the loss of a run or a model on its held-out text or on other files. Prints one line of JSON."""
    from plait.commands.answering.choices import ask_choices
    from plait.commands.evaluate import evaluate

    screen = screen_on(sys.stderr)
    if choices and files:
        raise PlaitError("--files and --choices are measured one at a time; leave one of them out")
    if choices:
        found = ask_choices(run, choices, sequence=sequence, screen=screen)
    else:
        found = evaluate(run, files or [], sequence=sequence, screen=screen)
    OptionalOutput(sys.stdout).write(f"{found}\n")


def chat(
    run: RunName,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 1,
) -> None:
    """Talk with a model by its chat template. Each line is a message; /quit ends."""
    from plait.commands.answering.chat import AnswerSettings, open_chat

    settings = AnswerSettings(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    conversation, output, is_terminal = open_chat(run, settings), OptionalOutput(sys.stdout), sys.stdin.isatty()
    if is_terminal:
        output.write("chat     each line is a message; /quit ends\n")
    while True:
        output.write("> " if is_terminal else "")
        output.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if not line.strip():
            continue
        for piece in conversation.say(line.strip()):
            output.write(piece)
            output.flush()
        output.write("\n")
