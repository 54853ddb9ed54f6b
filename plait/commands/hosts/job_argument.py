"""What a job's argument says of files: its folder, and the checkpoint that it goes on from."""

from __future__ import annotations

import json
from dataclasses import dataclass

from plait.errors import PlaitError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArgument:
    """The path of the folder that a job is about, and the name of a checkpoint in it or None."""

    folder: str
    resume: str | None = None


def read_job_argument(argument: str) -> JobArgument:
    """The argument is the folder's path itself, or a JSON object that holds it; raises PlaitError for anything else."""
    try:
        values = json.loads(argument) if argument.startswith("{") else {"folder": argument}
        found = JobArgument(folder=values["folder"], resume=values.get("resume"))
    except (ValueError, KeyError, RecursionError):
        found = None
    if found is None or not isinstance(found.folder, str) or not isinstance(found.resume, str | None):
        raise PlaitError("a job names no folder; install the same commit of plait on all hosts")
    return found
