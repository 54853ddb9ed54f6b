"""The commands about existing runs: list them, compare two, remove one, report on some."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from plait.checked_json import printable
from plait.command_line.arguments import FirstRun, ManyRuns, OneRun, SecondRun
from plait.command_line.models import screen_on
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.units import format_bytes


def runs_command(
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
) -> None:
    """List the runs of this folder. With state, loss, and the command that continues each."""
    print_runs("json" if as_json else "text")


def print_runs(form: str) -> None:
    """Print all runs of the current folder, as a table or as JSON."""
    from plait.run_files.summary import run_summaries
    from plait.run_files.table import runs_text
    from plait.working_folder import CURRENT_FOLDER

    runs, screen = run_summaries(CURRENT_FOLDER), screen_on(sys.stdout)
    if form == "json":
        OptionalOutput(sys.stdout).write(f"{json.dumps([one.to_dict() for one in runs])}\n")
    elif runs:
        text = printable(runs_text(runs, now=datetime.now(UTC), columns=screen.columns))
        OptionalOutput(sys.stdout).write(f"{text}\n")  # not wrapped: commands can be copied
    else:
        screen.print(f"no runs in {CURRENT_FOLDER.runs.absolute()}; train one with: plait train RECIPE")


def compare_command(
    first: FirstRun,
    second: SecondRun,
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
) -> None:
    """Compare two runs. Which has the lower loss, beyond the noise of seeds; which is faster; what differs."""
    from plait.run_files.comparing import compare_folders
    from plait.run_folder import find_run
    from plait.working_folder import CURRENT_FOLDER

    found = compare_folders(find_run(first, CURRENT_FOLDER), find_run(second, CURRENT_FOLDER), CURRENT_FOLDER)
    if as_json:
        OptionalOutput(sys.stdout).write(f"{json.dumps(found.to_dict())}\n")
    else:
        screen_on(sys.stdout).print(str(found))


def report_command(
    runs: ManyRuns,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")] = None,
    md: Annotated[Path | None, typer.Option("--md", metavar="FILE", help="Write Markdown.")] = None,
) -> None:
    """Write a report of runs into one file to keep or send. Recipe, plan, curves, receipt, and how to repeat it."""
    from plait.commands.runs import write_report

    if html is None and md is None:
        raise PlaitError("plait report writes a file; name it: --html FILE, --md FILE, or both")
    for file in write_report(runs, html=html, md=md):
        screen_on(sys.stdout).print(f"written  {file}")


def timeline_command(
    run: OneRun,
    steps: Annotated[int, typer.Option("--steps", metavar="NUMBER", help="Steps to record.", min=1, max=50)] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="The page; default: RUN-timeline.html.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="The trace for Perfetto; default: RUN-timeline.json."),
    ] = None,
) -> None:
    """Record a few steps of a run. Each worker's actions next to the plan, as a page and a trace for Perfetto."""
    from plait.commands.timeline import record_run

    name = Path(run).resolve().name
    page, events = html or Path(f"{name}-timeline.html"), trace or Path(f"{name}-timeline.json")
    record_run(run, steps=steps, html=page, trace=events, screen=screen_on(sys.stdout))


def remove_command(
    run: OneRun,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete a run. Asks first; refuses while it runs, or while another run needs its files."""
    from plait.run_files.removal import removal_of, remove_run
    from plait.working_folder import CURRENT_FOLDER

    removal, screen = removal_of(run, CURRENT_FOLDER), screen_on(sys.stdout)
    if not yes:
        if not sys.stdin.isatty():
            raise PlaitError(f"plait remove asks before it deletes {removal.path}; without a terminal, give --yes")
        screen.print("\n".join(removal.lines()))
        if not typer.confirm("Delete it?"):
            raise typer.Exit(1)
    remove_run(removal, CURRENT_FOLDER)
    screen.print(f"removed  {removal.path}: {format_bytes(removal.n_bytes)}")
