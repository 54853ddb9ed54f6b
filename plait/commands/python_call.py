"""A command that is called from somebody's Python program: its signals, its errors, and what it shows meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from plait.errors import PlaitError, file_error_sentence
from plait.launch.local.signals import interrupting_signals
from plait.launch.local.torchrun import torchrun_context

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


def screen_for(progress: ProgressDisplay) -> Any:
    """The screen that a call shows its progress on."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=progress == "off")
