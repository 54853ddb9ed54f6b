"""The command line: parse, call, print."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from plait.errors import PlaitError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Recipe = Annotated[Path, typer.Argument(help="A recipe file (.toml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help='Changes, as section.key=value: train.budget="60 steps".')]
Run = Annotated[str, typer.Argument(help="A run: its folder or its name.")]
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this version of typer keeps its click
EXIT_OF_SIGNAL = {"finished": 0, "SIGINT": 130, "SIGTERM": 143}


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    replan: Annotated[bool, typer.Option("--replan", help="Measure again and make a new plan.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not prove a layout's gradients that is new to this machine.")
    ] = False,
) -> None:
    """Train what a recipe asks for; the same command goes on with a run that was stopped."""
    from plait.run.train import train

    check = "never" if no_check else "new layouts"
    outcome = train(recipe, overrides or [], fresh_plan=replan, check=check, screen=_screen())
    raise typer.Exit(EXIT_OF_SIGNAL[outcome])


@app.command()
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (.toml).")] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option("--cluster", help='Machines: 8xH100, "2x(8xA100)+400G", "macbook+4090@1G", a cluster.json.'),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many other layouts to tell of.", min=0)] = 10,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result here, as JSON.")] = None,
    terms: Annotated[bool, typer.Option("--terms", help="Explain the words, for someone new.")] = False,
) -> None:
    """Choose the simplest fast layout for machines that need not be there, and say why."""
    from plait.run import plan as command

    if terms:
        _screen().print(command.terms(), markup=False)
    if recipe:
        command.plan(recipe, overrides or [], clusters=cluster or [], top=top, json_file=json, screen=_screen())
    elif not terms:
        raise PlaitError("plait plan needs a recipe; name a .toml file, or write plait plan --terms")


@app.command()
def data(recipe: Recipe, overrides: Overrides = None) -> None:
    """Prepare a recipe's text: tokens on disk, once."""
    from plait.recipe.load import load_recipe
    from plait.run.data import prepare_data, told

    corpus = prepare_data(load_recipe(recipe, overrides or []), _screen())
    _screen().print(told(corpus))
    _screen().print(f"ready    {corpus.folder}", soft_wrap=True)


@app.command()
def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result here, as JSON.")] = None,
    here: Annotated[
        bool, typer.Option("--here", help="On this machine's devices, in the run's own precision and kernels.")
    ] = False,
) -> None:
    """Prove that a layout (layout.tensor=2 …) computes what one plain process computes."""
    from plait.run.verify import verify

    proven = verify(recipe, overrides or [], where="here" if here else "anywhere", json_file=json, screen=_screen())
    raise typer.Exit(0 if proven else 1)


@app.command()
def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0)] = 0.8,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this much probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1,
) -> None:
    """Let a trained run go on with a text."""
    from plait.run.sample import sample

    for piece in sample(run, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command(name="eval")
def evaluate(
    run: Run,
    files: Annotated[
        list[str] | None, typer.Option("--files", help="Text to measure instead of the held-out part.")
    ] = None,
) -> None:
    """Measure a run's loss on its held-out text, or on other files; prints one line of JSON."""
    from plait.run.evaluate import evaluate

    sys.stdout.write(evaluate(run, files or []) + "\n")


def _screen() -> Console:
    return Console(highlight=False, soft_wrap=True)


def main() -> None:
    """The `plait` command: one sentence and an exit code for what the user can mend; a traceback only for our bugs."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except PlaitError as error:
        sys.stderr.write(f"plait: {error}\n")
        sys.exit(error.exit_code)
    except USAGE_ERROR as error:
        sys.stderr.write(f"plait: {error.format_message().rstrip('.')}; plait --help tells what there is\n")
        sys.exit(PlaitError.exit_code)
    except (KeyboardInterrupt, typer.Abort):  # click turns the first into the second
        sys.exit(EXIT_OF_SIGNAL["SIGINT"])
    except Exception:
        traceback.print_exc()
        sys.stderr.write(
            "plait: this is a bug in plait, not in what you asked; please report it with the lines above\n"
        )
        sys.exit(1)
