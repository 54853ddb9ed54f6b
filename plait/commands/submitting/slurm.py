"""Slurm: sent by sbatch, found by its number, ended by scancel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plait.commands.submitting.records import Submitted, keep_record, record_if_any
from plait.commands.submitting.tools import require_tool, tool_answer
from plait.deploy.cluster_job import ClusterJob
from plait.errors import PlaitError
from plait.screen.screen import Screen
from plait.working_folder import WorkingFolder

_ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED",
    "gone",
)  # fmt: skip


def send_to_slurm(job: ClusterJob, script: str, screen: Screen, working: WorkingFolder) -> None:
    """Hand the script to sbatch, and keep the job's number; raises PlaitError where the job is queued already, or
    Slurm does not take it."""
    require_tool("sbatch", "log in where Slurm is, or add --dry-run to see what would be sent")
    name = job.run
    before = record_if_any(name, working)
    if before is not None and before.scheduler == "slurm" and not slurm_state(before)[0].startswith(_ENDED):
        state, _ = slurm_state(before)
        raise PlaitError(f"{name} is job {before.job} of Slurm already ({state}); end it first: plait stop {name}")
    said = tool_answer(["sbatch", "--parsable"], stdin=script, about=f"the job {name}")
    number = said.strip().split(";")[0].splitlines()[-1]
    record = Submitted(name=name, label=job.name, scheduler="slurm", job=number)
    keep_record(record, working)
    screen.print(f"sent     {name}: job {record.job} of Slurm, {' '.join(slurm_state(record)).strip()}")
    screen.print(f"         plait status {name}, plait logs {name}, plait stop {name}")


def slurm_state(record: Submitted) -> tuple[str, str]:
    """A job's state, and in brackets the scheduler's reason where it waits; ("gone", "") where Slurm forgot it."""
    command = ["squeue", "--noheader", "--states", "all", "--job", record.job, "--format", "%T|%r"]
    try:
        said = tool_answer(command, about=f"the job {record.name}")
    except PlaitError as error:
        if "Invalid job id" in str(error):
            return "gone", ""
        raise
    if not said.strip():
        return "gone", ""
    state, _, reason = said.strip().splitlines()[0].partition("|")
    return state, f"({_reason_text(reason)})" if state == "PENDING" and reason != "None" else ""


def _reason_text(reason: str) -> str:
    """The scheduler's reason in words, for those that newcomers meet most."""
    words = {
        "Resources": "waits for nodes that are free",
        "Priority": "others are before it",
        "PartitionTimeLimit": "it waits for ever: the partition allows less time, so submit it with less --time",
        "PartitionNodeLimit": "it waits for ever: the partition has fewer nodes, so submit it with fewer --nodes",
        "PartitionConfig": "it waits for ever: the partition allows less time, or has fewer nodes; submit it with less",
        "BadConstraints": "no node is as asked: sinfo shows what there is",
        "ReqNodeNotAvail": "a node that it needs is down or reserved",
        "QOSMaxJobsPerUserLimit": "you have as many jobs running as you may",
        "AssocGrpGRES": "your account has no more GPUs free",
        "BeginTime": "was queued again, and starts in a moment",
        "JobHeldUser": "it waits for ever: it is held, scontrol release lets it go",
        "JobHeldAdmin": "it waits for ever: an administrator holds it, ask there",
        "launch failed requeued held": "it waits for ever: it could not be started, and is held; scontrol release "
        "tries again",
        "InvalidAccount": "it waits for ever: sacctmgr show associations lists the accounts that you may use",
        "InvalidQOS": "it waits for ever: sacctmgr show qos lists the qualities of service",
    }
    return words.get(reason.partition(",")[0], reason)


def slurm_log(record: Submitted, working: WorkingFolder) -> Path:
    """Where the job's output is."""
    return working.path / f"{record.label}-{record.job}.log"


def slurm_log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    """What the job has printed so far."""
    file = slurm_log(record, working)
    if not file.is_file():
        state, why = slurm_state(record)
        raise PlaitError(f"{record.name} has printed nothing yet: it is {state} {why}".strip() + "; look again later")
    with file.open(encoding="utf-8", errors="replace") as text:
        yield from (line.rstrip("\n") for line in text)


def end_in_slurm(record: Submitted) -> None:
    """Tell Slurm to end a job; what runs is saved first."""
    tool_answer(["scancel", record.job], about=f"the job {record.name}")
