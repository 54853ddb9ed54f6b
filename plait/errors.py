"""Exceptions that end a run: errors, whose text is one sentence that says what to do, and `Interrupted`."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

StopSignal = Literal["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]
"""The signals that stop a command: Ctrl-C, what schedulers and `kill` send, the end of a terminal, and a scheduler's
warning that its time is soon over."""
REQUEUE_EXIT = 75
"""The exit code that asks a scheduler to start the run again: all is saved, and more is to do."""


class PlaitError(Exception):
    """Bad input, or a machine that does not allow the request; the text is one sentence that says what to do.

    Raised where the wrong value is known. The command line prints the sentence alone and exits with `exit_code`. Where
    a caller may say something else to do, `cause` and `advice` are given apart; else `cause` is the whole sentence.
    """

    exit_code = 2

    def __init__(self, cause: str = "", advice: str = "") -> None:
        super().__init__(f"{cause}; {advice}" if advice else cause)
        self.cause = cause
        self.advice = advice

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"plait: {self}"]


class RunFailed(PlaitError):
    """A run that had begun came to a clean stop: a worker died, the disk filled up, a peer was lost."""

    exit_code = 1


class HostLeft(RunFailed):
    """This host left a run because its user stopped it."""


class ProgramFailed(RunFailed):
    """A person's own program raised; the text names the worker, the error and the line of their code.

    `program_traceback` is that of their code, to be shown above the sentence.
    """

    def __init__(self, sentence: str, program_traceback: str = "") -> None:
        super().__init__(sentence)
        self.program_traceback = program_traceback


class OutOfTime(RunFailed):
    """A job was ended at its time limit: who set the limit knows what to do without the result."""


class GaveUp(RunFailed):
    """A run was started again and again, and got no further: no scheduler should start it once more."""

    exit_code = 93


class StartAgain(RunFailed):
    """A run needs a node that was lost, and is saved: a scheduler should start it again."""

    exit_code = REQUEUE_EXIT


class Interrupted(BaseException):
    """A signal ended what was going on, and nothing is lost; the text says which, and how a run goes on.

    Not an Exception, like KeyboardInterrupt: code that handles the exceptions of a library must not catch it.
    """

    def __init__(self, signal: StopSignal, sentence: str = "") -> None:
        super().__init__(sentence or f"stopped by {signal_in_words(signal)}")
        self.signal: StopSignal = signal

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"plait: {self}"]


def signal_in_words(signal: str) -> str:
    """What a person calls a signal: Ctrl-C for the one that a terminal sends for these keys."""
    return "Ctrl-C" if signal == "SIGINT" else signal


def file_error_sentence(error: OSError) -> str:
    """What is wrong with a file that the file system refused, and what to look at."""
    return f"{error.filename}: {error.strerror}; check that path, its rights and the room on its disk"


def check_utf8(text: str) -> None:
    """Raise PlaitError for a text that no recipe and no JSON file can hold: a path or an argument whose bytes are not
    UTF-8, which Python reads with stand-ins (surrogates) for those bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PlaitError(
            f'"{text}" is not UTF-8 text; rename that file or folder, or type the value in UTF-8'
        ) from None


_NUMPY_FOUND_NO_ROOM = re.compile(r"\d+ requested and \d+ written|Not enough free space to write \d+ bytes")


def is_out_of_space(error: OSError) -> bool:
    """Whether a write failed for want of room on the disk, or of the user's share of it. numpy's own writes leave errno
    out."""
    if error.errno is None:
        return _NUMPY_FOUND_NO_ROOM.fullmatch(str(error)) is not None
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_advice(error: OSError) -> str:
    """What to do about a file that could not be written."""
    if is_out_of_space(error):
        return "free some space"
    return "check its permissions" if error.errno in (errno.EACCES, errno.EPERM) else "check the folder and the disk"


def installing(package: str) -> str:
    """The command that brings a missing package into the environment that plait runs in."""
    tool = _environment_tool(Path(sys.prefix))
    return installing_by(package, "uv" if tool == "pip" and find_spec("pip") is None else tool, sys.executable)


def installing_by(package: str, tool: Literal["pip", "pipx", "uv"], python: str) -> str:
    """The command that brings a package into the environment of a Python, by the tool that made it."""
    if tool == "pipx":
        return shlex.join(["pipx", "inject", Path(python).parents[1].name, package])
    if tool == "uv":
        return shlex.join(["uv", "pip", "install", "--python", python, package])
    return shlex.join([python, "-m", "pip", "install", package])


def _environment_tool(prefix: Path) -> Literal["pip", "pipx", "uv"]:
    """By the file that each tool leaves in the environments that it makes."""
    if (prefix / "pipx_metadata.json").exists():
        return "pipx"
    return "uv" if (prefix / "uv-receipt.toml").exists() else "pip"
