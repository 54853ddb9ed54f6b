"""How the `plait` command ends: exit codes, and one sentence on stderr for all that the user can fix."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from shutil import get_terminal_size
from typing import Any, Literal, NoReturn

import typer

from plait.errors import REQUEUE_EXIT, Interrupted, PlaitError, StopSignal, file_error_sentence
from plait.launch.local.output import OptionalOutput
from plait.screen.screen import wrapped

_EXIT_OF_SIGNAL = {"finished": 0, "SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143}
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this version of typer keeps its click
_PLAINER_WORDS = (
    ("Input should be a valid integer", "it should be a whole number"),
    ("Input should be a valid number", "it should be a number"),
    ("Input should be greater than or equal to", "it should be at least"),
    ("Input should be less than or equal to", "it should be at most"),
    ("Input should be", "it should be"),
)
"""Messages of the libraries under typer about an invalid option, and plait's wording."""


def exit_code_of(stopped_by: Literal["finished", StopSignal]) -> int:
    """The exit code of a command that a signal ended with nothing lost: below Slurm a run asks to be queued again."""
    if stopped_by in ("SIGTERM", "SIGUSR1") and os.environ.get("SLURM_JOB_ID"):
        return REQUEUE_EXIT
    return _EXIT_OF_SIGNAL[stopped_by]


def exit_with_sentence(command: Callable[[], int]) -> NoReturn:
    """Carry out a command and end this process with its exit code; errors become sentences on stderr."""
    errors = OptionalOutput(sys.stderr)
    try:
        sys.exit(command())
    except PlaitError as error:
        _refuse(errors, str(error), error.exit_code)
    except _USAGE_ERROR as error:
        _refuse(errors, _usage_sentence(error), PlaitError.exit_code)
    except Interrupted as stopped:
        _refuse(errors, str(stopped), exit_code_of(stopped.signal))
    except (KeyboardInterrupt, typer.Abort):  # click turns the first into the second
        sys.exit(exit_code_of("SIGINT"))
    except OSError as error:
        if error.filename is None:
            _report_bug(errors)
        _refuse(errors, file_error_sentence(error), PlaitError.exit_code)
    except Exception:
        _report_bug(errors)


def _refuse(errors: OptionalOutput, sentence: str, code: int) -> NoReturn:
    columns = get_terminal_size().columns if errors.isatty() else None
    errors.write(f"{wrapped(f'plait: {_printable(sentence)}', columns)}\n")
    sys.exit(code)


def _report_bug(errors: OptionalOutput) -> NoReturn:
    errors.write(traceback.format_exc())
    errors.write("plait: this is a bug in plait, not in what you asked; please report it with the lines above\n")
    sys.exit(1)


def _usage_sentence(error: Any) -> str:
    """The error in the options and arguments, and the help to read."""
    text = error.format_message().rstrip(".").partition(", unable to parse")[0]
    for theirs, ours in _PLAINER_WORDS:
        text = text.replace(theirs, ours)
    return f"{text} (see {error.ctx.command_path if error.ctx else 'plait'} --help)"


def _printable(text: str) -> str:
    """The text in one line, without signs that a terminal would obey: files and names of others may hold some."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
