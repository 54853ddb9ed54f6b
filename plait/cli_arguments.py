"""Arguments and options that several commands take, and what the shell offers for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.launch.local.output import OptionalOutput
from plait.version import __version__


def _run_names() -> list[str]:
    """For the shell's completion, which itself leaves out what does not fit the word that was begun."""
    from plait.commands.planning.run_folder import run_names
    from plait.working_folder import CURRENT_FOLDER

    return run_names(CURRENT_FOLDER)


def _print_version(wanted: bool) -> None:
    if wanted:
        OptionalOutput(sys.stdout).write(f"plait {__version__}\n")
        raise typer.Exit


Recipe = Annotated[Path, typer.Argument(help="A recipe file (.toml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help='Settings to change: train.budget="60 steps" and so on.')]
RunName = Annotated[
    str, typer.Argument(help="A run, by name or folder; or a model's folder or .gguf file.", autocompletion=_run_names)
]
HostCount = Annotated[int, typer.Option("--hosts", help="Number of machines, this one included.", min=1)]
Address = Annotated[str | None, typer.Option("--address", help="Address at which other hosts reach this machine.")]
Port = Annotated[int, typer.Option("--port", help="Port where they join; 0 takes a free one.", min=0, max=65535)]
SecretFile = Annotated[Path | None, typer.Option("--secret-file", help="File with the hosts' secret, private to you.")]
WindowTokens = Annotated[int | None, typer.Option("--sequence", help="Tokens of a window.", min=2)]
Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]
