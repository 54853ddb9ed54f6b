"""`plait check`: parse, call, print."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, NoReturn

import typer

from plait.command_line.models import screen_on
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput


def check_program_command(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND... | FILE [KEY=VALUE...]",
            help="The command that starts your program: torchrun, python or accelerate launch. Or a configuration of "
            "Axolotl, TRL, transformers, torchtitan, Megatron, DeepSpeed or litgpt, followed by values that it lacks: "
            "model=, sequence=, samples= and others.",
        ),
    ],
    context: typer.Context,
    workers: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Processes; default: the launcher's own option, else 2."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Optimizer steps to compare.")] = 6,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Stop the program midway, start it again, compare with a run without a stop."),
    ] = False,
    resume_with: Annotated[
        str | None,
        typer.Option("--resume-with", metavar="ARGUMENTS", help="Like --resume; append these to the second start."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    silent: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when the program does nothing for this long.", min=1)
    ] = 60,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when the steps take longer than this.", min=1)
    ] = 600,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINES", help='For a FILE: 8xH100, "2x(8xA100)+400G", a cluster.json; default: this one.'
        ),
    ] = None,
) -> None:
    """Prove your distributed program, or forecast a configuration file.

    With --resume, prove instead that it continues after a stop as if it had never stopped.

    Exit codes: 0 proven, 1 differs, 2 cannot be judged (with the reason). For a FILE: 0 fits, 1 does not fit or is too
    close to say.
    """
    from plait.foreign_configs.reading import is_configuration

    if command and is_configuration(command[0], command[1:], names_machines=cluster is not None):
        if resume or resume_with is not None:
            raise PlaitError("--resume is for a program; a configuration file is only read")
        _answer_for_file(context, command, cluster, as_json=json)
    if cluster is not None:
        raise PlaitError("--cluster is for a configuration file; a program is checked on this machine")
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


def _answer_for_file(context: typer.Context, words: list[str], cluster: str | None, *, as_json: bool) -> NoReturn:
    """Print the forecast of a configuration; options may also follow the file."""
    if any(word.startswith("--") for word in words[1:]):
        before = {name: value for name, value in context.params.items() if name != "command"}
        again = context.command.make_context(
            context.info_name, list(words), parent=context.parent, allow_interspersed_args=True, default_map=before
        )
        with again:
            context.command.invoke(again)
        raise typer.Exit(0)
    from plait.commands.check_file import check_configuration
    from plait.foreign_configs.answer import checked_config_json, checked_config_text

    checked = check_configuration(words[0], words[1:], cluster=cluster)
    text = checked_config_json(checked) if as_json else checked_config_text(checked)
    OptionalOutput(sys.stdout).write(text + "\n")
    raise typer.Exit(checked.exit_code)
