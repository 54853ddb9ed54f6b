"""The commands that start a recipe, and those about a run's failures and status: parse, call, print."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.command_line.arguments import MoreTexts, Overrides, RecipeOrRun, RunIfAny, Texts
from plait.command_line.models import screen_on
from plait.command_line.run_files import print_runs
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput

Places = list[str] | None
PLACE = "RANK@STEP"


def new_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The run's name: the recipe is NAME.toml, in this folder.")
    ],
    text: Texts = None,
    more: MoreTexts = None,
) -> None:
    """Write a commented recipe for your text. Without a text, it comes with a sample text."""
    from plait.commands.new import write_recipe
    from plait.screen.screen import wrapped

    lines = write_recipe(name, [*(text or []), *(more or [])])
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    OptionalOutput(sys.stdout).write(wrapped("\n".join(lines), columns) + "\n")


def status_command(
    run: RunIfAny = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="The samples that each step took.")] = False,
) -> None:
    """Say where a run stands and what went wrong. Also how it spent its time. Without RUN, like plait runs."""
    if run is None:
        if ledger:
            raise PlaitError("--ledger needs one run; name it: plait status RUN --ledger")
        print_runs("json" if as_json else "text")
        return
    from plait.clusters.submitted import job_state_line, missing_run_line
    from plait.commands.monitoring.status import status

    output = OptionalOutput(sys.stdout)
    if not as_json and not ledger and (line := job_state_line(run)):
        output.write(f"{line}\n")
        if without_run := missing_run_line(run):
            output.write(f"{without_run}\n")
            return
    for line in status(run, form="json" if as_json else "text", detail="ledger" if ledger else "account"):
        output.write(f"{line}\n")


def drill_command(
    source: RecipeOrRun,
    overrides: Overrides = None,
    kill: Annotated[Places, typer.Option("--kill", metavar=PLACE, help="Kill this worker after that step.")] = None,
    hang: Annotated[Places, typer.Option("--hang", metavar=PLACE, help="Stop this worker after that step.")] = None,
    nan: Annotated[Places, typer.Option("--nan", metavar=PLACE, help="Make a weight NaN before that step.")] = None,
    slow: Annotated[Places, typer.Option("--slow", metavar=PLACE, help="Slow this worker down for 2 s.")] = None,
    fill_disk: Annotated[Places, typer.Option(metavar="STEP", help="Let a save fail on a full disk.")] = None,
    corrupt: Annotated[Places, typer.Option(metavar="STEP", help="Damage the newest checkpoint.")] = None,
    lose_host: Annotated[
        Places, typer.Option(metavar="HOST@STEP", help="Kill a whole host, which the drill emulates on this machine.")
    ] = None,
    drawn: Annotated[
        str, typer.Option("--random", metavar="N|TIME", help="This many more, or for 30min, drawn with the seed.")
    ] = "0",
    seed: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="The same seed draws the same failures.", min=0)
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report to this file.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Disturb a running run without asking.")] = False,
) -> None:
    """Rehearse failures of workers. Trains twice, once undisturbed, and compares the results."""
    from plait.commands.drilling.drill import drill
    from plait.commands.drilling.faults import DrillRequest, FaultKind, parse_fault, parse_random
    from plait.report.atomic import replace_file

    named: dict[FaultKind, Places] = {"kill": kill, "hang": hang, "nan": nan, "slow": slow}
    named |= {"fill-disk": fill_disk, "corrupt": corrupt, "lose-host": lose_host}
    faults = [parse_fault(kind, text) for kind, texts in named.items() for text in texts or []]
    count, seconds = parse_random(drawn)
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    request = DrillRequest(named=faults, drawn=count, seconds=seconds, seed=seed)
    screen = screen_on(sys.stdout)
    report = drill(source, overrides or [], request, may_disturb=_agrees if not yes else _agreed, screen=screen)
    if json is not None:
        replace_file(json, f"{report.to_json()}\n".encode())
    screen.print("\n".join(report.lines()))
    raise typer.Exit(0 if report.ok else 1)


def _agrees(sentence: str) -> bool:
    """Ask on the terminal; raises PlaitError if there is none."""
    if not sys.stdin.isatty():
        raise PlaitError(f"{sentence}; wait for its end, or give --yes")
    return typer.confirm(f"{sentence}. Go on?")


def _agreed(sentence: str) -> bool:
    return True
