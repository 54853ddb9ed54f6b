"""The ways a run ends badly, each told in one sentence with its mend, and one in which nothing is bad."""

from __future__ import annotations

import shlex
import sys


class PlaitError(Exception):
    """Bad input or a world that does not allow what was asked; the text is one sentence with the mend.

    Raised where the wrong value is known. The command line prints the sentence alone and exits with `exit_code`.
    """

    exit_code = 2


class RunFailed(PlaitError):
    """A run that had begun came to a clean stop: a worker died, the disk filled up, a peer was lost."""

    exit_code = 1


class Interrupted(BaseException):
    """A signal came while nothing was lost by stopping at once; the text is its name.

    Like KeyboardInterrupt no Exception: who mends what a library may raise is not to mend this.
    """


def installing(package: str) -> str:
    """The command that brings a missing package into the environment that plait runs in."""
    return shlex.join([sys.executable, "-m", "pip", "install", package])
