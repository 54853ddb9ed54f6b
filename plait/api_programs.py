"""plait from Python, for programs of one's own: a function run on several workers, from a notebook or a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plait.arguments import check_arguments
from plait.commands.python_call import ProgressDisplay, as_command, screen_for
from plait.errors import Interrupted
from plait.working_folder import Place, named_folder


def run(
    function: Callable[[], Any],
    *,
    workers: int | None = None,
    progress: ProgressDisplay = "lines",
    folder: Place = None,
) -> None:
    """Run a function without arguments on `workers` fresh workers of this machine; blocks until all have returned.

    Its source is written to a file, which each worker runs: it sees what it imports and defines itself, and nothing of
    the notebook; what it returns is dropped. Raises PlaitError for a closure, ProgramFailed where it raises.
    """
    from plait.commands.programs.function_source import function_program
    from plait.commands.programs.run_program import run_program

    check_arguments(workers=workers, progress=progress)
    working = named_folder(folder)
    text = function_program(function)
    with TemporaryDirectory(prefix="plait-function-") as name, as_command():
        path = Path(name) / f"{function.__name__}.py"
        path.write_text(text, encoding="utf-8")
        ended_by = run_program(path, workers=workers, screen=screen_for(progress), working=working)
    if ended_by != "finished":
        raise Interrupted(ended_by)
