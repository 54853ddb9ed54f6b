"""What a job's argument says of files (its folder, and the checkpoint that it goes on from), and whether a joined host
lets the job use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.commands.hosts.file_stager import JobFolder
from plait.commands.hosts.requests import CHECKPOINT_NAME, MEND_ODD_REQUEST
from plait.commands.planning.workers import MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY, TRAINING_ENTRY
from plait.errors import PlaitError
from plait.launch.remote.leader import HostPart
from plait.launch.values.job import Job
from plait.planner.plan import HostShare


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


def check_job(job: Job, may_use: Callable[[Path], bool]) -> None:
    """Raise PlaitError for a job that would read or write outside of the folders that it may use."""
    if job.entry in (MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY):  # without files
        if job.log_dir is not None:
            raise PlaitError(f"{job.entry} has no logs, and {MEND_ODD_REQUEST}")
        return
    asked = read_job_argument(job.argument)
    if asked.resume is not None and not CHECKPOINT_NAME.fullmatch(asked.resume):
        raise PlaitError(f"{asked.resume[:80]!r} is no checkpoint, and {MEND_ODD_REQUEST}")
    if job.log_dir not in (None, asked.folder, f"{asked.folder}/logs") or not may_use(Path(asked.folder)):
        raise PlaitError(f"{asked.folder[:200]} is no folder of this run on this host, and {MEND_ODD_REQUEST}")


def own_part(job: Job, ranks: int, threads: int) -> HostPart:
    """Host 0's own part of a job: the job as it is, on its own ranks."""
    return HostPart(ranks=ranks, threads=threads, argument=job.argument, log_dir=job.log_dir)


def joined_host_part(job: Job, share: HostShare, job_folder: JobFolder) -> HostPart:
    """A joined host's part of a job: the same argument, with the folder that this host has for it."""
    argument, training = job_folder.path, job.entry == TRAINING_ENTRY
    if job.argument.startswith("{"):
        sent = {"parts": "sent"} if training and not job_folder.is_shared else {}
        argument = json.dumps({**json.loads(job.argument), "folder": job_folder.path, **sent})
    log_dir = f"{job_folder.path}/logs" if training else job_folder.path
    return HostPart(ranks=share.workers, threads=share.threads, argument=argument, log_dir=log_dir)
