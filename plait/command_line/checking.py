"""`plait check`: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from plait.command_line.models import screen_on
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput


def check_program_command(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="How you start your program: torchrun, python or accelerate launch."
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Processes; as the launcher's own option says, else 2."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Optimizer steps to compare.")] = 6,
    resume: Annotated[
        bool, typer.Option("--resume", help="Stop it midway, start it again, and compare with a run without a stop.")
    ] = False,
    resume_with: Annotated[
        str | None,
        typer.Option("--resume-with", metavar="ARGUMENTS", help="--resume, with these appended to the second start."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    silent: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when the program does nothing for so long.", min=1)
    ] = 60,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when the steps are not taken by then.", min=1)
    ] = 600,
) -> None:
    """Prove your own distributed program against one process.

    With --resume: that it goes on as if it had not been stopped.

    Exit code 0: proven, 1: it differs, 2: it cannot be judged, and why.
    """
    from plait.commands.check import check, report_text

    screen = screen_on(sys.stderr if json else sys.stdout)
    if resume or resume_with is not None:
        from plait.commands.check_resume import check_resume

        again = words_of(resume_with or "")
        report = check_resume(
            command, again, workers=workers, steps=steps, silent_s=silent, limit_s=limit, screen=screen
        )
    else:
        report = check(command, workers=workers, steps=steps, silent_s=silent, limit_s=limit, screen=screen)
    OptionalOutput(sys.stdout).write(report_text(report, as_json=json) + "\n")
    raise typer.Exit(report.exit_code)


def words_of(text: str) -> list[str]:
    """The words of an option's value, as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise PlaitError(f"--resume-with {text}: {error}; close the quotation mark") from None
