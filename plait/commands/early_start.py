"""Starts the process that imports torch for the workers while a command still imports what it needs itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from plait.launch.local.run import ForkServer
from plait.launch.local.torchrun import launch_variables
from plait.recipe.load import load_recipe
from plait.workers import ENTRIES


@contextmanager
def early_server(recipe: Path, overrides: Sequence[str], n_hosts: int) -> Iterator[ForkServer | None]:
    """The fork server of a run on this machine alone; None over several hosts, which join first, and under torchrun.
    Raises PlaitError for a wrong recipe, before anything is started."""
    if n_hosts > 1 or launch_variables(os.environ) is not None:
        yield None
        return
    load_recipe(recipe, overrides)
    with ExitStack() as stack:
        started = None
        with suppress(OSError):  # the command has more to check first, and says so when it needs workers
            started = stack.enter_context(ForkServer(ENTRIES))
        yield started
