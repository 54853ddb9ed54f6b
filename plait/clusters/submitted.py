"""State, output, end and files of a submitted job, by name, for all schedulers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from plait.clusters.job import ClusterSystem, Submitted, find_record, record_if_any
from plait.clusters.kubernetes import KUBERNETES
from plait.clusters.ray import RAY
from plait.clusters.rented import DSTACK, SKYPILOT
from plait.clusters.request import Scheduler
from plait.clusters.slurm import SLURM
from plait.clusters.ssh import SSH
from plait.commands.monitoring.finish import print_finished
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.report.atomic import replace_file
from plait.run_folder import run_folder
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

SYSTEMS: Mapping[Scheduler, ClusterSystem] = {
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
    "ssh": SSH,
    "ray": RAY,
    "skypilot": SKYPILOT,
    "dstack": DSTACK,
}
FETCHED_MARK = "fetched.json"
"""Marks a run's folder as a copy, which may be replaced."""


def job_state_line(name: str, working: WorkingFolder = CURRENT_FOLDER) -> str | None:
    """The state of a submitted job as its scheduler reports it; None if no job of that name was submitted."""
    record = record_if_any(name, working)
    return (
        None if record is None else f"job      {name} on {record.scheduler}: {SYSTEMS[record.scheduler].state(record)}"
    )


def missing_run_line(name: str, working: WorkingFolder = CURRENT_FOLDER) -> str | None:
    """What to do about a submitted job whose run is not in this folder; None if it is."""
    record, folder = record_if_any(name, working), run_folder(name, working)
    if record is None or folder.has_begun:
        return None
    if tasks := _tasks_text(record, working):
        return f"status   {tasks}"
    if record.scheduler in ("skypilot", "dstack"):
        return f"status   its run is on the rented machines; plait logs {name} shows its progress"
    if SYSTEMS[record.scheduler].copy is not None:
        return f"status   its run is not here; once it has begun to train, plait fetch {name} copies it"
    return f"status   it has not begun to train; plait logs {name} says how far it is, or why it ended"


def _tasks_text(record: Submitted, working: WorkingFolder) -> str:
    """Where the runs of an array's tasks are; "" where none has begun, or it is none."""
    begun = [one.name for one in run_folder(record.name, working).path.parent.glob(f"{record.name}-*")]
    numbers = [int(digits) for one in begun if (digits := one[len(record.name) + 1 :]).isdecimal()]
    if not record.is_array or not numbers:
        return ""
    return f"each task of its array has a run of its own: plait status {record.name}-{min(numbers)}"


def job_log_lines(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Iterator[str]:
    """The output of its first node so far; raises PlaitError if no such job was submitted."""
    record = find_record(name, working)
    return SYSTEMS[record.scheduler].log_lines(record, working)


def end_job(name: str, working: WorkingFolder = CURRENT_FOLDER) -> str:
    """End a job, and say how to continue it."""
    record = find_record(name, working)
    SYSTEMS[record.scheduler].end(record)
    return f"stopped  {name}; the same plait submit continues it"


def fetch_job(name: str, screen: Screen, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Copy a job's run into runs/ here, unless it is here already, and print its receipt or progress."""
    record = find_record(name, working)
    folder, system = run_folder(name, working), SYSTEMS[record.scheduler]
    if system.copy is not None:
        mark = folder.path / FETCHED_MARK
        if folder.path.exists() and not mark.exists():
            raise PlaitError(
                f"{folder.path} here is a different run, which would be overwritten; move it elsewhere first"
            )
        make_private_folder(folder.path)
        # Before the copy: one that broke off is known as a copy, too.
        replace_file(mark, f"{json.dumps({'from': record.scheduler, 'machines': record.machines})}\n".encode())
        try:
            system.copy(record, folder.path.relative_to(working.path), working, screen)
        except BaseException:
            if list(folder.path.iterdir()) == [mark]:
                mark.unlink()
                folder.path.rmdir()
            raise
    if not folder.has_begun and (tasks := _tasks_text(record, working)):
        raise PlaitError(tasks)
    if not folder.has_begun:
        raise PlaitError(f"{name} has not begun to train: {system.state(record)}; see plait logs {name}")
    if folder.is_finished:
        print_finished(folder, screen, ())
    else:
        screen.print(f"fetched  {folder.path}; it is not finished: plait status {name}")
