"""The commands that run a person's own program, and that lend a machine: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plait.command_line.arguments import Address, HostCount, ModuleOfHost, Port, ProgramOfHost, SecretFile
from plait.command_line.models import screen_on
from plait.process_exit import exit_code_of

if TYPE_CHECKING:
    from plait.commands.programs.program_file import ProgramFile


def join_command(
    at: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address where plait train or run --hosts waits.")],
    secret_file: SecretFile = None,
    program: ProgramOfHost = None,
    module: ModuleOfHost = None,
    *,
    again: Annotated[
        bool, typer.Option("--again", help="Stay: join again by itself until the run is finished.")
    ] = False,
) -> None:
    """Lend this machine to a run that another machine leads. The secret is read from PLAIT_SECRET or asked for."""
    from plait.commands.join import join, stay_joined
    from plait.errors import PlaitError

    if program and module:
        raise PlaitError("--program and -m both name the program; give the one that plait run names")
    named = _program(module, "module") if module else _program(str(program), "file") if program else None
    serve = stay_joined if again else join
    ended_by = serve(at, secret_file=secret_file, program=named, screen=screen_on(sys.stdout))
    raise typer.Exit(exit_code_of(ended_by))


def run_command(
    program: Annotated[
        str,
        typer.Argument(metavar="PROGRAM.py", help="A Python file that calls plait.spread; with -m a module's name."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="The program's own arguments, after --.")
    ] = None,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="Run a module by its name, as python -m does: plait run -m pkg.train."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="Workers of each machine; one for each GPU, or one in all, if left out.", min=1
        ),
    ] = None,
    hosts: HostCount = 1,
    address: Address = None,
    port: Port = 0,
    secret_file: SecretFile = None,
) -> None:
    """Run your own program on many devices. Over several hosts the others type plait join HOST:PORT --program."""
    from plait.commands.programs.run_program import run_program
    from plait.hosts.joining import HostsRequest

    requested = HostsRequest(n_hosts=hosts, address=address, port=port, secret_file=secret_file)
    named = _program(program, "module" if module else "file")
    ended_by = run_program(named, arguments or [], workers=workers, hosts=requested, screen=screen_on(sys.stderr))
    raise typer.Exit(exit_code_of(ended_by))


def _program(name: str, kind: Literal["file", "module"]) -> ProgramFile:
    from plait.commands.programs.program_file import ProgramFile
    from plait.commands.programs.program_module import program_module

    return program_module(name) if kind == "module" else ProgramFile(path=Path(name))
