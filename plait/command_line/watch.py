"""The live page's command, and the page served during training: parse, call, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.command_line.arguments import RunNames
from plait.errors import PlaitError
from plait.launch.local.output import OptionalOutput
from plait.process_exit import exit_code_of


def watch_command(
    runs: RunNames = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="NUMBER", help="Port of the page; a free one if left out.", min=1, max=65535),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Follow runs on a live page in your browser. It also shows finished runs."""
    from plait.page.serve import may_open_browser, watch

    output = OptionalOutput(sys.stdout)
    browser = "opened" if sys.stdout.isatty() and not no_browser and may_open_browser() else "not opened"
    stopped_by = watch(runs or [], port=port, browser=browser, write=lambda text: _write(output, text))
    raise typer.Exit(0 if stopped_by == "SIGINT" else exit_code_of(stopped_by))


@contextmanager
def page_beside(recipe: Path, overrides: Sequence[str]) -> Iterator[None]:
    """The page of a recipe's run, while the block trains it; prints the page's address.

    Raises PlaitError for a wrong recipe, and under torchrun, where each rank would serve its own page.
    """
    from plait.launch.local.torchrun import launch_variables
    from plait.page.serve import page_server
    from plait.recipe.load import load_recipe

    if launch_variables(os.environ) is not None:
        raise PlaitError(
            "--page does not work under torchrun, where every rank would serve its own page",
            "run plait watch in addition",
        )
    name = load_recipe(recipe, overrides).run.name
    with page_server([name]) as address:
        _write(OptionalOutput(sys.stdout), "\n".join(address.lines()) + "\n")
        yield


def _write(output: Any, text: str) -> None:
    """Write without wrapping, so that the address can be copied."""
    output.write(text)
    output.flush()
