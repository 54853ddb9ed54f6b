"""A command that is called from somebody's Python program: its signals, its errors, and what it shows meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console

from plait.errors import PlaitError, file_error_sentence
from plait.launch.local.signals import interrupting_signals
from plait.launch.local.torchrun import torchrun_context
from plait.screen.notebook import NotebookScreen, notebook_output
from plait.screen.screen import Screen, SilentScreen
from plait.screen.terminal import TerminalScreen

ProgressDisplay = Literal["auto", "lines", "off"]
"""What is shown while work goes on: "auto" draws a bar in a notebook or on a terminal, "lines" prints what the command
prints, "off" shows nothing."""


@contextmanager
def as_command() -> Iterator[None]:
    """Within the block a stop signal raises Interrupted and a file that cannot be used PlaitError, as for a command.

    Raises PlaitError under torchrun: its other ranks would have no value to return.
    """
    if torchrun_context() is not None:
        raise PlaitError("from Python plait starts its workers itself; start this program without torchrun")
    try:
        with interrupting_signals():
            yield
    except OSError as error:
        if error.filename is None:
            raise
        raise PlaitError(file_error_sentence(error)) from error


def screen_for(progress: ProgressDisplay) -> Screen:
    """The screen that a call shows its progress on."""
    if progress == "off":
        return SilentScreen()
    if progress == "lines":
        return TerminalScreen(Console(file=sys.stdout))
    if show_html := notebook_output():
        return NotebookScreen(show_html)
    return TerminalScreen(Console()) if sys.stdout.isatty() else SilentScreen()
