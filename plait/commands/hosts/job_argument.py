"""What a job says of files (its folder, the checkpoint that it goes on from, the data and the model in its plan), and
whether a joined host lets it use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.commands.hosts.file_stager import JobFolder
from plait.commands.hosts.file_transfer import IncomingFolder
from plait.commands.hosts.requests import CHECKPOINT_NAME, MEND_ODD_REQUEST
from plait.data.shards import open_corpus
from plait.errors import PlaitError
from plait.interop.base_model import CONFIG, needed_files, read_base_model
from plait.launch.remote.leader import HostPart
from plait.launch.values.job import Job
from plait.planner.plan import HostShare, Plan
from plait.workers import (
    MACHINE_CHECK_ENTRY,
    MEASURE_ENTRY,
    PROBE_ENTRY,
    PRODUCTS_ENTRY,
    TRAINING_ENTRY,
)


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
    if job.entry in (MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY, MACHINE_CHECK_ENTRY):  # without files
        if job.log_dir is not None:
            raise PlaitError(f"{job.entry} has no logs, and {MEND_ODD_REQUEST}")
        return
    asked = read_job_argument(job.argument)
    if asked.resume is not None and not CHECKPOINT_NAME.fullmatch(asked.resume):
        raise PlaitError(f"{asked.resume[:80]!r} is no checkpoint, and {MEND_ODD_REQUEST}")
    if job.log_dir not in (None, asked.folder, f"{asked.folder}/logs") or not may_use(Path(asked.folder)):
        raise PlaitError(f"{asked.folder[:200]} is no folder of this run on this host, and {MEND_ODD_REQUEST}")


class ReceivedFolders:
    """Prepared data and models that host 0 has itself: all their files were offered to this host, and are here as it
    has them."""

    def __init__(self) -> None:
        self._corpora, self._models = set[Path](), set[Path]()

    def forget(self, folder: Path) -> None:
        """Files are about to be offered for a folder: until they are here it is not to be used."""
        self._corpora.discard(folder)
        self._models.discard(folder)

    def admit(self, incoming: IncomingFolder) -> None:
        """Let jobs use what was offered as soon as it is complete. Raises PlaitError where its index, or its config,
        names files that were not offered: host 0 may not know them, as those of another run on this host."""
        if not incoming.is_complete:
            return
        if "index.json" in incoming.hashes:
            for entry in open_corpus(incoming.folder).entries:
                if not entry.files.items() <= incoming.hashes.items():
                    raise PlaitError(f"the data offered lack files of {entry.name}, and {MEND_ODD_REQUEST}")
            self._corpora.add(incoming.folder)
        elif CONFIG in incoming.hashes:
            if not set(needed_files(read_base_model(incoming.folder))) <= incoming.hashes.keys():
                raise PlaitError(f"the model offered lacks files of its own, and {MEND_ODD_REQUEST}")
            self._models.add(incoming.folder)

    def allow(self, plan: Plan) -> bool:
        """Whether the data and the model of a plan are among what was received."""
        return Path(plan.job.corpus) in self._corpora and (not plan.job.base or Path(plan.job.base) in self._models)


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
