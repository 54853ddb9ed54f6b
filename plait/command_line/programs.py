"""The commands that run a person's own program, and that lend a machine: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.command_line.arguments import Address, HostCount, Port, ProgramOfHost, SecretFile
from plait.command_line.models import screen_on
from plait.process_exit import exit_code_of


def join_command(
    at: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address where plait train or run --hosts waits.")],
    secret_file: SecretFile = None,
    program: ProgramOfHost = None,
) -> None:
    """Lend this machine to a run that another machine leads. The secret is read from PLAIT_SECRET or asked for."""
    from plait.commands.join import join

    ended_by = join(at, secret_file=secret_file, program=program, screen=screen_on(sys.stdout))
    raise typer.Exit(exit_code_of(ended_by))


def run_command(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM.py", help="A Python file that calls plait.spread.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="The program's own arguments, after --.")
    ] = None,
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
    ended_by = run_program(program, arguments or [], workers=workers, hosts=requested, screen=screen_on(sys.stderr))
    raise typer.Exit(exit_code_of(ended_by))
