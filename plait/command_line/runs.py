"""The commands that begin a recipe, and those about a run's failures and its account: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.command_line.arguments import MoreTexts, Overrides, Recipe, RunName, Texts
from plait.command_line.models import screen_on
from plait.launch.local.output import OptionalOutput

Places = list[str] | None
PLACE = "RANK@STEP"


def new_command(
    name: Annotated[str, typer.Argument(help="The run's name: the recipe is NAME.toml, in this folder.")],
    text: Texts = None,
    more: MoreTexts = None,
) -> None:
    """Write a commented recipe for your text. Where there is no text, a sample text comes with it."""
    from plait.commands.new import write_recipe

    lines = write_recipe(name, [*(text or []), *(more or [])])
    OptionalOutput(sys.stdout).write("\n".join(lines) + "\n")


def status_command(
    run: RunName,
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="The samples that each step took.")] = False,
) -> None:
    """Say where a run stands and what went wrong. Also what its time went to."""
    from plait.commands.monitoring.status import status
    from plait.commands.submitting.submitted import job_state_line

    output = OptionalOutput(sys.stdout)
    if not as_json and not ledger and (line := job_state_line(run)):
        output.write(f"{line}\n")
    for line in status(run, form="json" if as_json else "text", detail="ledger" if ledger else "account"):
        output.write(f"{line}\n")


def drill_command(
    recipe: Recipe,
    overrides: Overrides = None,
    kill: Annotated[Places, typer.Option("--kill", metavar=PLACE, help="Kill this worker after that step.")] = None,
    hang: Annotated[Places, typer.Option("--hang", metavar=PLACE, help="Stop this worker after that step.")] = None,
    nan: Annotated[Places, typer.Option("--nan", metavar=PLACE, help="Make a weight NaN before that step.")] = None,
    slow: Annotated[Places, typer.Option("--slow", metavar=PLACE, help="Slow this worker down for 2 s.")] = None,
    drawn: Annotated[int, typer.Option("--random", help="So many more, drawn by the seed.", min=0, max=1000)] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same failures.", min=0)] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
) -> None:
    """Rehearse failures of workers. Trains twice, once left alone, and compares the ends."""
    from plait.commands.drilling.drill import drill, drill_lines
    from plait.commands.drilling.faults import FaultKind, parse_fault
    from plait.report.atomic import replace_file

    asked: dict[FaultKind, Places] = {"kill": kill, "hang": hang, "nan": nan, "slow": slow}
    faults = [parse_fault(kind, text) for kind, texts in asked.items() for text in texts or []]
    screen = screen_on(sys.stdout)
    report = drill(recipe, overrides or [], faults=faults, drawn=drawn, seed=seed, screen=screen)
    if json is not None:
        replace_file(json, f"{report.to_json()}\n".encode())
    screen.print("\n".join(drill_lines(report)))
    raise typer.Exit(0 if report.ok else 1)
